"""What families share: tensor-name tables and readers for the config keys that most of them spell alike."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from engine.models.config import Config
from engine.models.errors import ModelError
from engine.models.names import kv_b_rows
from engine.models.spec import AttentionSpec, LatentSpec, MlpSpec, MoeSpec, RopeSpec

SKELETON = {
    "embed_tokens.weight": "embed",
    "norm.weight": "final_norm",
    "lm_head.weight": "head",
    "layers.{L}.input_layernorm.weight": "mixer_norm",
    "layers.{L}.post_attention_layernorm.weight": "ffn_norm",
}
ATTENTION = {
    f"layers.{{L}}.self_attn.{theirs}.{kind}": f"attn.{ours}{suffix}"
    for theirs, ours in {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}.items()
    for kind, suffix in {"weight": "", "bias": "_bias"}.items()
} | {
    "layers.{L}.self_attn.q_norm.weight": "attn.q_norm",
    "layers.{L}.self_attn.k_norm.weight": "attn.k_norm",
}
LATENT = {
    f"layers.{{L}}.self_attn.{theirs}.weight": f"mla.{ours}"
    for theirs, ours in {
        "q_proj": "q",
        "q_a_proj": "q_a",
        "q_a_layernorm": "q_a_norm",
        "q_b_proj": "q_b",
        "kv_a_proj_with_mqa": "kv_a",
        "kv_a_layernorm": "kv_a_norm",
        "o_proj": "o",
    }.items()
}
ROTARY = {"layers.{L}.self_attn.rotary_emb.inv_freq": "rotary frequencies, computed here"}  # for `SKIP`: saved by older code
LATENT_SPLITS = {"layers.{L}.self_attn.kv_b_proj.weight": kv_b_rows}
MLP = {f"layers.{{L}}.mlp.{name}_proj.weight": f"mlp.{name}" for name in ("gate", "up", "down")}
MOE = {
    "layers.{L}.mlp.gate.weight": "moe.router",
    "layers.{L}.mlp.experts.gate_up_proj": "moe.gate_up",
    "layers.{L}.mlp.experts.down_proj": "moe.down",
    "layers.{L}.mlp.experts.{E}.gate_proj.weight": "gate#moe.gate_up",
    "layers.{L}.mlp.experts.{E}.up_proj.weight": "up#moe.gate_up",
    "layers.{L}.mlp.experts.{E}.down_proj.weight": "moe.down",
}
CORRECTED_ROUTER = {"layers.{L}.mlp.gate.e_score_correction_bias": "moe.router_bias"}
SHARED_EXPERTS = {f"layers.{{L}}.mlp.shared_experts.{name}_proj.weight": f"moe.shared.{name}" for name in ("gate", "up", "down")}
SHARED_EXPERT = {
    "layers.{L}.mlp.shared_expert.gate_proj.weight": "moe.shared.gate",
    "layers.{L}.mlp.shared_expert.up_proj.weight": "moe.shared.up",
    "layers.{L}.mlp.shared_expert.down_proj.weight": "moe.shared.down",
    "layers.{L}.mlp.shared_expert_gate.weight": "moe.shared.switch",
}

MOST_LAYERS = 10_000  # the deepest models have a few hundred; a garbled count must not become a list of a billion
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def activation(config: Config) -> str:
    name = config.text("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise ModelError(f"{config.source}: activation '{name}' is not supported; supported: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def experts(config: Config) -> int:
    return config.int("num_experts", None) or config.int("num_local_experts")


def layer_count(config: Config) -> int:
    count = config.int("num_hidden_layers")
    if count > MOST_LAYERS:
        raise ModelError(f"{config.source}: 'num_hidden_layers' is {count}, which cannot be; fetch the file again")
    return count


def head_dim(config: Config) -> int:
    hidden, heads = config.int("hidden_size"), config.int("num_attention_heads")
    if hidden < heads:
        raise ModelError(f"{config.source}: {heads} attention heads cannot share {hidden} channels; fetch the file again")
    return config.int("head_dim", None) or hidden // heads


def attention(config: Config, *, window: int | None = None, partial: float = 1.0, **traits: bool) -> AttentionSpec:
    """Grouped-query attention under the usual keys; `traits` are boolean fields of AttentionSpec."""
    heads, dim = config.int("num_attention_heads"), head_dim(config)
    kv_heads = config.int("num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise ModelError(
            f"{config.source}: {heads} attention heads cannot share {kv_heads} key heads evenly; fetch the file again"
        )
    return AttentionSpec(heads, kv_heads, dim, dim**-0.5, rope(config, dim, partial), window=window, **traits)


def latent_attention(config: Config) -> LatentSpec:
    """DeepSeek's: YaRN's temperature goes into the scale, and rotated pairs are neighbours unless the config says not."""
    if config.flag("attention_bias", False):
        raise ModelError(f"{config.source}: attention_bias is not supported here; no published checkpoint sets it")
    nope, rotated = config.int("qk_nope_head_dim"), config.int("qk_rope_head_dim")
    turn = rope(config, rotated)
    found = config.inner("rope_parameters") if config.has("rope_parameters") else config.inner("rope_scaling")
    mscale = found.float("mscale_all_dim", None) if turn.scaling != "none" else None
    return LatentSpec(
        heads=config.int("num_attention_heads"),
        q_rank=config.int("q_lora_rank", None),
        rank=config.int("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=config.int("v_head_dim"),
        scale=(nope + rotated) ** -0.5 * (yarn_temperature(turn.factor, mscale) ** 2 if mscale else 1.0),
        rope=replace(turn, interleaved=config.flag("rope_interleave", True)),
    )


def layer_kinds(config: Config, default: Iterable[str], known: Collection[str], key: str = "layer_types") -> tuple[str, ...]:
    """What the config has under `key`, or `default` when it leaves them out: one of `known` for each layer."""
    kinds = config.items(key, None)
    if kinds is None:
        kinds = tuple(default)
    unknown = [str(kind) for kind in kinds if kind not in known]
    if unknown:
        raise ModelError(f"{config.source}: layer type '{unknown[0]}' is not supported; supported: {', '.join(known)}")
    if len(kinds) != layer_count(config):
        raise ModelError(f"{config.source}: '{key}' has {len(kinds)} entries for {layer_count(config)} layers")
    return kinds


def feed_forwards(config: Config, sparse: MoeSpec) -> list[MlpSpec | MoeSpec]:
    """Qwen's rule of which layers are sparse: every `decoder_sparse_step`-th, but those named dense."""
    dense, step = config.ids("mlp_only_layers"), config.int("decoder_sparse_step", 1)
    is_sparse = [i not in dense and (i + 1) % step == 0 for i in range(layer_count(config))]
    return [sparse if it_is else dense_mlp(config) for it_is in is_sparse]


def dense_mlp(config: Config) -> MlpSpec:
    if config.flag("mlp_bias", False):
        raise ModelError(f"{config.source}: mlp_bias is not supported; use a checkpoint without it")
    return MlpSpec(config.int("intermediate_size"), activation(config))


def rope(config: Config, dim: int, partial: float = 1.0) -> RopeSpec:
    """Rotary parameters in today's form (`rope_parameters`) or the older one (`rope_theta`, `rope_scaling`).

    `partial` is the family's default share of the head that is rotated.
    """
    found = config.inner("rope_parameters") if config.has("rope_parameters") else config.inner("rope_scaling")
    kind = found.text("rope_type", None) or found.text("type", None) or "default"
    theta = found.float("rope_theta", None) or config.float("rope_theta", 10000.0)
    share = found.float("partial_rotary_factor", None) or config.float("partial_rotary_factor", partial)
    plain = RopeSpec(int(dim * share), theta)
    if kind in ("default", "mrope"):  # text positions are equal in all sections of mrope: the plain rotation
        return plain
    if kind == "linear":
        return RopeSpec(plain.dim, theta, "linear", found.float("factor"))
    original = found.int("original_max_position_embeddings", None) or config.int("max_position_embeddings")
    if kind == "llama3":
        low, high = found.float("low_freq_factor"), found.float("high_freq_factor")
        return RopeSpec(plain.dim, theta, "llama3", found.float("factor"), original, low, high)
    if kind == "yarn":
        return RopeSpec(
            plain.dim,
            theta,
            "yarn",
            found.float("factor"),
            original,
            attention_factor=_yarn_attention(found),
            beta_fast=found.float("beta_fast", None) or 32.0,
            beta_slow=found.float("beta_slow", None) or 1.0,
            truncate=found.flag("truncate", True),
        )
    raise ModelError(f"{found.source}: rope type '{kind}' is not supported; supported: default, linear, llama3, yarn")


def _yarn_attention(found: Config) -> float:
    """YaRN's temperature on the attention logits, applied to cos and sin (arXiv 2309.00071, eq. 22)."""
    explicit, factor = found.float("attention_factor", None), found.float("factor")
    if explicit is not None:
        return explicit

    mscale, all_dims = found.float("mscale", None), found.float("mscale_all_dim", None)
    if mscale and all_dims:
        return yarn_temperature(factor, mscale) / yarn_temperature(factor, all_dims)
    return yarn_temperature(factor, 1.0)


def yarn_temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
