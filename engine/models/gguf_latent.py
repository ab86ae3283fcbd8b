"""GGUF's `deepseek2`: DeepSeek-V2, V3, Kimi-K2 and GLM-4.7-Flash in one architecture, told apart by how their router scores."""

from __future__ import annotations

from engine.models.config import Config

NAMES = {
    f"blk.{{L}}.{theirs}": ours
    for theirs, ours in {
        "attn_q.weight": "mla.q",
        "attn_q_a.weight": "mla.q_a",
        "attn_q_a_norm.weight": "mla.q_a_norm",
        "attn_q_b.weight": "mla.q_b",
        "attn_kv_a_mqa.weight": "mla.kv_a",
        "attn_kv_a_norm.weight": "mla.kv_a_norm",
        "attn_k_b.weight": "mla.k_b",
        "attn_v_b.weight": "mla.v_b",
        "attn_output.weight": "mla.o",
        "exp_probs_b.bias": "moe.router_bias",
    }.items()
}
SIGMOID = 2  # of `expert_gating_func`; files without it are of DeepSeek-V2
MSCALE_UNIT = 0.1  # converters write `yarn_log_multiplier` as this times `mscale_all_dim`


def config(own: Config) -> dict[str, object]:
    """What the families' configs call the architecture's own keys; `own` are the file's, without the architecture."""
    rotated = own.int("rope.dimension_count")
    head = own.int("attention.key_length_mla", None) or own.int("attention.key_length")
    groups, sigmoid = own.int("expert_group_count", 1), own.int("expert_gating_func", 1) == SIGMOID
    found: dict[str, object] = {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": own.int("attention.value_length_mla", None) or own.int("attention.value_length"),
        "q_lora_rank": own.natural("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": own.int("attention.kv_lora_rank"),
        "n_routed_experts": own.int("expert_count"),
        "n_shared_experts": own.natural("expert_shared_count", 0),
        "first_k_dense_replace": own.natural("leading_dense_block_count", 0),
        "routed_scaling_factor": own.float("expert_weights_scale", None) or 1.0,
        "norm_topk_prob": own.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": own.int("expert_group_used_count", 1),
        "partial_rotary_factor": None,
    }
    if (multiplier := own.float("rope.scaling.yarn_log_multiplier", None)) is not None:
        found["mscale_all_dim"] = multiplier / MSCALE_UNIT
    return found
