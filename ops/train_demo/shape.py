"""The model's shape: one frozen config, written as transformers' Qwen3_5MoeTextConfig."""

from __future__ import annotations

from dataclasses import dataclass

from .text import VOCAB


@dataclass(frozen=True)
class Shape:
    """Every fourth layer is full attention, the others are Gated DeltaNet; every layer has the experts."""

    vocab: int = VOCAB
    hidden: int = 192
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary: int = 16
    theta: float = 100000.0
    lin_k_heads: int = 2
    lin_v_heads: int = 4
    lin_k_dim: int = 32
    lin_v_dim: int = 32
    conv: int = 4
    experts: int = 32
    top_k: int = 4
    expert_width: int = 64
    shared_width: int = 128
    eps: float = 1e-6

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % 4 == 0

    @property
    def conv_width(self) -> int:
        return 2 * self.lin_k_heads * self.lin_k_dim + self.lin_v_heads * self.lin_v_dim

    @property
    def value_width(self) -> int:
        return self.lin_v_heads * self.lin_v_dim

    def hf_config(self, eos: int, pad: int) -> dict:
        return {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "full_attention_interval": 4,
            "layer_types": ["full_attention" if self.is_full(i) else "linear_attention" for i in range(self.layers)],
            "linear_num_key_heads": self.lin_k_heads,
            "linear_num_value_heads": self.lin_v_heads,
            "linear_key_head_dim": self.lin_k_dim,
            "linear_value_head_dim": self.lin_v_dim,
            "linear_conv_kernel_dim": self.conv,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_width,
            "shared_expert_intermediate_size": self.shared_width,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
            "max_position_embeddings": 32768,
            "partial_rotary_factor": self.rotary / self.head_dim,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.theta,
                "partial_rotary_factor": self.rotary / self.head_dim,
                "mrope_interleaved": True,
                "mrope_section": [4, 2, 2],
            },
            "initializer_range": 0.02,
            "use_cache": True,
            "tie_word_embeddings": True,
            "mamba_ssm_dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": eos,
            "pad_token_id": pad,
        }
