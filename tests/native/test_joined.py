"""Half layers in one call: bit for bit the operations one by one, whatever the family, the batch, and where the experts are."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.experts.recording import Recording
from engine.kernels.cpu import CpuOps
from engine.kernels.ops import AttentionHalf, Guard, KVLayer, LatentHalf, MlpHalf, MoeHalf
from engine.models.load import load_model
from engine.models.spec import AttentionSpec, LatentSpec, MlpSpec, MoeSpec, RopeSpec
from engine.nn.batch import Batch, Cache
from engine.nn.decoder import Decoder
from engine.nn.experts import InPlace, expert_banks
from tests.native.helpers import segments
from tests.support.oracle import tokens
from tests.support.steps import Driver, across_a_recording
from tests.support.tiny import KINDS, make_tiny
from tests.support.tiny_gguf import write_gguf

LENGTH = 97  # more than a page and no multiple of anything


class OneByOne(CpuOps):
    joined = None


class Asked:
    """Experts that want to be asked for every layer call, and note what for."""

    def __init__(self, inner: InPlace) -> None:
        self._inner, self.calls = inner, []

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.calls.append((layer, ids.clone()))
        return self._inner.run(layer, x, ids, weights)


@pytest.fixture(scope="module", params=sorted(KINDS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    make_tiny(request.param, directory, torch.bfloat16)
    return directory


def logits(decoder: Decoder) -> torch.Tensor:
    """Of a prompt in odd chunks, of steps of one token, and of two sequences at once."""
    driver, prompt = Driver(decoder, torch.bfloat16), tokens(LENGTH)
    out = [driver.chunks(2, prompt, [1, 7, 13]), driver.chunks(1, prompt[:70], [64, 1])]
    together = driver.step({0: prompt[:41], 3: tokens(20, 5)}) | driver.step({1: prompt[70:80], 2: prompt[:1]})
    return torch.cat([*out, *(together[s] for s in sorted(together))])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("fused", [True, False], ids=["one matrix", "matrices apart"])
def test_a_step_has_the_bits_of_its_operations(checkpoint, fused, threads) -> None:
    ops, plain = CpuOps(threads), OneByOne(threads)
    loaded = load_model(checkpoint, ops)
    weights = {name: w for name, w in loaded.weights.items() if fused or not name.endswith(".in")}
    with torch.inference_mode():
        truth = logits(Decoder(loaded.spec, weights, plain))
        assert torch.equal(logits(Decoder(loaded.spec, weights, ops)), truth)
        asked, noted = (Asked(InPlace(expert_banks(loaded.spec, weights), o)) for o in (ops, plain))
        assert torch.equal(logits(Decoder(loaded.spec, weights, ops, asked)), truth)
        logits(Decoder(loaded.spec, weights, plain, noted))
    assert [layer for layer, _ in asked.calls] == [layer for layer, _ in noted.calls]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(asked.calls, noted.calls, strict=True))


@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v3"])
def test_every_instruction_set_has_the_bits_of_its_operations(isa, kind, tmp_path) -> None:
    make_tiny(kind, tmp_path, torch.bfloat16)
    ops, plain = CpuOps(1, isa), OneByOne(1, isa)
    loaded = load_model(tmp_path, ops)
    with torch.inference_mode():
        assert torch.equal(*(logits(Decoder(loaded.spec, loaded.weights, o)) for o in (ops, plain)))


@pytest.mark.parametrize("stored", [Type.Q8_0, Type.Q4_0], ids=lambda t: t.name)
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_in_blocks_has_the_bits_of_its_operations(kind, stored, tmp_path) -> None:
    """GGUF files keep the matrices of the heads in blocks, and queries come straight from x or from a latent."""
    sizes = {"hidden_size": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    sizes |= {"intermediate_size": 96, "moe_intermediate_size": 32, "rope_parameters": None}
    model = make_tiny(kind, tmp_path, torch.float32, **sizes, q_lora_rank=None if kind == "deepseek_v2" else 64)
    write_gguf(model, tmp_path / "model.gguf", stored)
    ops = CpuOps(1)
    loaded = load_model(tmp_path / "model.gguf", ops)
    assert loaded.weights["0.mla.k_b"].type == loaded.weights["0.mla.v_b"].type == stored.name
    with torch.inference_mode():
        assert torch.equal(*(logits(Decoder(loaded.spec, loaded.weights, o)) for o in (ops, OneByOne(1))))


@pytest.mark.parametrize(
    "kinds", [(Type.Q8_0, Type.BF16, Type.Q4_0), (Type.BF16, Type.BF16, Type.Q8_0), (Type.F32, Type.Q4_0, Type.Q4_0)]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_matrices_of_several_formats_in_one_run_have_the_bits_of_their_products(kinds, threads, tmp_path) -> None:
    model = make_tiny("qwen3_moe", tmp_path, hidden_size=64)
    others = {f"blk.{n}.attn_{part}": kind for n in range(9) for part, kind in zip("qkv", kinds, strict=True)}
    write_gguf(model, tmp_path / "model.gguf", Type.BF16, others=others)
    ops = CpuOps(threads)
    loaded = load_model(tmp_path / "model.gguf", ops, mapped=True)
    assert "0.attn.in" not in loaded.weights
    with torch.inference_mode():
        assert torch.equal(*(logits(Decoder(loaded.spec, loaded.weights, o)) for o in (ops, OneByOne(threads))))


class Keeping:
    """A decoder that leaves the state after `count` rows of the only sequence in `slot`."""

    def __init__(self, inner: Decoder, count: int, slot: int) -> None:
        self.spec, self._inner, self._kept = inner.spec, inner, torch.tensor([[count, slot]], dtype=torch.int32)

    def forward(self, batch: Batch, cache: Cache) -> torch.Tensor:
        return self._inner.forward(replace(batch, segments=replace(batch.segments, kept=self._kept)), cache)


@pytest.mark.parametrize("kind", [CpuOps, OneByOne])
def test_a_state_on_the_way_is_that_of_a_pause(kind, tmp_path) -> None:
    make_tiny("qwen3_next", tmp_path, torch.bfloat16)
    ops = kind(1)
    loaded = load_model(tmp_path, ops)
    decoder, prompt = Decoder(loaded.spec, loaded.weights, ops), tokens(20)
    with torch.inference_mode():
        paused = Driver(decoder, torch.bfloat16)
        paused.chunks(0, prompt[:9], [9])
        through = Driver(Keeping(decoder, 9, int(paused.slots[3])), torch.bfloat16)
        through.chunks(0, prompt, [20])
    slot, spare = int(paused.slots[0]), int(paused.slots[3])
    for one, other in zip(paused.cache.states, through.cache.states, strict=True):
        assert one is None or (torch.equal(one.conv[slot], other.conv[spare]) and torch.equal(one.s[slot], other.s[spare]))


SPEC = AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=1.0, rope=None)


def attention_half(**changes) -> AttentionHalf:
    whole = torch.randn(8 * 8, 16)
    return AttentionHalf(
        **{
            "norm": torch.ones(16),
            "eps": 1e-6,
            "parts": (whole,),
            "spec": SPEC,
            "biases": (None,),
            "norms": None,
            "out": torch.randn(16, 32),
            "out_bias": None,
        }
        | changes
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"norm": torch.ones(16, dtype=torch.bfloat16)}, "norm"),
        ({"parts": (torch.randn(60, 16),)}, "parts"),
        ({"parts": (torch.randn(64, 15),)}, "parts"),
        ({"biases": (torch.zeros(3),)}, "biases"),
        ({"biases": ()}, None),
        ({"out": torch.randn(16, 24)}, "out"),
        ({"out": torch.randn(15, 32)}, "out"),
        ({"norms": (torch.ones(8), torch.ones(7))}, "k_norm"),
        ({"out_bias": torch.ones(2)}, "out_bias"),
    ],
)
def test_weights_are_checked_when_they_are_bound(ops, changes, name) -> None:
    if name is None:
        ops.joined.attention(attention_half(**changes))
        return
    with pytest.raises(ValueError, match=f"^{name}:"):
        ops.joined.attention(attention_half(**changes))


LATENT = LatentSpec(heads=3, q_rank=12, rank=20, nope_dim=6, rope_dim=4, value_dim=5, scale=1.0, rope=RopeSpec(4, 1e4))


def latent_half(**changes) -> LatentHalf:
    weights = {
        "norm": torch.ones(16),
        "eps": 1e-6,
        "parts": (torch.randn(12 + 24, 16),),
        "spec": LATENT,
        "queries": (torch.ones(12), torch.randn(30, 12)),
        "kv_norm": torch.ones(20),
        "keys": torch.randn(3, 20, 6),
        "values": torch.randn(3, 5, 20),
        "out": torch.randn(16, 15),
    }
    return LatentHalf(**weights | changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"parts": (torch.randn(35, 16),)}, "parts"),
        ({"queries": None}, "parts"),
        ({"queries": (torch.ones(11), torch.randn(30, 12))}, "parts"),
        ({"queries": (torch.ones(12), torch.randn(29, 12))}, "q"),
        ({"kv_norm": torch.ones(24)}, "kv_norm"),
        ({"keys": torch.randn(2, 20, 6)}, "keys"),
        ({"keys": torch.randn(3, 24, 6)}, "keys"),
        ({"values": torch.randn(3, 5, 24)}, "values"),
        ({"out": torch.randn(16, 16)}, "out"),
        ({"spec": replace(LATENT, rank=1021)}, "rank"),
        ({"queries": None, "parts": (torch.randn(30 + 24, 16),)}, None),
        ({}, None),
    ],
)
def test_weights_of_latent_attention_are_checked_when_they_are_bound(ops, changes, name) -> None:
    if name is None:
        ops.joined.latent(latent_half(**changes))
        return
    with pytest.raises(ValueError, match=f"^{name}:"):
        ops.joined.latent(latent_half(**changes))


def test_a_step_of_latent_attention_is_checked_and_changes_nothing_when_it_is_wrong(ops) -> None:
    run = ops.joined.latent(latent_half())
    kv = KVLayer(torch.zeros(2, 1, 64, 24, dtype=torch.bfloat16), None)
    x, seg, turn = torch.randn(3, 16), segments([0, 3], [0], [[1]], [0]), (torch.ones(3, 2), torch.ones(3, 2))
    before = x.clone()
    wrong = [
        ("x", (torch.randn(3, 15), None, turn, kv, seg)),
        ("cos", (x, None, (torch.ones(3, 3), torch.ones(3, 3)), kv, seg)),
        ("sin", (x, None, (torch.ones(3, 2), torch.ones(3, 1)), kv, seg)),
        ("cu", (x, None, turn, kv, segments([0, 2], [0], [[1]], [0]))),
        ("pages", (x, None, turn, kv, segments([0, 3], [0], [[2]], [0]))),
        ("held", (x, None, turn, KVLayer(kv.k[..., :20].contiguous(), None), seg)),
    ]
    for name, arguments in wrong:
        with pytest.raises(ValueError, match=f"^{name}:"):
            run(*arguments)
    assert torch.equal(x, before) and not kv.k.any()


def test_other_halves_are_checked_too(ops) -> None:
    def moe(spec: MoeSpec, rows: int, bank=None, guard=None) -> None:
        ops.joined.moe(MoeHalf(torch.ones(16), 1e-6, (torch.randn(rows, 16),), spec, None, torch.randn(16, 8), bank, guard))

    with pytest.raises(ValueError, match="^down:"):
        ops.joined.mlp(MlpHalf(torch.ones(16), 1e-6, (torch.randn(16, 16),), MlpSpec(8), torch.randn(15, 8)))
    spec = MoeSpec(experts=4, top_k=2, inter=8, shared_inter=8, shared_switch=True)
    moe(spec, 4 + 1 + 16)
    with pytest.raises(ValueError, match="^parts: hold 20 rows"):
        moe(spec, 20)
    with pytest.raises(ValueError, match="belong together"):
        moe(spec, 21, (torch.randn(3, 16, 16), torch.randn(3, 16, 8)))
    with pytest.raises(ValueError, match="^sound:"):
        moe(spec, 21, (torch.randn(4, 16, 16), torch.randn(4, 16, 8)), Guard(torch.ones(3, dtype=torch.uint8), print))
    with pytest.raises(ValueError, match="more experts wanted"):
        moe(MoeSpec(experts=4, top_k=5, inter=8), 4)


def test_a_step_is_checked_and_changes_nothing_when_it_is_wrong(ops) -> None:
    run = ops.joined.attention(attention_half())
    kv = KVLayer(*(torch.zeros(2, 2, 64, 8, dtype=torch.bfloat16) for _ in range(2)))
    x, seg = torch.randn(3, 16), segments([0, 3], [0], [[1]], [0])
    before = x.clone()
    wrong = [
        ("x", (torch.randn(3, 15), None, None, kv, seg)),
        ("added", (x, torch.randn(2, 16), None, kv, seg)),
        ("cos", (x, None, (torch.ones(2, 4), torch.ones(2, 4)), kv, seg)),
        ("cu", (x, None, None, kv, segments([0, 2], [0], [[1]], [0]))),
        ("pages", (x, None, None, kv, segments([0, 3], [0], [[2]], [0]))),
        ("k pages", (x, None, None, KVLayer(kv.k.float(), kv.v), seg)),
    ]
    for name, arguments in wrong:
        with pytest.raises(ValueError, match=f"^{name}:"):
            run(*arguments)
    assert torch.equal(x, before) and not kv.k.any()


def test_a_bound_half_keeps_its_weights(ops) -> None:
    half = attention_half()
    run, again = ops.joined.attention(half), ops.joined.attention(attention_half(parts=half.parts, out=half.out))
    x = torch.randn(3, 16)
    kv = [KVLayer(*(torch.zeros(2, 2, 64, 8, dtype=torch.bfloat16) for _ in range(2))) for _ in range(2)]
    seg, other = segments([0, 3], [0], [[1]], [0]), x.clone()
    run(x, None, None, kv[0], seg)
    del half, run
    gc.collect()
    torch.full((64, 16), 9.0)  # would lie where the weights were
    again(other, None, None, kv[1], seg)
    assert torch.equal(other, x)


def test_a_recording_is_asked_from_its_first_step_to_its_last(tmp_path) -> None:
    make_tiny("qwen2_moe", tmp_path, torch.bfloat16)
    ops = CpuOps(1)
    loaded = load_model(tmp_path, ops)
    moe = [layer.ffn for layer in loaded.spec.layers if isinstance(layer.ffn, MoeSpec)]
    recording = Recording(InPlace(expert_banks(loaded.spec, loaded.weights), ops), len(moe), moe[0].experts)
    driver = Driver(Decoder(loaded.spec, loaded.weights, ops, recording), torch.bfloat16)
    with torch.inference_mode():
        truth = Driver(Decoder(loaded.spec, loaded.weights, OneByOne(1)), torch.bfloat16).chunks(0, tokens(9), [3])
        got = across_a_recording(driver, recording, tokens(9))
    assert torch.equal(got, truth)
