"""Starting weights that already copy a little ("mimetic" initialisation).

From random weights copying did not appear in four million tokens. Here the circuit every language model ends up with is laid
down as a hint and training does the rest. Channels are divided at the start: 0 is constant, 1-127 hold the token, 128-191 the
previous token. Layer 0 writes the latter; the full attention layers match it against the current token and carry on what stands
there; three recurrent layers do the same with their convolution as the previous-token shift.
"""

from __future__ import annotations

import torch
from torch import nn

from .model import FullAttention, LinearAttention, Model

CONSTANT = 0.35  # embedding channel 0 is the same for all tokens: gates can be open from the start, logits do not see it
SCALE = 0.05  # of one embedding channel
ECHO, FOLLOW = 0.6, 6.0  # how loud the recurrent and the attention copies are beside the token itself
ECHO_LAYERS = (1, 2, 4)  # recurrent layers that start as induction heads


TOKEN = slice(1, 128)
PREVIOUS = slice(128, 192)


def orthonormal(rows: int, width: int, gen: torch.Generator) -> torch.Tensor:
    """Random orthonormal rows that read the token's channels; rows beyond their number stay zero."""
    found = torch.zeros(rows, width)
    inside = min(rows, TOKEN.stop - TOKEN.start)
    q, _ = torch.linalg.qr(torch.randn(TOKEN.stop - TOKEN.start, inside, generator=gen))
    found[:inside, TOKEN] = q.t()
    return found


def plain(model: Model, gen: torch.Generator) -> None:
    """Fan-in scaled noise; what is written to the residual stream starts small beside the token itself."""
    for name, p in model.named_parameters():
        if p.dim() < 2:
            continue
        std = (
            SCALE if "embed" in name else 0.1 if "conv1d" in name else 0.02 if "mlp.gate." in name else 0.6 * p.shape[-1] ** -0.5
        )
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
            std *= 0.1
        nn.init.normal_(p, 0, std, generator=gen)
    model.model.embed_tokens.weight.data[:, 0] = CONSTANT
    model.model.embed_tokens.weight.data[:, PREVIOUS] *= 0.1
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[:, 0] = 0


def open_recurrent(layer: LinearAttention, rates: torch.Tensor, shifted: str, gen: torch.Generator) -> torch.Tensor:
    """Keys equal queries of the same token; `shifted` ("k" or "v") is taken one token late. Returns the value projection."""
    s, width = layer.s, layer.s.hidden
    key = s.lin_k_heads * s.lin_k_dim
    match, value = orthonormal(key, width, gen), orthonormal(s.value_width, width, gen)
    layer.in_proj_qkv.weight.data.mul_(0.1).add_(torch.cat((match, match, value)) * 0.5)
    taps = torch.zeros(s.conv_width, s.conv)
    taps[:, -1] = 1
    late = slice(key, 2 * key) if shifted == "k" else slice(2 * key, None)
    taps[late, -1], taps[late, -2] = 0, 1
    layer.conv1d.weight.data[:, 0].mul_(0.2).add_(taps)
    layer.in_proj_z.weight.data.mul_(0.3)[:, 0] = 0.25
    layer.in_proj_b.weight.data.mul_(0.3)[:, 0] = 0.3
    layer.dt_bias.data = rates.expm1().log()
    layer.A_log.data.zero_()
    return value


def previous_token(layer: LinearAttention, gen: torch.Generator) -> torch.Tensor:
    """Writes a projection of the previous token to its channels; returns the projection."""
    value = open_recurrent(layer, torch.full((layer.s.lin_v_heads,), 3.0), "v", gen)
    count = PREVIOUS.stop - PREVIOUS.start
    layer.out_proj.weight.data.mul_(0.3)[PREVIOUS, :count] += torch.eye(count) * SCALE
    return value[:count]


def echo(layer: LinearAttention, gen: torch.Generator) -> None:
    """Writes the token that followed the last occurrence of this one."""
    value = open_recurrent(layer, torch.logspace(-1.7, -3, layer.s.lin_v_heads), "k", gen)
    layer.out_proj.weight.data.mul_(0.3).add_(value.t() * SCALE * ECHO)


def follow(layer: FullAttention, read: torch.Tensor, gen: torch.Generator) -> None:
    """Looks for positions whose previous token is this one, and writes what stands there."""
    s = layer.s
    value = orthonormal(s.kv_heads * s.head_dim, s.hidden, gen)
    layer.v_proj.weight.data.mul_(0.2).add_(value)
    group = s.heads // s.kv_heads
    q = layer.q_proj.weight.data.view(s.heads, 2 * s.head_dim, s.hidden)
    o = layer.o_proj.weight.data.view(s.hidden, s.heads, s.head_dim)
    k = layer.k_proj.weight.data.view(s.kv_heads, s.head_dim, s.hidden)
    for head in range(s.kv_heads):
        mix, _ = torch.linalg.qr(torch.randn(s.head_dim, read.shape[0], generator=gen))
        k[head] *= 0.1
        k[head, :, PREVIOUS] += mix
        for twin in range(head * group, (head + 1) * group):
            q[twin, : s.head_dim] = q[twin, : s.head_dim] * 0.1 + mix @ read
            o[:, twin] += value[head * s.head_dim : (head + 1) * s.head_dim].t() * SCALE * FOLLOW / group
    layer.q_norm.weight.data.fill_(0.5)
    layer.k_norm.weight.data.fill_(0.5)


def init_weights(model: Model, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    plain(model, gen)
    read = torch.empty(0)
    for index, layer in enumerate(model.model.layers):
        mixer = layer.mixer
        if isinstance(mixer, FullAttention):
            follow(mixer, read, gen)
        elif index == 0:
            read = previous_token(mixer, gen)
        elif index in ECHO_LAYERS:
            echo(mixer, gen)
        else:
            mixer.dt_bias.data = torch.logspace(-1, -3, mixer.s.lin_v_heads).expm1().log()
            mixer.conv1d.weight.data[:, 0, -1] += 0.7
    model.model.norm.weight.data.fill_(0.5)
