"""From the names in a checkpoint to the canonical names of `spec`: the vocabulary of the families' tables.

A table maps a checkpoint name to where it goes. In both, `{L}` stands for the layer index; in the checkpoint name `{E}` stands
for the expert index, when each expert is a tensor of its own. The target is a canonical name without its layer prefix, or
`part#name` when the tensor is only the gate or up half of `moe.gate_up`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from engine.models.spec import AttentionSpec, DeltaNetSpec, LatentSpec, ModelSpec, MoeSpec

_NUMBERED = re.compile(r"(?<=\bexperts\.)\d+|(?<=\blayers\.)\d+|(?<=\bblk\.)\d+")


# Matrices that read the same rows are stored one below the other where they are of one type: one product instead of several.
# joined name -> its parts in row order; those a layer does not have are left out
JOINED = {
    "attn.in": ("attn.q", "attn.k", "attn.v"),
    "mla.in": ("mla.q", "mla.q_a", "mla.kv_a"),
    "delta.in": ("delta.qkv", "delta.z", "delta.b", "delta.a"),
    "mlp.in": ("mlp.gate", "mlp.up"),
    "moe.in": ("moe.router", "moe.shared.switch", "moe.shared.gate", "moe.shared.up"),
}
TURNED = ("mla.k_b",)  # a checkpoint multiplies the latent by it, we multiply the query by its transpose
_JOINED_OF = {part: joined for joined, parts in JOINED.items() for part in parts}


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and its place: all of canonical tensor `name`, or one expert and/or half of it."""

    source: str
    name: str
    expert: int | None = None
    part: str = ""  # "" whole | "gate" first half of the rows | "up" second half
    rows: tuple[int, ...] | None = None  # the rows of the source to take, in this order; None = all as they are
    turned: bool = False  # the matrices of a stack [heads, N, K], whose rows were taken, are stored as [K, N] each


def unnumbered(local: str) -> str:
    """A checkpoint name with `{L}` for every number, as tables without experts have it."""
    return _NUMBERED.sub("{L}", local)


def split(source: str, local: str, table: Mapping[str, Callable], spec: ModelSpec) -> list[Piece]:
    """The pieces of a tensor that holds several canonical ones; [] when no row of the family's `SPLITS` matches."""
    layer = next(iter(_NUMBERED.findall(local)), "")
    rows_of = table.get(unnumbered(local))
    if rows_of is None or int(layer) >= len(spec.layers):
        return []
    rows = rows_of(spec.layers[int(layer)].mixer).items()
    return [Piece(source, f"{layer}.{name}", rows=some, turned=name in TURNED) for name, some in rows]


def place(source: str, local: str, table: Mapping[str, str]) -> Piece | None:
    """Where the tensor `source`, called `local` once the checkpoint's prefix is off, goes; None when no row matches."""
    numbers = []

    def lift(match: re.Match[str]) -> str:
        numbers.append(int(match.group()))
        return "{L}" if len(numbers) == 1 else "{E}"

    target = table.get(_NUMBERED.sub(lift, local))
    if target is None:
        return None
    part, _, name = target.rpartition("#")
    return Piece(source, f"{numbers[0]}.{name}" if numbers else name, numbers[1] if len(numbers) > 1 else None, part)


def joined(names: Iterable[str], kind: Callable[[str], object]) -> list[tuple[str, list[str]]]:
    """Group canonical names for loading: (joined name, parts) where all parts are of one `kind`, else (name, [name])."""
    names, done, out = list(names), set(), []
    present = set(names)
    for name in names:
        layer, _, local = name.partition(".")
        whole = _JOINED_OF.get(local)
        parts = [f"{layer}.{part}" for part in JOINED[whole] if f"{layer}.{part}" in present] if whole else []
        if len(parts) < 2 or len({kind(part) for part in parts}) > 1:
            out.append((name, [name]))
        elif parts[0] not in done:
            out.append((f"{layer}.{whole}", parts))
            done.add(parts[0])
    return out


def unpaired_rows(heads: int, dim: int) -> tuple[int, ...]:
    """Undo the row order in which the two halves of each rotation are neighbours: halves first, pair by pair, per head."""
    return tuple(h * dim + 2 * i + half for h in range(heads) for half in range(2) for i in range(dim // 2))


def grouped_rows(groups: int, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Rows of each part in a matrix made of `groups` groups, each holding `sizes` rows of every part in turn."""
    starts, whole = [sum(sizes[:i]) for i in range(len(sizes))], sum(sizes)
    return [
        tuple(g * whole + start + i for g in range(groups) for i in range(size))
        for start, size in zip(starts, sizes, strict=True)
    ]


def qkvz_rows(d: DeltaNetSpec) -> dict[str, tuple[int, ...]]:
    """Qwen3-Next's first DeltaNet projection: for each key head its q, its k, and the v and z of its value heads."""
    values = d.value_heads // d.key_heads * d.value_dim
    q, k, v, z = grouped_rows(d.key_heads, (d.key_dim, d.key_dim, values, values))
    return {"delta.qkv": (*q, *k, *v), "delta.z": z}


def ba_rows(d: DeltaNetSpec) -> dict[str, tuple[int, ...]]:
    """Qwen3-Next's second DeltaNet projection: for each key head the b, then the a of its value heads."""
    repeat = d.value_heads // d.key_heads
    b, a = grouped_rows(d.key_heads, (repeat, repeat))
    return {"delta.b": b, "delta.a": a}


def kv_b_rows(m: LatentSpec) -> dict[str, tuple[int, ...]]:
    """What makes keys and values out of the latent: for each head the rows of its key, then those of its value."""
    k, v = grouped_rows(m.heads, (m.nope_dim, m.value_dim))
    return {"mla.k_b": k, "mla.v_b": v}


def untiled_rows(offset: int, key_heads: int, repeat: int, dim: int) -> tuple[int, ...]:
    """Undo the order (repeat, key head) of value heads, `dim` rows each, behind `offset` rows that stay."""
    heads = (r * key_heads + k for k in range(key_heads) for r in range(repeat))
    return (*range(offset), *(offset + h * dim + i for h in heads for i in range(dim)))


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor the decoder will ask for, with its shape, in the order it is used."""
    hidden = spec.hidden
    out: dict[str, tuple[int, ...]] = {"embed": (spec.vocab, hidden)}
    for i, layer in enumerate(spec.layers):
        mixer = _MIXERS[type(layer.mixer)](layer.mixer, hidden)
        ffn = _moe(layer.ffn, hidden) if isinstance(layer.ffn, MoeSpec) else _mlp("mlp.", layer.ffn.inter, hidden)
        for name, shape in {"mixer_norm": (hidden,), "ffn_norm": (hidden,), **mixer, **ffn}.items():
            out[f"{i}.{name}"] = shape
    out["final_norm"] = (hidden,)
    if not spec.tie_embeddings:
        out["head"] = (spec.vocab, hidden)
    return out


def _attention(a: AttentionSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    rows = {"q": q * (2 if a.output_gate else 1), "k": kv, "v": kv}
    out: dict[str, tuple[int, ...]] = {f"attn.{name}": (n, hidden) for name, n in rows.items()}
    out["attn.o"] = (hidden, q)
    if a.bias:
        out |= {f"attn.{name}_bias": (n,) for name, n in rows.items()}
    if a.o_bias:
        out["attn.o_bias"] = (hidden,)
    if a.qk_norm:
        out |= {"attn.q_norm": (a.head_dim,), "attn.k_norm": (a.head_dim,)}
    return out


def _latent(m: LatentSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    queries = m.heads * (m.nope_dim + m.rope_dim)
    out: dict[str, tuple[int, ...]] = {"mla.q": (queries, hidden)}
    if m.q_rank:
        out = {"mla.q_a": (m.q_rank, hidden), "mla.q_a_norm": (m.q_rank,), "mla.q_b": (queries, m.q_rank)}
    return out | {
        "mla.kv_a": (m.row, hidden),
        "mla.kv_a_norm": (m.rank,),
        "mla.k_b": (m.heads, m.rank, m.nope_dim),
        "mla.v_b": (m.heads, m.value_dim, m.rank),
        "mla.o": (hidden, m.heads * m.value_dim),
    }


def _delta(d: DeltaNetSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    values = d.value_heads * d.value_dim
    return {
        "delta.qkv": (d.conv_channels, hidden),
        "delta.z": (values, hidden),
        "delta.b": (d.value_heads, hidden),
        "delta.a": (d.value_heads, hidden),
        "delta.conv": (d.conv_channels, d.conv_kernel),
        "delta.dt_bias": (d.value_heads,),
        "delta.a_log": (d.value_heads,),
        "delta.norm": (d.value_dim,),
        "delta.o": (hidden, values),
    }


_MIXERS = {AttentionSpec: _attention, LatentSpec: _latent, DeltaNetSpec: _delta}


def _mlp(prefix: str, inter: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}gate": (inter, hidden), f"{prefix}up": (inter, hidden), f"{prefix}down": (hidden, inter)}


def _moe(m: MoeSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {
        "moe.router": (m.experts, hidden),
        "moe.gate_up": (m.experts, 2 * m.inter, hidden),
        "moe.down": (m.experts, hidden, m.inter),
    }
    if m.bias:
        out["moe.router_bias"] = (m.experts,)
    if m.shared_inter:
        out |= _mlp("moe.shared.", m.shared_inter, hidden)
    if m.shared_switch:
        out["moe.shared.switch"] = (1, hidden)
    return out
