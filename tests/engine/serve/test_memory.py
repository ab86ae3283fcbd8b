import re

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st

from engine.cli import cli
from engine.memory import TooLittleMemory, page_bytes, plan_cache, slot_bytes
from engine.models.spec import AttentionSpec, DeltaNetSpec, LatentSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from engine.nn.batch import PAGE, allocate_cache

ATTENTION = AttentionSpec(heads=4, kv_heads=2, head_dim=16, scale=0.25, rope=None)
DELTA = DeltaNetSpec(key_heads=2, value_heads=4, key_dim=8, value_dim=8, conv_kernel=4)
LATENT = LatentSpec(4, None, rank=24, nope_dim=16, rope_dim=8, value_dim=16, scale=0.2, rope=RopeSpec(8, 1e4))
DENSE = (ATTENTION, ATTENTION)
HYBRID = (DELTA, DELTA, ATTENTION)


def spec_of(mixers, max_positions: int = 4096) -> ModelSpec:
    layers = tuple(LayerSpec(m, MlpSpec(32)) for m in mixers)
    return ModelSpec("test", hidden=64, vocab=100, layers=layers, norm_eps=1e-6, max_positions=max_positions)


@pytest.mark.parametrize("mixers", [DENSE, HYBRID, (LATENT, ATTENTION)], ids=["attention", "hybrid", "latent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_allocated_cache(mixers, dtype) -> None:
    spec = spec_of(mixers)
    cache = allocate_cache(spec, pages=3, slots=2, kv_dtype=dtype)
    assert sum(t.nbytes for kv in cache.kv if kv for t in kv.tensors) == 3 * page_bytes(spec, dtype)
    assert sum(t.nbytes for s in cache.states if s for t in (s.conv, s.s)) == 2 * slot_bytes(spec)


def test_a_token_of_latent_attention_costs_one_row_whatever_the_heads() -> None:
    deepseek = LatentSpec(128, 1536, rank=512, nope_dim=128, rope_dim=64, value_dim=128, scale=0.07, rope=RopeSpec(64, 1e4))
    assert page_bytes(spec_of([deepseek] * 61), torch.bfloat16) == 61 * PAGE * 576 * 2


@given(
    mixers=st.sampled_from([DENSE, HYBRID, (DELTA,)]),
    available=st.integers(0, 1 << 30),
    max_context=st.sampled_from([0, 600, 4096, 9999]),
    kv_bytes=st.sampled_from([0, 1 << 20, 1 << 24]),
    max_running=st.integers(1, 16),
)
def test_a_plan_fits_and_serves_at_least_one_full_context(mixers, available, max_context, kv_bytes, max_running) -> None:
    spec = spec_of(mixers)
    try:
        plan = plan_cache(spec, torch.float32, available, max_context=max_context, kv_bytes=kv_bytes, max_running=max_running)
    except TooLittleMemory as problem:
        assert "\n" not in str(problem) and "iB" in str(problem)
        return
    assert plan.total_bytes <= (kv_bytes or available)
    assert plan.pages * PAGE >= plan.max_context > 0
    assert 1 <= plan.slots <= max_running
    if max_context:
        assert plan.max_context == min(max_context, 4096), "a context the user named is given or refused, never reduced"


def test_the_models_own_context_is_reduced_aloud(caplog) -> None:
    spec = spec_of(DENSE, max_positions=262_144)
    plan = plan_cache(spec, torch.float32, 256 << 20)
    assert 512 <= plan.max_context < 262_144
    assert str(plan.max_context) in caplog.text and "262144" in caplog.text


def test_too_little_says_what_is_needed_and_what_there_is() -> None:
    spec = spec_of(DENSE, max_positions=262_144)
    with pytest.raises(TooLittleMemory, match=r"262144 tokens needs 128.0 MiB of the 64.0 MiB available"):
        plan_cache(spec, torch.float32, 64 << 20, max_context=262_144)
    with pytest.raises(TooLittleMemory, match=r"--kv-memory asks for 1.00 GiB, 1.0 MiB are available: lower it"):
        plan_cache(spec, torch.float32, 1 << 20, kv_bytes=1 << 30)


@given(
    available=st.integers(0, 1 << 28),
    max_context=st.sampled_from([0, 600, 1 << 17]),
    kv_bytes=st.sampled_from([0, 1, 1 << 20, 1 << 30]),
)
def test_errors_speak_of_options_the_user_has(available, max_context, kv_bytes) -> None:
    try:
        plan_cache(spec_of(HYBRID, max_positions=1 << 18), torch.float32, available, max_context=max_context, kv_bytes=kv_bytes)
    except TooLittleMemory as problem:
        options = {name for p in typer.main.get_command(cli).commands["serve"].params for name in p.opts}
        assert not re.search(r"\w_\w", str(problem)), problem
        assert set(re.findall(r"--[\w-]+", str(problem))) <= options
