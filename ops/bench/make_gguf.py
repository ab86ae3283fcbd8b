#!/usr/bin/env python3
"""A GGUF file of random weights in the shape of a known model, for measuring speed; it says nothing sensible.

    ops/bench/make_gguf.py qwen3moe Q4_0 OUT.gguf [--layers 4]
    ops/bench/make_gguf.py qwen35moe Q8_0 OUT.gguf [--layers 4]
    ops/bench/make_gguf.py deepseek2 Q8_0 OUT.gguf [--layers 4]

Qwen3-30B-A3B, Qwen3.5-35B-A3B, DeepSeek-V2-Lite (first layer dense, queries straight from the hidden state).
Types are laid out as llama-quantize does: router and norms float32, the head Q6_K for 4 bits, part of the down and value matrices
Q6_K for Q4_K_M. The vocabulary (32,768) is made up; both engines can read it. Written tensor by tensor: memory stays small.
"""

from __future__ import annotations

import argparse
import itertools
import math
import string
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

HIDDEN, EXPERTS, TOP_K, VOCAB = 2048, 128, 8, 32768
LITE_EXPERTS, LITE_TOP_K, LITE_INTER, LITE_SHARED, LITE_DENSE = 64, 6, 1408, 2, 10944  # DeepSeek-V2-Lite
HEADS, RANK, PLAIN, TURNED, VALUE = 16, 512, 128, 64, 128  # its latent attention
KINDS = {"BF16": Type.BF16, "Q8_0": Type.Q8_0, "Q4_0": Type.Q4_0, "Q4_K_M": Type.Q4_K}
# where the scales of a block lie (offsets of float16) and what they are, so that weights are about 0.02 and no scale is subnormal
SCALES = {Type.Q8_0: (0.0003, (0,)), Type.Q4_0: (0.005, (0,)), Type.Q4_K: (0.0001, (0, 2)), Type.Q6_K: (0.0001, (208,))}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    type: Type
    value: str = "random"  # or "one" (norms), "decay" (-exp(a_log)), "small"


def tensors(shape: str, kind: str, layers: int) -> list[Tensor]:
    main = KINDS[kind]
    head = Type.Q6_K if kind.startswith("Q4") else main
    found = [Tensor("token_embd.weight", (VOCAB, HIDDEN), main), Tensor("output.weight", (VOCAB, HIDDEN), head)]
    found.append(Tensor("output_norm.weight", (HIDDEN,), Type.F32, "one"))
    for i in range(layers):
        if shape == "deepseek2":
            parts = [*_latent(main), *_lite_ffn(i == 0, main)]
        else:
            more = kind == "Q4_K_M" and (i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2)
            fine = Type.Q6_K if more else main
            mixer = _attention if shape == "qwen3moe" or i % 4 == 3 else _delta_net
            parts = [*mixer(shape, main, fine), *_experts(shape, main, fine)]
        found += [Tensor(f"blk.{i}.{t.name}", t.shape, t.type, t.value) for t in parts]
    return found


def _norm(name: str, size: int) -> Tensor:
    return Tensor(name, (size,), Type.F32, "one")


def _attention(shape: str, main: Type, fine: Type) -> list[Tensor]:
    heads, kv, dim, gated = (32, 4, 128, 1) if shape == "qwen3moe" else (16, 2, 256, 2)
    return [
        _norm("attn_norm.weight", HIDDEN),
        Tensor("attn_q.weight", (heads * dim * gated, HIDDEN), main),
        Tensor("attn_k.weight", (kv * dim, HIDDEN), main),
        Tensor("attn_v.weight", (kv * dim, HIDDEN), fine),
        Tensor("attn_output.weight", (HIDDEN, heads * dim), main),
        _norm("attn_q_norm.weight", dim),
        _norm("attn_k_norm.weight", dim),
    ]


def _delta_net(shape: str, main: Type, fine: Type) -> list[Tensor]:
    inner, channels, heads = 32 * 128, 2 * 16 * 128 + 32 * 128, 32
    return [
        _norm("attn_norm.weight", HIDDEN),
        Tensor("attn_qkv.weight", (channels, HIDDEN), main),
        Tensor("attn_gate.weight", (inner, HIDDEN), main),
        Tensor("ssm_beta.weight", (heads, HIDDEN), main),
        Tensor("ssm_alpha.weight", (heads, HIDDEN), main),
        Tensor("ssm_conv1d.weight", (channels, 4), Type.F32, "small"),
        Tensor("ssm_dt.bias", (heads,), Type.F32, "small"),
        Tensor("ssm_a", (heads,), Type.F32, "decay"),
        _norm("ssm_norm.weight", 128),
        Tensor("ssm_out.weight", (HIDDEN, inner), main),
    ]


def _experts(shape: str, main: Type, fine: Type) -> list[Tensor]:
    inner = 768 if shape == "qwen3moe" else 512
    found = [
        Tensor("ffn_gate_inp.weight", (EXPERTS, HIDDEN), Type.F32, "small"),
        Tensor("ffn_gate_exps.weight", (EXPERTS, inner, HIDDEN), main),
        Tensor("ffn_up_exps.weight", (EXPERTS, inner, HIDDEN), main),
        Tensor("ffn_down_exps.weight", (EXPERTS, HIDDEN, inner), fine),
    ]
    if shape == "qwen3moe":
        return [_norm("ffn_norm.weight", HIDDEN), *found]
    return [
        _norm("post_attention_norm.weight", HIDDEN),
        *found,
        Tensor("ffn_gate_inp_shexp.weight", (HIDDEN,), Type.F32, "small"),
        Tensor("ffn_gate_shexp.weight", (inner, HIDDEN), main),
        Tensor("ffn_up_shexp.weight", (inner, HIDDEN), main),
        Tensor("ffn_down_shexp.weight", (HIDDEN, inner), fine),
    ]


def _latent(main: Type) -> list[Tensor]:
    """As converters write it since `kv_b` is stored in two parts, the one for keys turned."""
    return [
        _norm("attn_norm.weight", HIDDEN),
        Tensor("attn_q.weight", (HEADS * (PLAIN + TURNED), HIDDEN), main),
        Tensor("attn_kv_a_mqa.weight", (RANK + TURNED, HIDDEN), main),
        _norm("attn_kv_a_norm.weight", RANK),
        Tensor("attn_k_b.weight", (HEADS, RANK, PLAIN), main),
        Tensor("attn_v_b.weight", (HEADS, VALUE, RANK), main),
        Tensor("attn_output.weight", (HIDDEN, HEADS * VALUE), main),
    ]


def _lite_ffn(dense: bool, main: Type) -> list[Tensor]:
    def mlp(inter: int, end: str, *experts: int) -> list[Tensor]:
        wide = [Tensor(f"ffn_{name}{end}.weight", (*experts, inter, HIDDEN), main) for name in ("gate", "up")]
        return [*wide, Tensor(f"ffn_down{end}.weight", (*experts, HIDDEN, inter), main)]

    if dense:
        return [_norm("ffn_norm.weight", HIDDEN), *mlp(LITE_DENSE, "")]
    router = Tensor("ffn_gate_inp.weight", (LITE_EXPERTS, HIDDEN), Type.F32, "small")
    return [
        _norm("ffn_norm.weight", HIDDEN),
        router,
        *mlp(LITE_INTER, "_exps", LITE_EXPERTS),
        *mlp(LITE_SHARED * LITE_INTER, "_shexp"),
    ]


def stored_shape(tensor: Tensor) -> tuple[int, ...]:
    """Shape in bytes of a block type, in elements otherwise."""
    if tensor.type in SCALES or tensor.type is Type.BF16:
        elements, size = gguf.GGML_QUANT_SIZES[tensor.type]
        return (*tensor.shape[:-1], tensor.shape[-1] // elements * size)
    return tensor.shape


def values(tensor: Tensor, source: np.random.Generator) -> np.ndarray:
    shape = stored_shape(tensor)
    if tensor.value == "one":
        return np.ones(shape, np.float32)
    if tensor.value == "decay":
        return -np.exp(source.uniform(-1, 2, shape)).astype(np.float32)
    if tensor.type is Type.F32:
        return source.normal(0, 0.02, shape).astype(np.float32)
    raw = np.frombuffer(source.bytes(math.prod(shape)), np.uint8).copy()
    if tensor.type is Type.BF16:  # any sign and fraction, 2^-7 to 2^-5
        return ((raw.view(np.uint16) & 0x80FF) | 0x3C00).view(np.uint8).reshape(shape)
    scale, offsets = SCALES[tensor.type]
    blocks = raw.reshape(-1, gguf.GGML_QUANT_SIZES[tensor.type][1])
    for at in offsets:
        blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return raw.reshape(shape)


def vocabulary() -> tuple[list[str], list[str]]:
    """Byte-level tokens: the bytes, then every string of two, three and some of four lower-case letters; and their merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    tokens = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    merges = []
    for length in (2, 3, 4):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            if len(tokens) == VOCAB - len(SPECIAL):
                break
            text = "".join(letters)
            merges.append(f"{text[:-1]} {text[-1]}")
            tokens.append(text)
    return [*tokens, *SPECIAL], merges


def write_metadata(out: gguf.GGUFWriter, shape: str, layers: int) -> None:
    out.add_block_count(layers)
    out.add_embedding_length(HIDDEN)
    out.add_layer_norm_rms_eps(1e-6)
    _lite_metadata(out) if shape == "deepseek2" else _qwen_metadata(out, shape)
    tokens, merges = vocabulary()
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens)
    out.add_token_types([1] * (VOCAB - len(SPECIAL)) + [3] * len(SPECIAL))
    out.add_token_merges(merges)
    out.add_eos_token_id(VOCAB - 1)
    out.add_add_bos_token(False)


def _lite_metadata(out: gguf.GGUFWriter) -> None:
    out.add_context_length(163840)
    out.add_feed_forward_length(LITE_DENSE)
    out.add_leading_dense_block_count(1)
    out.add_head_count(HEADS)
    out.add_head_count_kv(1)
    out.add_q_lora_rank(0)  # llama.cpp expects the key unless a file has as many layers as a published model without the latent
    out.add_kv_lora_rank(RANK)
    out.add_key_length(RANK + TURNED)
    out.add_value_length(RANK)
    out.add_key_length_mla(PLAIN + TURNED)
    out.add_value_length_mla(VALUE)
    out.add_rope_dimension_count(TURNED)
    out.add_rope_freq_base(1e4)
    out.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    out.add_rope_scaling_factor(40.0)
    out.add_rope_scaling_orig_ctx_len(4096)
    out.add_rope_scaling_yarn_log_mul(0.0707)
    out.add_expert_count(LITE_EXPERTS)
    out.add_expert_used_count(LITE_TOP_K)
    out.add_expert_feed_forward_length(LITE_INTER)
    out.add_expert_shared_count(LITE_SHARED)
    out.add_expert_weights_scale(1.0)


def _qwen_metadata(out: gguf.GGUFWriter, shape: str) -> None:
    heads, kv, dim, inner = (32, 4, 128, 768) if shape == "qwen3moe" else (16, 2, 256, 512)
    out.add_context_length(40960)
    out.add_feed_forward_length(6144)
    out.add_head_count(heads)
    out.add_head_count_kv(kv)
    out.add_key_length(dim)
    out.add_value_length(dim)
    out.add_rope_freq_base(1e6 if shape == "qwen3moe" else 1e7)
    out.add_expert_count(EXPERTS)
    out.add_expert_used_count(TOP_K)
    out.add_expert_feed_forward_length(inner)
    if shape != "qwen3moe":
        out.add_expert_shared_feed_forward_length(inner)
        out.add_rope_dimension_count(64)
        out.add_rope_dimension_sections([11, 11, 10, 0])
        out.add_ssm_conv_kernel(4)
        out.add_ssm_state_size(128)
        out.add_ssm_group_count(16)
        out.add_ssm_time_step_rank(32)
        out.add_ssm_inner_size(32 * 128)
        out.add_uint32(f"{shape}.full_attention_interval", 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("shape", choices=("qwen3moe", "qwen35moe", "deepseek2"))
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4, help="layers (default 4)")
    args = parser.parse_args()
    if (args.shape, args.kind) == ("deepseek2", "Q4_K_M"):
        parser.error("deepseek2 has rows of 1,408, no multiple of Q4_K's 256: use Q8_0, Q4_0 or BF16")
    source = np.random.default_rng(1234)
    out = gguf.GGUFWriter(str(args.out), args.shape)
    write_metadata(out, args.shape, args.layers)
    found = tensors(args.shape, args.kind, args.layers)
    for tensor in found:
        shape = stored_shape(tensor)
        dtype = np.dtype(np.float32 if tensor.type is Type.F32 else np.uint8)
        raw = None if tensor.type is Type.F32 else tensor.type
        out.add_tensor_info(tensor.name, shape, dtype, math.prod(shape) * dtype.itemsize, raw)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    for tensor in found:
        out.write_tensor_data(values(tensor, source))
    out.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
