"""Gated DeltaNet: the short causal convolution, then the delta rule, token after token, with a head's state in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.cuda.rows import activate
from engine.kernels.ops import Segments, StateLayer
from engine.models.spec import DeltaNetSpec

VALUES = 32  # columns of a head's state a program holds: 128 x 32 floats are 32 registers of 128 threads


@triton.jit
def conv_kernel(
    out, x, weight, past, cu, slot, sequences, x_stride, channels,
    TAPS: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SiLU of the depthwise convolution of x [T, C] behind each sequence's last TAPS - 1 inputs."""
    t, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, SEQUENCES)
    sequence = tl.sum((tl.load(cu + s + 1, mask=s < sequences, other=2147483647) <= t).to(tl.int32), 0)
    row = t - tl.load(cu + sequence)
    kept = past + (tl.load(slot + sequence).to(tl.int64) * channels + c) * (TAPS - 1)
    live = c < channels
    acc = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap  # rows behind t
        here = row - back + c * 0 >= 0
        value = tl.load(x + (t - back).to(tl.int64) * x_stride + c, mask=live & here, other=0.0)
        value += tl.load(kept + row + tap, mask=live & (row - back + c * 0 < 0), other=0.0)
        acc = tl.fma(value, tl.load(weight + c * TAPS + tap, mask=live, other=0.0), acc)
    tl.store(out + t.to(tl.int64) * channels + c, activate(acc, "silu"), mask=live)


@triton.jit
def past_kernel(out, x, past, cu, slot, x_stride, channels, TAPS: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr):
    """out [S, C, TAPS - 1]: the last inputs of each sequence when this step is over."""
    sequence, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    first, end = tl.load(cu + sequence), tl.load(cu + sequence + 1)
    j = tl.arange(0, POWER)[None, :]
    row = end - first + j - (TAPS - 1)  # of this step; before it when negative
    live = (c < channels) & (j < TAPS - 1)
    kept = past + (tl.load(slot + sequence).to(tl.int64) * channels + c) * (TAPS - 1)
    value = tl.load(x + (first + row).to(tl.int64) * x_stride + c, mask=live & (row >= 0), other=0.0)
    value += tl.load(kept + row + TAPS - 1, mask=live & (row < 0), other=0.0)
    tl.store(out + (sequence.to(tl.int64) * channels + c) * (TAPS - 1) + j, value, mask=live)


@triton.jit
def rule_kernel(
    out, mixed, a, b, dt_bias, a_log, state, cu, slot, a_stride, b_stride, channels, heads, scale,
    REPEAT: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence, one head, `BLOCK` columns of its state (arXiv 2412.06464, eq. 10). mixed [T, C] is q, k, v of a row."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, KEY_BLOCK)
    key_live, live = i < KEYS, c < VALUES
    both = key_live[:, None] & live[None, :]
    at = state + (tl.load(slot + sequence).to(tl.int64) * heads + head) * (KEYS * VALUES) + i[:, None] * VALUES + c[None, :]
    s = tl.load(at, mask=both, other=0.0)
    key_head, key_heads = head // REPEAT, heads // REPEAT
    rate = tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head)
    for t in range(tl.load(cu + sequence), tl.load(cu + sequence + 1)):
        row = mixed + t * channels.to(tl.int64)
        q = tl.load(row + key_head * KEYS + i, mask=key_live, other=0.0)
        k = tl.load(row + (key_heads + key_head) * KEYS + i, mask=key_live, other=0.0)
        v = tl.load(row + 2 * key_heads * KEYS + head * VALUES + c, mask=live, other=0.0)
        q = q * (1.0 / tl.sqrt_rn(tl.sum(q * q, 0) + 1e-6)) * scale
        k = k * (1.0 / tl.sqrt_rn(tl.sum(k * k, 0) + 1e-6))
        beta = activate(tl.load(b + t * b_stride + head), "sigmoid")
        s = s * tl.exp(-rate * _softplus(tl.load(a + t * a_stride + head) + bias))
        change = beta * (v - tl.sum(s * k[:, None], 0))
        s += k[:, None] * change[None, :]
        tl.store(out + (t * heads.to(tl.int64) + head) * VALUES + c, tl.sum(s * q[:, None], 0), mask=live)
    tl.store(at, s, mask=both)


@triton.jit
def _softplus(x):
    """log(1 + e^x); for a small e^x by its series, where 1 + e^x would keep few of its digits."""
    small = tl.exp(tl.minimum(x, 0.0))
    near = small * (1.0 - small * (0.5 - small * (0.33333334 - 0.25 * small)))
    return tl.where(x > 20.0, x, tl.where(x < -5.0, near, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0)))))


def delta_net(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weights: dict[str, torch.Tensor],
    state: StateLayer,
    seg: Segments,
    spec: DeltaNetSpec,
) -> torch.Tensor:
    rows, channels = qkv.shape
    sequences, taps = seg.start.shape[0], spec.conv_kernel
    mixed = torch.empty(rows, channels, dtype=torch.float32, device=qkv.device)
    conv_kernel[(rows, triton.cdiv(channels, 256))](
        mixed, qkv, weights["conv"], state.conv, seg.cu, seg.slot, sequences, qkv.stride(0), channels,
        TAPS=taps, SEQUENCES=triton.next_power_of_2(sequences), BLOCK=256,
    )  # fmt: skip
    past = torch.empty(sequences, channels, taps - 1, dtype=torch.float32, device=qkv.device)
    past_kernel[(sequences, triton.cdiv(channels, 128))](
        past, qkv, state.conv, seg.cu, seg.slot, qkv.stride(0), channels,
        TAPS=taps, POWER=triton.next_power_of_2(taps - 1), BLOCK=128,
    )  # fmt: skip
    state.conv.index_copy_(0, seg.slot.long(), past)
    out = torch.empty(rows, spec.value_heads, spec.value_dim, dtype=torch.float32, device=qkv.device)
    rule_kernel[(sequences, spec.value_heads, triton.cdiv(spec.value_dim, VALUES))](
        out, mixed, a, b, weights["dt_bias"], weights["a_log"], state.s, seg.cu, seg.slot, a.stride(0), b.stride(0), channels,
        spec.value_heads, spec.key_dim**-0.5,
        REPEAT=spec.value_heads // spec.key_heads, KEYS=spec.key_dim, VALUES=spec.value_dim,
        KEY_BLOCK=triton.next_power_of_2(spec.key_dim), BLOCK=VALUES,
    )  # fmt: skip
    return out
