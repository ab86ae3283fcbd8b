"""`ops.Ops` on a CUDA device: owns which kernels an operation is. Not yet run on a GPU (docs/kernels.md).

Activations, weights, caches and `Segments` are tensors of `device`; the decoder brings a batch there once a step.
"""

from __future__ import annotations

import torch
import triton

from engine.kernels.cuda import attention, delta, experts, products, rows
from engine.kernels.cuda.device import find_device
from engine.kernels.cuda.formats import FORMATS
from engine.kernels.ops import KVLayer, Quant, Segments, StateLayer, Weight
from engine.models.spec import DeltaNetSpec, MoeSpec

NUMERICS = 1  # raised when a change of the kernels changes bits: cached tokens belong to the kernels that computed them
FLOATS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
FEW_TILES = 512  # of a product with one program each that fill any device; with fewer, spans of columns get programs of their own


class CudaOps:
    """Raises DeviceError when there is no device these kernels run on."""

    name = "cuda"
    kv_dtype = torch.bfloat16
    quant_types = frozenset(kind for kind, found in FORMATS.items() if found.block)
    weight_bytes = None

    def __init__(self) -> None:
        found = find_device()
        self.device, self._arch = found.device, found.arch

    @property
    def numerics(self) -> str:
        """Equal only for kernels whose results are equal bit by bit."""
        return f"{self.name}-{self._arch}-{NUMERICS}"

    def prepare(self, weight: Weight) -> Weight:
        """Onto the device; vectors become float32, matrices stay as stored."""
        if isinstance(weight, Quant):
            if weight.type not in self.quant_types:
                raise ValueError(f"weight type {weight.type} has no kernel; supported: {', '.join(sorted(self.quant_types))}")
            return Quant(weight.data.to(self.device).contiguous(), weight.type, weight.cols)
        if weight.dim() == 1:
            weight = weight.float()
        return weight.to(self.device).contiguous()

    def embed(self, table: Weight, ids: torch.Tensor) -> torch.Tensor:
        return products.table_rows(*_stored(table), ids)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        data, kind, cols = _stored(weight)
        x = _in_rows(x)
        width = products.FEW if x.shape[0] <= products.FEW else products.MANY
        tiles = triton.cdiv(data.shape[0], products.TILE) * triton.cdiv(x.shape[0], width)
        return products.linear(x, data, kind, cols, bias, width, tiles < FEW_TILES)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
        return rows.norm(x, weight, eps, plus_one=plus_one)

    def add_norm(self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rows.norm(x, weight, eps, added=added.contiguous())

    def gated_norm(self, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rows.norm(x, weight, eps, z=z)

    def turn_heads(
        self,
        x: torch.Tensor,
        q_heads: int,
        k_heads: int,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
        interleaved: bool,
    ) -> torch.Tensor:
        return rows.turn(_in_rows(x), q_heads, q_heads + k_heads, norms, eps, rope, interleaved)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        return rows.turn(_in_rows(x), x.shape[1], x.shape[1], None, 0.0, (cos, sin), interleaved)

    def gate_mul(self, gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
        return rows.gate_mul(gate, up, act)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: KVLayer,
        seg: Segments,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        attention.write_pages(_in_rows(k), kv.k, seg)
        attention.write_pages(_in_rows(v), kv.v, seg)
        return attention.attend(_in_rows(q), kv, seg, scale, window)

    def heads_linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        return products.heads_linear(_in_rows(x), *_stored(weight))

    def latent_attention(
        self, q: torch.Tensor, latent: torch.Tensor, kv: KVLayer, seg: Segments, scale: float, rank: int
    ) -> torch.Tensor:
        attention.write_pages(_in_rows(latent[:, None]), kv.k, seg)
        return attention.attend(_in_rows(q), kv, seg, scale, tail=latent.shape[1] - rank)

    def delta_net(
        self,
        qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        weights: dict[str, torch.Tensor],
        state: StateLayer,
        seg: Segments,
        spec: DeltaNetSpec,
    ) -> torch.Tensor:
        if seg.kept is None:
            return delta.delta_net(_in_rows(qkv), _in_rows(a), _in_rows(b), weights, state, seg, spec)
        return self._delta_net_in_parts((qkv, a, b), weights, state, seg, spec)

    def _delta_net_in_parts(
        self, x: tuple[torch.Tensor, ...], weights: dict[str, torch.Tensor], state: StateLayer, seg: Segments, spec: DeltaNetSpec
    ) -> torch.Tensor:
        """With states to keep on the way: up to there first, then the rest."""
        out = torch.empty(len(x[0]), spec.value_heads, spec.value_dim, dtype=torch.float32, device=x[0].device)
        cu, kept, slots = seg.cu.tolist(), seg.kept.tolist(), seg.slot.tolist()
        middle = [cu[i] + count if to >= 0 else cu[i + 1] for i, (count, to) in enumerate(kept)]
        for begin, end in ((cu[:-1], middle), (middle, cu[1:])):
            who = [i for i in range(len(kept)) if begin[i] < end[i]]
            rows = torch.cat([torch.arange(begin[i], end[i]) for i in who]).to(out.device)
            borders = torch.tensor([0, *(end[i] - begin[i] for i in who)]).cumsum(0).int().to(out.device)
            part = Segments(borders, seg.start[who], seg.pages[who], seg.slot[who])
            out[rows] = self.delta_net(*(t[rows] for t in x), weights, state, part, spec)
            for slot, (_, to) in zip(slots, kept, strict=True) if end is middle else ():
                if to >= 0:
                    state.conv[to], state.s[to] = state.conv[slot], state.s[slot]
        return out

    def route(self, logits: torch.Tensor, spec: MoeSpec, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.route(_in_rows(logits), spec, bias)

    def moe(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        act: str,
        place: torch.Tensor | None = None,
    ) -> torch.Tensor:
        parts = experts.expert_rows(_in_rows(x), ids.contiguous().view(-1), _stored(gate_up), _stored(down), act, place)
        return self.moe_merge(parts.view(*ids.shape, -1), ids, weights)

    def expert_rows(
        self, x: torch.Tensor, ids: torch.Tensor, gate_up: Weight, down: Weight, act: str, place: torch.Tensor | None = None
    ) -> torch.Tensor:
        return experts.expert_rows(_in_rows(x), ids.contiguous(), _stored(gate_up), _stored(down), act, place)

    def moe_merge(self, parts: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return experts.merge(parts.contiguous(), ids.contiguous(), weights.contiguous())


def _stored(weight: Weight) -> tuple[torch.Tensor, str, int]:
    """The tensor that holds a weight, its format, its columns."""
    if isinstance(weight, Quant):
        return weight.data, weight.type, weight.cols
    return weight, FLOATS[weight.dtype], weight.shape[-1]


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, with every row in one run: kernels take the distance of two rows only."""
    return x if x[0].is_contiguous() else x.contiguous()
