from hypothesis import given
from hypothesis import strategies as st

from engine import ipc
from engine.protocol import MoorageUsage, log_line, parse_log_line


@given(st.dictionaries(st.from_regex(r"\A[a-z_]{1,8}\Z"), st.text(min_size=1), max_size=5))
def test_log_line_round_trips_and_stays_one_line(fields: dict[str, str]) -> None:
    line = log_line("kv cache hit", **fields)
    assert len(line.splitlines()) == 1
    assert parse_log_line("12:00 INFO " + line) == ("kv cache hit", fields)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 17))
def test_frames_survive_any_split(sizes: list[int], step: int) -> None:
    messages = [ipc.Generate(id=str(i), tokens=ipc.token_array(range(n)), max_new=n) for i, n in enumerate(sizes)]
    data = b"".join(ipc.frame(m) for m in messages)
    reader, out = ipc.FrameReader(to_worker=True), []
    for at in range(0, len(data), step):
        out += reader.feed(data[at : at + step])
    assert out == messages


def test_a_long_prompt_travels_as_four_bytes_a_token_and_stays_an_array() -> None:
    """As a list it took longer to decode, check and convert than a hit may cost."""
    message = ipc.Generate(id="r", tokens=ipc.token_array(range(100_000, 228_000)), max_new=1)
    data = ipc.frame(message)
    assert len(data) < 4.1 * len(message.tokens)
    assert ipc.FrameReader(to_worker=True).feed(data) == [message]


def test_every_worker_message_round_trips() -> None:
    usage = MoorageUsage(prompt=10, common=8, new=2, source="ram")
    for message in (
        ipc.Loading(fraction=0.5, stage="weights"),
        ipc.Started(id="a", usage=usage),
        ipc.Tokens(id="a", tokens=[1], logprobs=[ipc.TokenLogprob(1, -0.5, [(1, -0.5)])]),
        ipc.Done(id="a", reason="stop", usage=usage, completion=3),
        ipc.RequestError(id="a", status=400, message="x"),
    ):
        assert ipc.FrameReader(to_worker=False).feed(ipc.frame(message)) == [message]
