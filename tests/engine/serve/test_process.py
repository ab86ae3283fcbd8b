"""The engine process under its supervisor: loading, streaming, crashes, cancellation, endings."""

import asyncio
import contextlib
import os
import signal
import stat
import time
from pathlib import Path

import pytest
import pytest_asyncio

from engine.config import EngineConfig
from engine.ipc import Cancel, Done, RequestError, Sampling, Started, Tokens, frame
from engine.supervisor import EngineFailed, Supervisor, describe_exit
from tests.engine.serve.fake import VOCAB, alone
from tests.engine.serve.fake_worker import COMMAND
from tests.engine.serve.harness import generate

pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextlib.asynccontextmanager
async def engine(model: str = "slow", wait: bool = True, hang_s: float = 300.0, **settings):
    supervisor = Supervisor(EngineConfig(model=model, **settings), COMMAND, backoff_s=(0.01,), hang_s=hang_s)
    await supervisor.start()
    try:
        if wait:
            await supervisor.wait_ready()
        yield supervisor
    finally:
        await supervisor.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared():
    """One engine for the tests that leave it as it was."""
    async with engine() as supervisor:
        yield supervisor


async def collect(stream) -> list:
    return [m async for m in stream]


def text(messages: list) -> list[int]:
    return [t for m in messages if isinstance(m, Tokens) for t in m.tokens]


async def test_a_signal_to_the_whole_group_is_no_crash(caplog) -> None:
    async with engine() as supervisor:
        stream = asyncio.create_task(collect(supervisor.generate(generate("a", [1, 2, 3], 8))))
        os.kill(supervisor.state.pid, signal.SIGTERM)  # the worker got it first
        await supervisor._process.wait()
        for _ in range(50):  # turns of the loop in which a supervisor without patience starts another one
            await asyncio.sleep(0)
        await supervisor.stop()
        assert supervisor.state.restarts == 0 and "started again" not in caplog.text
        messages = await stream
        assert isinstance(messages[-1], Done) or messages[-1].status == 503


async def test_requests_stream_side_by_side_and_equal_those_alone(shared) -> None:
    prompts = [[n % VOCAB] * (n * 37 + 1) for n in range(8)]
    streams = [shared.generate(generate(str(n), p, 20)) for n, p in enumerate(prompts)]
    results = await asyncio.gather(*map(collect, streams))
    status = await shared.control("status")
    for prompt, messages in zip(prompts, results, strict=True):
        assert isinstance(messages[0], Started) and isinstance(messages[-1], Done)
        assert text(messages) == alone(prompt, 20)
    assert status.body["running"] == status.body["queued"] == 0
    assert status.body["counters"]["sampled_tokens"] >= 160 and status.body["decode_tok_s"] > 0


async def test_kill_9_ends_streams_with_a_clear_error_and_the_engine_comes_back() -> None:
    async with engine() as supervisor:
        stream = supervisor.generate(generate("a", [1, 2], 500))
        assert isinstance(await anext(stream), Started) and isinstance(await anext(stream), Tokens)
        first = supervisor.state.pid
        os.kill(first, signal.SIGKILL)
        messages = await collect(stream)
        end = messages[-1]
        assert isinstance(end, RequestError) and end.status == 502 and "SIGKILL" in end.message and "retry" in end.message
        early = await collect(supervisor.generate(generate("b", [1], 1)))
        assert [type(m) for m in early] == [RequestError] and early[0].status == 503
        await supervisor.wait_ready()
        assert supervisor.state.restarts == 1 and supervisor.state.pid != first
        assert text(await collect(supervisor.generate(generate("c", [1, 2], 5)))) == alone([1, 2], 5)


@pytest.mark.slow
async def test_an_engine_that_hangs_is_told_killed_and_started_again(caplog) -> None:
    async with engine("hangs:13", hang_s=5.0) as supervisor:
        first = supervisor.state.pid
        waiting = supervisor.generate(generate("fine", [1, 2], 5))
        assert text(await collect(waiting)) == alone([1, 2], 5)
        stuck = supervisor.generate(generate("stuck", [13], 5))
        asked = asyncio.create_task(supervisor.control("status", timeout=600.0))
        await supervisor._until(lambda: "said nothing" in supervisor.state.message)
        assert supervisor.state.ready, "it may be a long step"
        end = (await collect(stuck))[-1]
        assert end.status == 502 and "hung" in end.message and "retry" in end.message
        assert (await asked).status == 502
        await supervisor.wait_ready()
        assert supervisor.state.pid != first and not Path(f"/proc/{first}").exists() and not supervisor.state.message
    assert "lower --prefill-chunk" in caplog.text


@pytest.mark.slow
async def test_long_work_is_no_hang() -> None:
    """Many steps without a message of their own: the sign of life comes between them."""
    async with engine("slow", hang_s=4.0, prefill_chunk=1) as supervisor:
        end = (await collect(supervisor.generate(generate("long", [1] * 700, 0))))[-1]  # 700 steps of 10 ms
        assert isinstance(end, Done) and supervisor.state.restarts == 0


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", frame(Cancel(id="x"))], ids=["size", "bytes", "type"])
async def test_a_message_that_cannot_be_read_ends_the_process_not_the_supervision(data) -> None:
    async with engine() as supervisor:
        stream = supervisor.generate(generate("a", [1], 3000))
        await anext(stream)
        received = supervisor._received

        def once(frames, real):
            supervisor._received = received
            return received(frames, memoryview(data))

        supervisor._received = once
        os.kill(supervisor.state.pid, signal.SIGKILL)
        assert (await collect(stream))[-1].status == 502
        await supervisor._until(lambda: supervisor.state.restarts == 2)
        await supervisor.wait_ready()
        assert text(await collect(supervisor.generate(generate("b", [1, 2], 5)))) == alone([1, 2], 5)


async def test_a_death_is_told_with_what_it_often_means() -> None:
    assert describe_exit(-signal.SIGBUS).endswith(
        "(often: the model's file was cut short while it was mapped, or its disk failed)"
    )
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL (often: out of memory)"


async def test_a_process_that_cannot_be_started_is_final_in_the_end() -> None:
    supervisor = Supervisor(EngineConfig(model="slow"), ("/nonexistent/python",), backoff_s=(0.01,))
    await supervisor.start()
    with pytest.raises(EngineFailed, match="could not be started.*No such file.*3 times"):
        await supervisor.wait_ready()
    await supervisor.stop()


async def test_a_bug_in_the_supervision_leaves_no_request_waiting(monkeypatch) -> None:
    async with engine() as supervisor:
        stream = supervisor.generate(generate("a", [1], 3000))
        await anext(stream)
        monkeypatch.setattr("engine.supervisor.describe_exit", lambda code: 1 / 0)
        os.kill(supervisor.state.pid, signal.SIGKILL)
        end = (await asyncio.wait_for(collect(stream), 60))[-1]
        assert end.status == 500 and supervisor.state.phase == "failed"


async def test_how_far_loading_is_is_known_while_it_lasts_and_after_a_restart(tmp_path) -> None:
    gate = tmp_path / "gate"
    async with engine(f"waits:{gate}", wait=False) as supervisor:
        for phase in ("loading", "restarting"):
            await supervisor._until(lambda: supervisor.state.stage == "loading weights")
            assert (supervisor.state.phase, supervisor.state.fraction) == (phase, 0.25)
            early = (await collect(supervisor.generate(generate("early", [1], 1))))[-1]
            assert early.status == 503 and ("25%" if phase == "loading" else "restarted") in early.message
            gate.touch()
            state = await supervisor.wait_ready()
            assert (state.fraction, state.stage) == (1.0, "")
            gate.unlink()
            if phase == "loading":
                os.kill(state.pid, signal.SIGKILL)
                await supervisor._until(lambda: not supervisor.state.ready)


async def test_a_model_that_cannot_be_loaded_is_final_with_its_one_line() -> None:
    async with engine("missing", wait=False) as supervisor:
        with pytest.raises(EngineFailed, match="^no such model: missing; give the directory of a checkpoint$"):
            await supervisor.wait_ready()
        assert await supervisor.wait_failed() == supervisor.state.message
        assert supervisor.state.restarts == 0


@pytest.mark.slow
@pytest.mark.parametrize("model, words", [("dies-loading", "SIGKILL.*out of memory.*3 times"), ("bug-loading", "KeyError")])
async def test_dying_while_loading_is_final_in_the_end(model, words) -> None:
    async with engine(model, wait=False) as supervisor:
        with pytest.raises(EngineFailed, match=words):
            await supervisor.wait_ready()


async def test_leaving_a_stream_frees_its_pages(shared) -> None:
    with shared.generate(generate("a", [1] * 500, 3000)) as stream:
        await anext(stream)
    assert isinstance((await collect(stream))[-1], Done)
    cache = (await shared.control("cache.status")).body
    assert cache["pages"]["free"] == cache["pages"]["total"] and cache["slots"]["free"] == cache["slots"]["total"]


async def test_live_requests_are_listed(shared) -> None:
    stream = shared.generate(generate("a", [1] * 50, 3000, session="s"))
    await anext(stream)
    (row,) = (await shared.control("requests")).body["requests"]
    assert row["id"] == "a" and row["session"] == "s" and row["prompt"] == 50
    stream.cancel()
    assert (await collect(stream))[-1].reason == "cancelled"


async def test_an_unknown_verb_is_an_error_that_names_the_known_ones(shared) -> None:
    reply = await shared.control("nonsense")
    assert reply.status == 404 and "cache.status" in reply.error


async def test_a_command_the_engine_trips_over_is_answered_at_once(shared) -> None:
    reply = await shared.control("cache.forget", timeout=600.0)  # without the session it needs
    assert reply.status == 500 and "session" in reply.error


async def test_sigterm_lets_running_answers_end_takes_no_new_ones_and_flushes(capfd) -> None:
    async with engine() as supervisor:
        stream = supervisor.generate(generate("a", [1], 100))
        await anext(stream)
        process = supervisor._process
        process.send_signal(signal.SIGTERM)
        late = await collect(supervisor.generate(generate("b", [1], 5)))
        messages = await collect(stream)
        assert isinstance(messages[-1], Done) and text(messages) == alone([1], 100)
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert late[-1].status == 503 or text(late) == alone([1], 5), "refused, unless it was there before the signal"
    assert "prefix cache flushed" in capfd.readouterr().err


async def test_the_worker_ends_when_the_api_process_is_gone() -> None:
    async with engine() as supervisor:
        process = supervisor._process
        supervisor._writer.abort()  # what the kernel does when the API process dies
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_an_idle_engine_uses_no_cpu(shared) -> None:
    stat_file = Path(f"/proc/{shared.state.pid}/stat")

    def ticks() -> int:
        return sum(map(int, stat_file.read_text().rsplit(")", 1)[1].split()[11:13]))

    async def used() -> int:
        before = ticks()
        await asyncio.sleep(0.5)
        return ticks() - before

    async with asyncio.timeout(30):  # what came before may still be put away
        while await used() > 2:  # of 50 in half a second
            pass


async def test_the_socket_is_private_and_removed() -> None:
    async with engine() as supervisor:
        directory = supervisor._dir
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not directory.exists()


@pytest.mark.slow
async def test_a_request_that_breaks_the_step_fails_alone_and_repeated_failure_restarts() -> None:
    async with engine("broken:66") as supervisor:
        bad = (await collect(supervisor.generate(generate("bad", [66], 1))))[-1]
        assert isinstance(bad, RequestError) and bad.status == 500 and "kernel failed" in bad.message
        assert text(await collect(supervisor.generate(generate("good", [1], 1)))) == alone([1], 1)
        pid = supervisor.state.pid
        for n in range(3):
            assert (await collect(supervisor.generate(generate(f"x{n}", [66], 1))))[-1].status == 500
        deadline = time.monotonic() + 20
        while supervisor.state.pid == pid or not supervisor.state.ready:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def test_a_bad_request_does_not_end_the_loop(shared) -> None:
    """A message the worker cannot digest becomes an error of that request."""
    odd = generate("odd", [1], 3, sampling=Sampling(temperature=float("nan"), top_k=-5, min_p=-1.0))
    end = (await collect(shared.generate(odd)))[-1]
    assert isinstance(end, (Done, RequestError))
    assert text(await collect(shared.generate(generate("good", [1], 3)))) == alone([1], 3)
