"""What a decoder is, as data. A family file builds one `ModelSpec` from a checkpoint's config; `nn.decoder` runs it.

All sizes are in elements. Weight shapes are those of `torch.nn.functional.linear`: `[out, in]`.
Canonical weight names (what `load` hands to the decoder), L = layer index:

    embed [V, H] · final_norm [H] · head [V, H] (absent when tied)
    L.mixer_norm [H] · L.ffn_norm [H]
    L.attn.q [Hq*D (x2 with output_gate: per head q then gate), H] · L.attn.k / L.attn.v [Hkv*D, H] · L.attn.o [H, Hq*D]
    L.attn.q_norm / k_norm [D] · L.attn.q_bias / k_bias / v_bias / o_bias
    L.mla.q [Hq*(Dn+Dr), H], or L.mla.q_a [Rq, H] · L.mla.q_a_norm [Rq] · L.mla.q_b [Hq*(Dn+Dr), Rq]
    L.mla.kv_a [R+Dr, H] · L.mla.kv_a_norm [R] · L.mla.k_b [Hq, R, Dn] · L.mla.v_b [Hq, Dv, R] · L.mla.o [H, Hq*Dv]
    L.delta.qkv [2*Hk*Dk + Hv*Dv, H] · L.delta.z [Hv*Dv, H] · L.delta.b / L.delta.a [Hv, H] · L.delta.conv [C, K]
    L.delta.dt_bias / L.delta.a_log [Hv] · L.delta.norm [Dv] · L.delta.o [H, Hv*Dv]
    L.mlp.gate / L.mlp.up [I, H] · L.mlp.down [H, I]
    L.moe.router [E, H] · L.moe.router_bias [E] · L.moe.gate_up [E, 2I, H] (gate rows first) · L.moe.down [E, H, I]
    L.moe.shared.gate / up / down like mlp · L.moe.shared.switch [1, H]

Matrices over the same rows may share memory: `L.attn.in`, `L.mla.in`, `L.delta.in`, `L.mlp.in`, `L.moe.in`
(`models.names.JOINED`) are then there too, and the parts are views of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding over the first `dim` elements of a head, half-split ("neox") pairing unless `interleaved`."""

    dim: int
    theta: float
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    interleaved: bool = False
    divisors: tuple[float, ...] = ()  # each frequency divided by its own number, as GGUF files carry Llama 3.1's scaling


@dataclass(frozen=True)
class AttentionSpec:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    qk_norm: bool = False  # RMS norm over each head of q and k before rope (Qwen3)
    output_gate: bool = False  # attention output times sigmoid(gate), gate from the q projection (Qwen3-Next/3.5)
    bias: bool = False  # on q, k and v
    o_bias: bool = False
    window: int | None = None  # sliding window in tokens, None = full


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are linear in one latent.

    A token caches that latent, `rank` values, and the rotated key all heads share, `rope_dim` values.
    """

    heads: int
    q_rank: int | None  # queries too come from a latent, None = straight from the hidden state
    rank: int
    nope_dim: int  # of a head of q and k, not rotated
    rope_dim: int
    value_dim: int
    scale: float
    rope: RopeSpec
    norm_eps: float = 1e-6  # of the latents' norms: DeepSeek's code leaves them at its default whatever the config says

    @property
    def row(self) -> int:
        """Values a token caches."""
        return self.rank + self.rope_dim


@dataclass(frozen=True)
class DeltaNetSpec:
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) with a short causal convolution, as in Qwen3-Next / Qwen3.5."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    o_tiled: bool = False  # the columns of `o` expect value heads ordered (repeat, key head), as in GGUF files

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class MlpSpec:
    inter: int
    act: Literal["silu", "gelu_tanh"] = "silu"


@dataclass(frozen=True)
class MoeSpec:
    experts: int
    top_k: int
    inter: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renorm: bool = True
    scale: float = 1.0
    bias: bool = False  # `router_bias` is added to the scores where experts are chosen, not where they are weighed
    groups: int = 1  # consecutive experts; those of the `top_groups` groups whose best scores sum highest may be chosen
    top_groups: int = 1
    group_best: int = 2  # scores that are summed for a group's rank: the best two, or the best one
    shared_inter: int = 0  # 0 = no shared expert
    shared_switch: bool = False  # shared expert output times sigmoid(x . switch)
    act: Literal["silu", "gelu_tanh"] = "silu"


@dataclass(frozen=True)
class LayerSpec:
    mixer: AttentionSpec | LatentSpec | DeltaNetSpec
    ffn: MlpSpec | MoeSpec


@dataclass(frozen=True)
class ModelSpec:
    family: str
    hidden: int
    vocab: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    norm_plus_one: bool = False  # RMS norm multiplies by (1 + w) instead of w
    tie_embeddings: bool = False
    embed_scale: float = 1.0
    max_positions: int = 32768
    eos_ids: tuple[int, ...] = ()
