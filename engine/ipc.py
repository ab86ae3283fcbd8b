"""Messages between the API process (`engine.app`) and the engine process (`engine.worker`): msgpack over a Unix socket.

Framing: 4-byte little-endian length, then one msgpack-encoded message of the unions below. Tokens only; text stays in the
API process. The API process owns request ids and text; the worker owns sequences, caches and sampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from engine.protocol import MoorageUsage

DRAIN_S = 10.0  # running answers may go on for this long after SIGTERM: half of what ops gives the engine before SIGKILL
BACKGROUND = -100  # priority of work that gives way to every request: preparing the next turn. At or below = background
MAX_MESSAGE = 256 << 20  # a 1M-token prompt is 4 MB; anything larger is a bug or an attack


def token_array(tokens: Iterable[int]) -> array:
    """int32 token ids as they travel and are kept: a list of 128K takes milliseconds to decode, to check and to hand on."""
    return array("i", tokens)


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """temperature 0 = greedy. `seed` None = random. `logit_bias` token id -> additive bias. `banned` are never sampled."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    banned: tuple[int, ...] = ()


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Token-level thinking control. With `budget` set, `close` is forced after that many tokens inside a thought."""

    close: tuple[int, ...] = ()  # the tokens that end a thought
    open_at_start: bool = False  # the prompt already opened a thought
    open: int | None = None
    budget: int | None = None


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What may be sampled, as a llguidance Lark grammar.

    `after`: only once that token was sampled (a thought's end, a call's opening). `repeat`: when the grammar is complete the text
    is free again until the next `after`; without it the answer ends there.
    """

    lark: str
    after: int | None = None
    repeat: bool = False


class Anchor(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint position: state after `offset` prompt tokens is worth keeping."""

    offset: int
    kind: str
    weight: float = 0.5


# --- API -> worker


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    id: str
    tokens: array  # of `token_array`
    max_new: int  # 0 = prefill only: the prompt is computed and kept for later requests
    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = ()
    min_new: int = 0
    logprobs: int | None = None  # None = none, 0 = chosen token only, k = top k as well
    prompt_logprobs: int | None = None  # echo: logprobs of prompt tokens too (turns prefix reuse off for this request)
    thinking: Thinking | None = None
    grammar: Grammar | None = None
    anchors: tuple[Anchor, ...] = ()
    starts: tuple[int, ...] = ()  # where each message of a conversation begins in `tokens`; -1 = not known. For log lines only
    session: str = ""
    priority: int = 0
    cache: bool = True  # False = neither match nor store


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    id: str
    reason: str = "client gone"


class Control(msgspec.Struct, frozen=True, kw_only=True, tag="control"):
    """A question or command answered by one ControlReply: `verb` in status | requests | cache.status | shutdown."""

    id: str
    verb: str
    args: dict[str, Any] = {}


ToWorker = Generate | Cancel | Control


# --- worker -> API


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    fraction: float  # 0..1
    stage: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    model: dict[str, Any]  # family, layers, parameters, bytes, kernels
    max_context: int  # tokens one sequence may hold: min(model positions, KV capacity)
    vocab: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Loading failed; the worker exits after sending this. `message` is one line with cause and remedy."""

    message: str


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Newly sampled tokens of one request (usually one). A stop token is not among them: it is `Done.stop_id`."""

    id: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """Prefill finished; sent once before the first Tokens."""

    id: str
    usage: MoorageUsage
    prompt_logprobs: list[TokenLogprob] | None = None  # one per prompt token after the first


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    id: str
    reason: str  # stop | length | cancelled; a prefill without sampling ends with length
    usage: MoorageUsage
    completion: int  # sampled tokens, the stop token included
    stop_id: int | None = None


class RequestError(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    id: str
    status: int
    message: str
    code: str = "engine_error"


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    id: str
    body: dict[str, Any]
    error: str = ""
    status: int = 200


FromWorker = Loading | Ready | Failed | Tokens | Started | Done | RequestError | ControlReply

# token arrays, the only type msgpack does not know, travel as their bytes
_to_worker = msgspec.msgpack.Decoder(ToWorker, dec_hook=lambda _, data: array("i", data))
_from_worker = msgspec.msgpack.Decoder(FromWorker)
_encoder = msgspec.msgpack.Encoder(enc_hook=lambda tokens: memoryview(tokens).cast("B"))


def frame(message: ToWorker | FromWorker) -> bytes:
    """Encode one message with its length prefix."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


class FrameReader:
    """Incremental frame parser: feed bytes in, take decoded messages out. Raises ValueError on an oversized frame."""

    def __init__(self, to_worker: bool) -> None:
        self._decode = (_to_worker if to_worker else _from_worker).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        out, at, have = [], 0, len(self._buffer)
        while have - at >= 4:
            size = int.from_bytes(self._buffer[at : at + 4], "little")
            if size > MAX_MESSAGE:
                raise ValueError(f"message of {size} bytes is larger than the limit of {MAX_MESSAGE}")
            if have - at - 4 < size:
                break
            out.append(self._decode(bytes(self._buffer[at + 4 : at + 4 + size])))
            at += 4 + size
        del self._buffer[:at]
        return out
