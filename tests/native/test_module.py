"""The module's door: wrong input is a ValueError that names the argument, never a crash; threads and forks are safe."""

import hashlib
import importlib.util
import os
import re
import threading
import traceback
import types
from pathlib import Path

import pytest
import torch

import engine
from engine import _native
from engine.kernels import cpu
from engine.kernels.cpu import CpuOps
from engine.kernels.ops import KVLayer, Quant, StateLayer
from engine.models.spec import DeltaNetSpec, MoeSpec
from tests.native.helpers import segments

X = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda o: o.linear(X, torch.zeros(4, 9)), "columns"),
        (lambda o: o.linear(X, torch.zeros(4, 8, dtype=torch.int32)), "block type"),
        (lambda o: o.linear(X, torch.zeros(4, 8, dtype=torch.float64)), "float64"),
        (lambda o: o.linear(X.double(), torch.zeros(4, 8)), "float64"),
        (lambda o: o.linear(X, torch.zeros(8, 4).T), "contiguous"),
        (lambda o: o.linear(X, torch.zeros(4, 8), torch.zeros(5)), "bias"),
        (lambda o: o.linear(X, Quant(torch.zeros(4, 34, dtype=torch.uint8), "Q8_0", 32)), "multiple"),
        (lambda o: o.linear(torch.zeros(2, 64), Quant(torch.zeros(4, 34, dtype=torch.uint8), "Q8_0", 64)), "columns"),
        (lambda o: o.linear(torch.zeros(2, 32), Quant(torch.zeros(4, 34, dtype=torch.uint8), "Q9_9", 32)), "Q9_9"),
        (lambda o: o.embed(torch.zeros(4, 8), torch.tensor([4], dtype=torch.int32)), "ids"),
        (lambda o: o.embed(torch.zeros(4, 8), torch.tensor([-1], dtype=torch.int32)), "ids"),
        (lambda o: o.rms_norm(X, torch.zeros(7), 1e-6, False), "weight"),
        (lambda o: o.gate_mul(X, X, "relu"), "relu"),
        (lambda o: o.rope(torch.zeros(2, 1, 4), torch.zeros(2, 3), torch.zeros(2, 3), False), "cos"),
        (lambda o: o.add_norm(torch.zeros(2, 4), torch.zeros(2, 3), torch.zeros(4), 1e-6), "added"),
        (lambda o: o.turn_heads(torch.zeros(2, 3, 4), 2, 2, None, 1e-6, None, False), "x: holds fewer"),
        (lambda o: o.turn_heads(torch.zeros(2, 3, 4), 2, 1, (torch.zeros(4), None), 1e-6, None, False), "k weight"),
        (lambda o: o.turn_heads(torch.zeros(2, 3, 4), 2, 1, None, 1e-6, (torch.zeros(2, 3), torch.zeros(2, 3)), False), "cos"),
        (lambda o: o.linear(torch.zeros(2, 8, device="meta"), torch.zeros(4, 8)), "x"),
    ],
)
def test_bad_arguments_raise(call, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call(CpuOps(threads=1))


def test_bad_experts_raise() -> None:
    ops, ids, weights = CpuOps(threads=1), torch.tensor([[0, 5]] * 2, dtype=torch.int32), torch.ones(2, 2)
    with pytest.raises(ValueError, match="5 is not in 0..3"):
        ops.moe(X, ids, weights, torch.zeros(4, 6, 8), torch.zeros(4, 8, 3), "silu")
    with pytest.raises(ValueError, match="belong"):
        ops.moe(X, ids % 4, weights, torch.zeros(4, 6, 8), torch.zeros(3, 8, 3), "silu")


@pytest.mark.parametrize(
    ("cu", "start", "pages", "word"),
    [
        ([0, 2], [0], [[9]], "page 9 of 2"),
        ([0, 2], [0], [[-1]], "page -1"),
        ([0, 2], [63], [[0]], "too short"),
        ([0, 1], [0], [[0]], "cu"),
        ([0, 3, 2], [0, 0], [[0], [1]], "cu"),
        ([0, 2], [-1], [[0]], "too short"),
    ],
)
def test_bad_pages_raise(cu, start, pages, word: str) -> None:
    kv = KVLayer(*(torch.zeros(2, 1, 64, 8, dtype=torch.bfloat16) for _ in range(2)))
    q = torch.zeros(2, 1, 8)
    with pytest.raises(ValueError, match=word):
        CpuOps(threads=1).attention(q, q, q, kv, segments(cu, start, pages, [0] * len(start)), 1.0, None)


def test_not_tensors_raise() -> None:
    for bad in ([1.0], "x", 3):
        with pytest.raises(ValueError, match="expected a tensor"):
            _native.Ops(1).rms_norm(X, bad, X, 1e-6, False)
    with pytest.raises(TypeError):
        _native.Ops(1).rms_norm(None, X, X, 1e-6, False)
    for bad in (dict(threads=0), dict(threads=-4), dict(threads=2, isa="mmx")):
        with pytest.raises(ValueError):
            _native.Ops(**bad)


def test_empty_steps_are_fine() -> None:
    ops, none = CpuOps(threads=2), torch.zeros(0, 8)
    assert ops.linear(none, torch.zeros(4, 8)).shape == (0, 4)
    assert ops.rms_norm(none, torch.zeros(8), 1e-6, False).shape == (0, 8)
    assert ops.embed(torch.zeros(4, 8), torch.zeros(0, dtype=torch.int32)).shape == (0, 8)


def test_one_pool_serves_many_python_threads() -> None:
    ops, w = CpuOps(threads=3), torch.randn(500, 64)
    xs = [torch.randn(5, 64) for _ in range(8)]
    want, got = [ops.linear(x, w) for x in xs], [None] * 8

    def work(i: int) -> None:
        for _ in range(50):
            got[i] = ops.linear(xs[i], w)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_trace_tells_what_ran_how_much_it_read_and_when_each_thread_was_at_it(threads: int) -> None:
    ops, x, w = CpuOps(threads=threads)._ops, torch.ones(1, 64), torch.ones(256, 64)
    before, out = torch.empty(1, 256), torch.empty(1, 256)
    ops.linear(before, x, w, "", None)
    assert ops.trace(True) == []  # what ran before is not kept
    ops.linear(out, x, w, "", None)
    found = ops.trace(False)
    assert [(name, size) for name, size, *_ in found] == [("pack", 0), ("product", 256 * 64 * 4)]
    times = [time for _, _, _, asked, done, _ in found for time in (asked, done)]
    assert times == sorted(times)
    _, _, tasks, asked, done, at = found[1]
    assert tasks > 1 and len(at) == (threads if threads > 1 else 0)
    for start, end in at:
        assert (start, end) == (0, 0) or asked <= start <= end <= done  # one that came too late was not needed
    ops.linear(out, x, w, "", None)
    assert ops.trace(False) == [] and torch.equal(out, before)


def test_a_forked_child_has_working_threads() -> None:
    ops, x, w = CpuOps(threads=3), torch.randn(40, 64), torch.randn(500, 64)
    want = ops.linear(x, w)
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if torch.equal(ops.linear(x, w), want) else 1
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:  # a child that left by an exception would go on as a second copy of the test run
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(ops.linear(x, w), want)


def test_threads_do_not_change_the_bits_of_experts_and_states(isa) -> None:
    gen = torch.Generator().manual_seed(1)
    up, down = torch.randn(6, 192, 64, generator=gen).bfloat16(), torch.randn(6, 64, 96, generator=gen).bfloat16()
    x, logits = torch.randn(70, 64, generator=gen), torch.randn(70, 6, generator=gen)
    spec = DeltaNetSpec(key_heads=1, value_heads=2, key_dim=16, value_dim=96, conv_kernel=4)
    qkv, a = torch.randn(70, spec.conv_channels, generator=gen), torch.randn(70, 2, generator=gen)
    weights = {"conv": torch.randn(spec.conv_channels, 4, generator=gen), "dt_bias": torch.zeros(2), "a_log": torch.zeros(2)}
    results = []
    for threads in (1, 2, 5):
        ops = CpuOps(threads, isa)
        ids, shares = ops.route(logits, MoeSpec(experts=6, top_k=3, inter=96))
        state = StateLayer(torch.zeros(1, spec.conv_channels, 3), torch.zeros(1, 2, 16, 96))
        out = ops.delta_net(qkv, a, a, weights, state, segments([0, 70], [0], [[0]], [0]), spec)
        results.append(torch.cat([ops.moe(x, ids, shares, up, down, "silu").flatten(), out.flatten(), state.s.flatten()]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_module_of_another_interface_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("engine.kernels.cpu")
    for older in ({"ABI": cpu.ABI - 1}, {}):  # `{}`: built before there was a number
        module = types.SimpleNamespace(__file__="engine/_native.so", TYPES=_native.TYPES, NUMERICS=_native.NUMERICS, **older)
        monkeypatch.setattr(engine, "_native", module)
        with pytest.raises(ImportError, match=r"engine/_native\.so .* run ops/build_native"):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_interface_number_is_of_these_signatures() -> None:
    """When a function takes other arguments: raise ABI in native/cpu.h and cpu.py, and put the new digest here."""
    native = Path(__file__).resolve().parents[2] / "native"
    source = "\n".join(path.read_text() for path in sorted(native.glob("module*.cpp")))
    pattern = r"^[\w:]+\*? \w+\((?:Ops&|int|Logits|(?:const )?(?:Attention|Latent|Delta|Mlp|Moe)&) [^{]*\{"
    pattern += r"|m\.(?:def|attr)\(\"\w+\"|\.def\w*\((?:[^;]*?)\)(?=\n)"
    signatures = re.findall(pattern, source, re.M)
    digest = hashlib.sha256("\n".join(" ".join(text.split()) for text in signatures).encode()).hexdigest()[:16]
    assert (cpu.ABI, digest) == (8, "e32ca6e64d5128f6"), signatures


def test_scratch_of_a_few_rows_takes_no_huge_page() -> None:
    """Two dozen buffers are first used by an engine's first prompt, and a fresh huge page takes as long as a step."""

    def huge() -> str:
        return re.search(r"AnonHugePages: .*", Path("/proc/self/smaps_rollup").read_text())[0]

    ops, w, before = CpuOps(threads=1), torch.randn(64, 256).bfloat16(), huge()
    x = ops.linear(torch.randn(16, 256), torch.randn(256, 256))
    ids, weights = torch.tensor([[0, 1]] * 16, dtype=torch.int32), torch.ones(16, 2)
    ops.moe(x, ids, weights, w.view(2, 32, 256), torch.randn(2, 256, 16).bfloat16(), "silu")
    assert huge() == before


def test_kernels_of_other_bits_have_another_name(monkeypatch) -> None:
    """By it cached tokens are told apart."""
    name = CpuOps(threads=1).numerics
    monkeypatch.setattr(_native, "NUMERICS", _native.NUMERICS + 1)
    assert CpuOps(threads=1).numerics != name
