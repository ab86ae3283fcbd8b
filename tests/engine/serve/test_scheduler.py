import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ipc import BACKGROUND, Done, RequestError, Sampling, Started, Tokens, token_array
from engine.nn.batch import Cache
from engine.prefix.base import Match
from engine.prefix.cache import RadixCache
from engine.prefix.naive import NaivePrefixCache
from engine.prefix.states import TensorStorage
from engine.protocol import parse_log_line
from engine.sequence import Sampler, Sequence
from tests.engine.serve.fake import VOCAB, FakeDecoder, alone, logits_of
from tests.engine.serve.harness import FakeEngine, generate


@dataclass(frozen=True)
class Arrival:
    at: int
    head: int  # tokens taken from a common text, so that prompts share prefixes
    tail: list[int]
    max_new: int
    session: str
    priority: int
    cancel_after: int | None
    stop: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return [(i * 5 + 3) % VOCAB for i in range(self.head)] + self.tail


arrivals = st.builds(
    Arrival,
    at=st.integers(0, 30),
    head=st.sampled_from([0, 10, 64, 128, 300]),
    tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=90),
    max_new=st.sampled_from([0, 1, 5, 70]),
    session=st.sampled_from(["", "a", "b"]),
    priority=st.sampled_from([0, 0, 1, -1, BACKGROUND]),
    cancel_after=st.sampled_from([None, None, None, 0, 3, 20]),
    stop=st.sampled_from([(), (5, 50)]),
)


def drive(engine: FakeEngine, plan: list[Arrival]) -> None:
    for tick in range(60):
        for i, a in enumerate(plan):
            if a.at == tick:
                engine.submit(generate(str(i), a.tokens, a.max_new, session=a.session, priority=a.priority, stop_ids=a.stop))
            if a.cancel_after is not None and a.at + a.cancel_after == tick:
                engine.scheduler.cancel(str(i), "test")
        engine.step()
    engine.drain()


def check(engine: FakeEngine, plan: list[Arrival]) -> None:
    for i, a in enumerate(plan):
        end, sampled = engine.end(str(i)), engine.tokens(str(i))
        expected = alone(a.tokens, a.max_new, a.stop)
        assert isinstance(end, Done), end
        if end.reason == "cancelled":
            assert a.cancel_after is not None and sampled == expected[: len(sampled)]
        else:
            assert sampled == expected
            assert end.reason == ("stop" if end.stop_id is not None else "length")
            assert end.completion == len(sampled) + (end.stop_id is not None)
            assert [type(m) for m in engine.of(str(i))][:1] == [Started]


@settings(max_examples=30)
@given(st.lists(arrivals, min_size=1, max_size=9), st.integers(8, 24), st.integers(1, 5), st.sampled_from([1, 7, 32, 500]))
def test_every_request_ends_once_and_as_if_it_were_alone(plan, pages, slots, chunk) -> None:
    """Random arrivals, cancels and page shortage; the fake decoder turns any mix-up of pages or slots into other text."""
    engine = FakeEngine(pages=pages, slots=slots, prefill_chunk=chunk)
    drive(engine, plan)
    check(engine, plan)
    assert len(engine.prefix.free_pages) == pages and len(engine.prefix.free_slots) == slots
    assert not engine.scheduler.running and not engine.scheduler.queue


def radix(cache: Cache, pages: int, slots: int) -> RadixCache:
    return RadixCache(TensorStorage(cache), pages=pages, slots=slots, state_budget=1 << 12)


@settings(max_examples=30)
@given(st.lists(arrivals, min_size=1, max_size=9), st.integers(8, 24), st.integers(1, 5), st.sampled_from([1, 7, 32, 500]))
def test_reuse_changes_no_token(plan, pages, slots, chunk) -> None:
    """The same over the real cache: shared pages, restored states, eviction and preemption together."""
    engine = FakeEngine(pages=pages, slots=slots, prefill_chunk=chunk, make_prefix=radix)
    drive(engine, plan)
    check(engine, plan)
    assert engine.prefix.status()["slots"] == {"total": slots, "free": slots}
    engine.submit(generate("all", [7] * (pages * 64 - 64), 0))  # needs every page: nothing is still pinned
    engine.drain()
    assert isinstance(engine.end("all"), Done)


def test_a_state_on_the_way_costs_no_step_of_its_own() -> None:
    """A prompt keeps its state in front of its last token: computed with the rest of it where a second slot is free."""
    prompt = [(i * 5 + 3) % VOCAB for i in range(300)]
    for slots, steps in ((1, 2), (2, 1)):
        engine = FakeEngine(pages=20, slots=slots, prefill_chunk=500, make_prefix=radix)
        for n in (150, 158, 300):
            before = engine.decoder.steps
            engine.run(generate(str(n), prompt[:n], 1))
            assert engine.decoder.steps - before == steps and engine.tokens(str(n)) == alone(prompt[:n], 1)
            engine.run(generate(f"{n} again", prompt[:n], 1))
            assert engine.started(f"{n} again").usage.common == n - 1
            assert engine.tokens(f"{n} again") == engine.tokens(str(n))
        assert engine.prefix.status()["slots"] == {"total": slots, "free": slots}


def test_a_spare_slot_is_given_back_when_the_step_breaks() -> None:
    engine = FakeEngine(pages=20, slots=2, prefill_chunk=500, decoder=FakeDecoder(fail=50), make_prefix=radix)
    engine.run(generate("broken", [*range(40), 50, 51], 1))
    assert isinstance(engine.end("broken"), RequestError)
    assert engine.prefix.status()["slots"] == {"total": 2, "free": 2}


def test_a_request_is_not_kept_out_by_pages_of_its_own_prompt_it_cannot_use() -> None:
    """A recurrent state was evicted, its pages were not: the prompt is computed again, in the room of the old pages."""
    engine = FakeEngine(pages=8, slots=1, make_prefix=radix)
    prompt = [(i * 5 + 3) % VOCAB for i in range(300)]
    engine.run(generate("first", prompt + [50, 25], 0))
    engine.run(*(generate(str(n), [n], 0, session=f"s{n}") for n in range(4)))
    engine.run(generate("again", prompt + [0], 90))
    assert engine.tokens("again") == alone(prompt + [0], 90)


def test_equal_prompts_are_computed_once() -> None:
    engine = FakeEngine(pages=40, slots=4, prefill_chunk=64, make_prefix=radix)
    prompt = [(n * 7) % VOCAB for n in range(500)]
    engine.submit(*(generate(f"n{i}", prompt, 3) for i in range(4)))
    engine.drain()
    assert [engine.tokens(f"n{i}") for i in range(4)] == [alone(prompt, 3)] * 4
    assert engine.started("n0").usage.new == 500
    assert [engine.started(f"n{i}").usage.new for i in range(1, 4)] == [1, 1, 1]


def test_prompts_that_share_their_beginning_compute_it_once() -> None:
    engine = FakeEngine(pages=40, slots=4, prefill_chunk=64, make_prefix=radix)
    head = [(n * 7) % VOCAB for n in range(500)]
    engine.submit(*(generate(f"n{i}", head + [i] * 40, 3) for i in range(3)))
    engine.drain()
    assert [engine.started(f"n{i}").usage.new for i in range(3)] == [540, 40, 40]


def test_pages_run_out_and_the_youngest_is_computed_again(caplog) -> None:
    engine = FakeEngine(pages=4, slots=2, prefill_chunk=64)
    engine.submit(generate("old", [1] * 60, 150), generate("young", [2] * 60, 150))
    engine.drain()
    assert engine.tokens("old") == alone([1] * 60, 150)
    assert engine.tokens("young") == alone([2] * 60, 150)
    assert engine.scheduler.counters["preempted"] == 1
    assert "req=young" in next(r.message for r in caplog.records if "preempted" in r.message)
    ends = [m.id for m in engine.messages if isinstance(m, Done)]
    assert ends == ["old", "young"]


def test_decode_rows_ride_along_with_a_long_prefill() -> None:
    engine = FakeEngine(pages=40, prefill_chunk=16)
    engine.submit(generate("stream", [1, 2, 3], 200))
    engine.step()
    engine.submit(generate("long", [4] * 800, 1))
    for _ in range(40):
        before = len(engine.tokens("stream"))
        engine.step()
        assert len(engine.tokens("stream")) == before + 1


def test_a_slow_prefill_beside_a_stream_takes_smaller_chunks() -> None:
    """10 ms a prompt token: chunks settle at what half a second holds, and grow back when the stream is over."""
    engine = FakeEngine(pages=60, prefill_chunk=512)
    engine.submit(generate("stream", [1, 2, 3], 40), generate("long", [4] * 3000, 1))
    sizes = []
    while engine.scheduler.busy:
        step = engine.scheduler.plan()
        sizes.append((sum(c.end - c.start for c in step if not c.seq.decoding), len(step)))
        outcomes = engine.runner.run(step)
        engine.now += 0.01 * sizes[-1][0] + 0.02
        engine.scheduler.commit(step, outcomes)
    beside = [size for size, rows in sizes[8:] if rows == 2]
    alone = [size for size, rows in sizes if rows == 1]
    assert beside and all(40 <= size <= 55 for size in beside)
    assert 512 in alone


@pytest.mark.parametrize("sessions", [("a", "b"), ("a", ""), ("", "b"), ("", "")])
def test_a_short_request_passes_a_long_prefill(sessions) -> None:
    engine = FakeEngine(pages=40, prefill_chunk=16)
    engine.submit(generate("long", [4] * 800, 1, session=sessions[0]))
    engine.step()
    engine.submit(generate("short", [5] * 20, 1, session=sessions[1]))
    engine.drain()
    assert [m.id for m in engine.messages if isinstance(m, Done)] == ["short", "long"]


@pytest.mark.parametrize("patient, others", [("patient", True), ("patient", False), ("", True), ("", False)])
def test_short_requests_without_end_do_not_starve_a_long_one(patient, others) -> None:
    engine = FakeEngine(pages=60, slots=4, prefill_chunk=16)
    engine.submit(generate("long", [4] * 1000, 1, session=patient))
    for n in range(600):
        engine.submit(generate(f"s{n}", [5 + n % 80] * 40, 1, session=f"s{n}" if others else ""))
        for _ in range(3):
            engine.step()
        if any(isinstance(m, Done) and m.id == "long" for m in engine.messages):
            return
    raise AssertionError("starved")


@pytest.mark.parametrize("flood", ["flood", ""])
def test_a_session_with_many_requests_does_not_push_out_another(flood) -> None:
    engine = FakeEngine(pages=60, slots=2, prefill_chunk=32)
    engine.submit(*(generate(f"a{n}", [n] * 100, 4, session=flood) for n in range(20)))
    engine.step()
    engine.submit(generate("b", [90] * 100, 4, session="one"))
    engine.drain()
    order = [m.id for m in engine.messages if isinstance(m, Done)]
    assert order.index("b") <= 3


def test_higher_priority_is_admitted_first_and_low_priority_still_ends() -> None:
    engine = FakeEngine(slots=1)
    engine.submit(generate("first", [1] * 10, 3))
    engine.step()
    engine.submit(generate("batch", [2] * 10, 3, priority=-2), generate("urgent", [3] * 10, 3, priority=2))
    engine.drain()
    assert [m.id for m in engine.messages if isinstance(m, Done)] == ["first", "urgent", "batch"]


def test_background_work_gives_its_place_to_a_real_request() -> None:
    engine = FakeEngine(slots=1, pages=20, prefill_chunk=16)
    engine.submit(generate("prepare", [1] * 600, 0, priority=BACKGROUND))
    for _ in range(5):
        engine.step()
    engine.submit(generate("real", [2] * 20, 3))
    engine.drain()
    assert [m.id for m in engine.messages if isinstance(m, Done)] == ["real", "prepare"]
    counters = engine.scheduler.counters
    assert (counters["displaced"], counters["preempted"], counters["prompt_tokens"]) == (1, 0, 20)


def test_background_work_does_not_take_the_pages_a_real_request_waits_for() -> None:
    engine = FakeEngine(slots=4, pages=8, prefill_chunk=64)
    engine.submit(generate("running", [1] * 200, 100))
    engine.step()
    engine.submit(generate("prepare", [2] * 200, 0, priority=BACKGROUND))
    engine.step()
    engine.submit(generate("real", [3] * 300, 2))
    engine.drain()
    assert [m.id for m in engine.messages if isinstance(m, Done)] == ["running", "real", "prepare"]


def test_equal_prompts_are_computed_one_after_the_other_so_that_the_cache_can_share() -> None:
    """The naive cache shares nothing, so only the order shows: the second waits until the first has its prompt computed."""
    engine = FakeEngine(pages=40, prefill_chunk=64)
    prompt = [3] * 400
    engine.submit(generate("a", prompt, 2), generate("b", prompt, 2))
    engine.step()
    assert [s.id for s in engine.scheduler.running] == ["a"]
    engine.drain()
    assert engine.tokens("a") == engine.tokens("b") == alone(prompt, 2)


def test_refusals_name_the_limit() -> None:
    engine = FakeEngine(pages=4, slots=1, max_queue=2)
    cases = {
        "long": (generate("long", [1] * 256), 400, ["256", "256"]),
        "empty": (generate("empty", []), 400, ["empty"]),
        "bad": (generate("bad", [1, VOCAB]), 400, [str(VOCAB)]),
        "negative": (generate("negative", [-1]), 400, ["-1"]),
        "stop": (generate("stop", [1], stop_ids=(VOCAB + 5,)), 400, [str(VOCAB + 5)]),
    }
    for id, (request, status, words) in cases.items():
        engine.submit(request)
        engine.step()
        end = engine.end(id)
        assert isinstance(end, RequestError) and end.status == status and all(w in end.message for w in words)
    engine.submit(*(generate(str(n), [1]) for n in range(3)))
    engine.step()
    full = engine.end("2")
    assert isinstance(full, RequestError) and full.status == 429 and "2" in full.message


def test_background_work_does_not_use_up_the_queue() -> None:
    engine = FakeEngine(slots=1, max_queue=2)
    engine.submit(generate("running", [1], 5))
    engine.step()
    engine.submit(*(generate(f"b{n}", [2], 0, priority=BACKGROUND) for n in range(5)), generate("real", [3], 1))
    engine.drain()
    assert isinstance(engine.end("real"), Done)
    assert [engine.end(f"b{n}").status for n in range(2, 5)] == [429] * 3


def test_max_new_is_clipped_at_the_context_and_said(caplog) -> None:
    caplog.set_level(logging.INFO)
    engine = FakeEngine(pages=2, slots=1)
    engine.submit(generate("a", [1] * 120, 1000))
    engine.drain()
    assert engine.end("a").reason == "length" and len(engine.tokens("a")) == 8
    assert any("asked=1000 given=8" in r.message for r in caplog.records)


def test_a_broken_step_fails_its_sequences_only() -> None:
    engine = FakeEngine(decoder=FakeDecoder(fail=66))
    engine.submit(generate("bad", [1, 66, 2], 5))
    engine.drain()
    engine.submit(generate("good", [1, 2, 3], 1))
    engine.drain()
    end = engine.end("bad")
    assert isinstance(end, RequestError) and end.status == 500
    assert engine.tokens("good") == alone([1, 2, 3], 1)
    assert len(engine.prefix.free_pages) == 16


def test_prefill_only_computes_the_prompt_and_samples_nothing() -> None:
    engine = FakeEngine()
    engine.submit(generate("p", [1] * 70, 0))
    engine.drain()
    assert engine.end("p").completion == 0 and engine.decoder.rows == 70
    assert not any(isinstance(m, Tokens) for m in engine.messages)


def test_the_lookup_is_logged_and_reported(caplog) -> None:
    caplog.set_level(logging.INFO)
    engine = FakeEngine()
    engine.submit(generate("r 1", [1] * 10, 1, session='x" req=forged'))
    engine.drain()
    (line,) = (parse_log_line(r.message) for r in caplog.records if "kv cache" in r.message)
    assert line[0] == "kv cache miss"
    assert line[1]["req"] == "r 1" and line[1]["session"] == 'x" req=forged' and line[1]["new"] == "10"
    usage = engine.started("r 1").usage
    assert (usage.prompt, usage.common, usage.new, usage.lost) == (10, 0, 10, 0)
    assert usage.prefill_ms >= 0 and usage.queue_ms > 0


@pytest.mark.parametrize(
    "match, line",
    [
        (
            Match(13890, "ram", "token-mismatch", "token[13895]", "tool_result@13890"),
            "kv cache hit prompt=14209 common=13890 new=319 lost=0 source=ram anchor=tool_result@13890 session=s req=r",
        ),
        (
            Match(268, "ram", "token-mismatch", "token[822]", "", 13622),
            "kv cache miss prompt=14209 common=268 new=13941 lost=13622 reason=token-mismatch at=message[0]+812 session=s req=r",
        ),
        (
            Match(268, "ram", "no-checkpoint", "token[1500]", "system@268", 900),
            "kv cache miss prompt=14209 common=268 new=13941 lost=900 reason=no-checkpoint at=message[2]+0 anchor=system@268 "
            "session=s req=r",
        ),
        (
            Match(9000, "disk", "ram-full", "token[9000]", "", 50),
            "kv cache hit prompt=14209 common=9000 new=5209 lost=50 source=disk reason=ram-full at=message[2]+7500 "
            "session=s req=r",
        ),
        (
            Match(0, "none", "token-mismatch", "token[5]"),
            "kv cache miss prompt=14209 common=0 new=14209 lost=0 reason=token-mismatch at=token[5] session=s req=r",
        ),
    ],
)
def test_the_log_line_of_a_lookup(caplog, match, line) -> None:
    caplog.set_level(logging.INFO)
    request = generate("r", [1] * 14209, 1, session="s", starts=(10, -1, 1500))
    seq = Sequence(request, 14209, 1, 0.0, 0.0, Sampler(request), [1] * 14209)
    seq.lease = SimpleNamespace(match=match)
    seq.note_lookup(0.0)
    assert caplog.messages == [line]


def test_shutdown_answers_everybody() -> None:
    engine = FakeEngine(slots=1)
    engine.submit(generate("running", [1] * 5, 50), generate("waiting", [2] * 5, 50))
    engine.step()
    engine.scheduler.shutdown()
    engine.step()
    assert {engine.end(i).status for i in ("running", "waiting")} == {503}
    assert len(engine.prefix.free_pages) == 16


def test_prompt_logprobs_do_not_depend_on_chunks() -> None:
    """Echo rows are gathered over chunks, small ones and one of the largest size, also across a preemption."""
    prompt = [(n * 3) % VOCAB for n in range(150)]
    got = []
    for chunk in (1, 7, 64, 500):
        engine = FakeEngine(prefill_chunk=chunk, make_prefix=radix)
        engine.run(generate("warm", prompt, 1))
        engine.run(generate("e", prompt, 2, prompt_logprobs=2, logprobs=1))
        got.append(engine.started("e").prompt_logprobs)
        assert engine.started("e").usage.common == 0
    assert got[0] == got[1] == got[2] == got[3]
    assert [p.token for p in got[0]] == prompt[1:]
    raw = torch.from_numpy(logits_of(prompt[:100])).log_softmax(0)
    assert got[0][99].logprob == pytest.approx(float(raw[prompt[100]]), abs=1e-5)


def test_sampled_logprobs_come_with_their_tokens() -> None:
    engine = FakeEngine()
    engine.run(generate("a", [1, 2, 3], 4, logprobs=3))
    entries = [entry for m in engine.of("a") if isinstance(m, Tokens) for entry in m.logprobs]
    assert [e.token for e in entries] == engine.tokens("a") == [e.top[0][0] for e in entries]
    assert all(len(e.top) == 3 and e.logprob == e.top[0][1] for e in entries)


def test_a_seed_gives_the_same_text_in_any_company() -> None:
    wild = Sampling(temperature=1.0, seed=11, presence_penalty=0.4)
    one, many = FakeEngine(), FakeEngine(slots=4, prefill_chunk=64, pages=7)
    one.run(generate("a", [4] * 70, 60, sampling=wild))
    many.run(*(generate(f"x{n}", [n] * 60, 80) for n in range(3)), generate("a", [4] * 70, 60, sampling=wild))
    assert many.scheduler.counters["preempted"] > 0
    assert one.tokens("a") == many.tokens("a")


@pytest.mark.parametrize("spelling", [1, 3, 63, 64, 65, 200])
def test_a_prompt_spelled_otherwise_by_the_cache_is_computed_as_the_cache_says(spelling: int) -> None:
    """Text keys: the lease may hold other tokens of the same text, fewer or pages more than the request's."""

    class Respelling(NaivePrefixCache):
        def open(self, tokens, **more):
            lease = super().open(tokens, **more)
            lease.tokens = token_array([*[9] * spelling, *tokens[2:]])
            return lease

    engine = FakeEngine(make_prefix=Respelling)
    engine.run(generate("a", [1, 2, 3], 5))
    assert engine.tokens("a") == alone([*[9] * spelling, 3], 5)
    assert engine.started("a").usage.prompt == spelling + 1
