"""`ops.Ops` on the native module: owns which native call an operation is and the tensors its result lands in.

Every check of shapes and dtypes is the module's (ValueError); weights stay as stored, KV pages are bfloat16. The numerics of
each operation are written down in `docs/kernels.md`.
"""

from __future__ import annotations

from engine import _native
from engine.cores import own_cores, physical_cores
from engine.kernels.cpu_joined import CpuJoined, floats, stored
from engine.kernels.ops import KVLayer, Quant, Segments, StateLayer, Weight
from engine.lean import torch
from engine.models.spec import DeltaNetSpec, MoeSpec
from engine.numa import spread
from engine.tensors import CPU, bfloat16, library_of

ABI = 8  # of the module these calls are written for (native/cpu.h)
if getattr(_native, "ABI", 0) != ABI:
    found = getattr(_native, "ABI", "none")
    raise ImportError(f"{_native.__file__} was built from other sources (interface {found}, not {ABI}): run ops/build_native")

NEITHER = (None, None)


class CpuOps:
    """Kernels for this machine's instruction set.

    `threads` 0 means one for each core this process may use; each stays on its core if the cores were set apart for it.
    `isa` names an older set ("base", "avx2", "avx512", "avx512vnni") to run instead of the best one. Raises ValueError if the
    machine does not run it.
    """

    name = "cpu"
    device = CPU
    kv_dtype = bfloat16
    quant_types = frozenset(_native.TYPES)
    weight_bytes = None
    maps = getattr(_native, "MAPS", False)  # a module built before it knew how copies everything
    guards = getattr(_native, "GUARDS", False)  # half layers on experts that have a `Guard`; older modules ask for them

    def __init__(self, threads: int = 0, isa: str = "") -> None:
        threads = threads or len(physical_cores())
        cores = spread(own_cores(), threads)
        self.bound = len(cores) == threads  # to its cores, every thread but the caller's
        self._ops = _native.Ops(threads, isa, cores if self.bound else [])

    @property
    def joined(self) -> CpuJoined:
        """Half layers in one call each."""
        return CpuJoined(self._ops)

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._ops.isa

    @property
    def numerics(self) -> str:
        """Equal only for kernels whose results are equal bit by bit."""
        return f"{self.name}-{self.isa}-{_native.NUMERICS}"

    @property
    def threads(self) -> int:
        return self._ops.threads

    def prepare(self, weight: Weight) -> Weight:
        """Vectors (norms, biases) become float32; matrices stay as they are."""
        if isinstance(weight, Quant):
            if weight.type not in _native.TYPES:
                raise ValueError(f"weight type {weight.type} has no kernel; supported: {', '.join(_native.TYPES)}")
            return Quant(weight.data.contiguous(), weight.type, weight.cols)
        return weight.float().contiguous() if weight.dim() == 1 else weight.contiguous()

    def embed(self, table: Weight, ids: torch.Tensor) -> torch.Tensor:
        data, kind = stored(table)
        out = library_of(ids).empty(ids.shape[0], table.shape[-1])
        self._ops.embed(out, data, kind, ids)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape)
        self._ops.rms_norm(out, x, floats(weight), eps, plus_one)
        return out

    def add_norm(self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = x.new_empty(x.shape)
        self._ops.add_norm(out, x, added, weight, eps)
        return out

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
        self._ops.turn_heads(x, q_heads, k_heads, *(norms or NEITHER), eps, *(rope or NEITHER), interleaved)
        return x

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        data, kind = stored(weight)
        out = x.new_empty(x.shape[0], data.shape[0])
        self._ops.linear(out, x.contiguous(), data, kind, floats(bias))
        return out

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape)
        self._ops.rope(out, x, cos.contiguous(), sin.contiguous(), interleaved)
        return out

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
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = q.new_empty(q.shape)
        self._ops.attention(out, q, k, v, kv.k, kv.v, seg.cu, seg.start, seg.pages, scale, window or 0)
        return out

    def heads_linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        data, kind = stored(weight)
        out = x.new_empty(*x.shape[:2], data.shape[1])
        self._ops.heads_linear(out, x.contiguous(), data, kind)
        return out

    def latent_attention(
        self, q: torch.Tensor, latent: torch.Tensor, kv: KVLayer, seg: Segments, scale: float, rank: int
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], rank)
        self._ops.latent_attention(out, q.contiguous(), latent.contiguous(), kv.k, seg.cu, seg.start, seg.pages, scale)
        return out

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
        out = qkv.new_empty(qkv.shape[0], spec.value_heads, spec.value_dim)
        conv, dt_bias, a_log = (floats(weights[name]) for name in ("conv", "dt_bias", "a_log"))
        qkv, a, b = qkv.contiguous(), a.contiguous(), b.contiguous()
        self._ops.delta_net(out, qkv, a, b, conv, dt_bias, a_log, state.conv, state.s, seg.cu, seg.slot, seg.kept)
        return out

    def gated_norm(self, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape)
        self._ops.gated_norm(out, x, z.contiguous(), floats(weight), eps)
        return out

    def gate_mul(self, gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
        up = up.contiguous()
        out = up.new_empty(up.shape)
        self._ops.gate_mul(out, gate.expand_as(up).contiguous(), up, act)
        return out

    def route(self, logits: torch.Tensor, spec: MoeSpec, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        ids = logits.new_empty(logits.shape[0], spec.top_k, dtype=library_of(logits).int32)
        weights = logits.new_empty(logits.shape[0], spec.top_k)
        rule = (spec.score == "sigmoid", spec.renorm, spec.scale, spec.groups, spec.top_groups, spec.group_best)
        self._ops.route(ids, weights, logits.contiguous(), floats(bias), *rule)
        return ids, weights

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
        up, down = stored(gate_up), stored(down)
        x = x.contiguous()
        out = x.new_empty(x.shape)
        self._ops.moe(out, x, ids.contiguous(), weights.contiguous(), *up, *down, act, place)
        return out

    def expert_rows(
        self, x: torch.Tensor, ids: torch.Tensor, gate_up: Weight, down: Weight, act: str, place: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.moe(x, ids[:, None], torch.ones(len(ids), 1), gate_up, down, act, place)

    def moe_arriving(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        act: str,
        place: torch.Tensor,
        coming: list[tuple[int, int]],
        reader: _native.Reader,
    ) -> tuple[torch.Tensor, list[int], float]:
        """`moe` on slots into which `coming` (expert, key of `reader`) are still read, each computed as far as it is there.

        Returns the result, or nothing of worth beside the keys that did not come, and the seconds it waited for them.
        """
        up, low = stored(gate_up), stored(down)
        x = x.contiguous()
        out = x.new_empty(x.shape)
        lost, waited = self._ops.moe_arriving(
            out, x, ids.contiguous(), weights.contiguous(), *up, *low, act, place, coming, reader
        )
        return out, lost, waited

    def moe_merge(self, parts: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = parts.new_empty(parts.shape[0], parts.shape[2])
        self._ops.moe_merge(out, parts.contiguous(), ids.contiguous(), weights.contiguous())
        return out
