"""The answer side of tool checks, streaming and not: calls are held until the answer has ended, content and thoughts flow on.

An agent runs its calls only when the answer has ended, so holding them costs it nothing and leaves every remedy open: repair,
asking again with the error shown to the model, or a clear error. The client gets one delta per call, complete and valid.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.answer import Answer
from gateway.calls import Call, Calls, arguments
from gateway.edits import edits
from gateway.errors import UpstreamError
from gateway.filters import Again
from gateway.glance import Event
from gateway.sse import Chunk
from gateway.toolcheck import Toolbox, Validators, Verdict
from gateway.toolcheck_text import CLOSE, OPEN, Spoken, calls_in, read_call
from gateway.turn import Decision, Turn

_CONTENT = re.compile(rb'"content": ?"(?!")')
SHOWN = 2000  # characters of a broken call shown to the model again


class ToolCheck:
    """Makes the filter for each turn; owns the compiled schemas they share."""

    def __init__(self) -> None:
        self._validators = Validators()

    def watch(self, turn: Turn, answer: Answer) -> ToolWatch | None:
        rule, tools = turn.policy.tools, turn.body.get("tools")
        if not rule.check or not isinstance(tools, list) or not tools:
            return None
        if any(isinstance(t, dict) and isinstance(t.get("custom"), dict) for t in tools):
            note = "custom tools have free text for arguments; with them the calls of this request pass unchecked"
            answer.decide(Decision("toolcheck", "custom", note))
            return None
        return ToolWatch(turn, answer, Toolbox(tools, rule, self._validators))


@dataclass(slots=True)
class Choice:
    """What is held of one choice."""

    calls: list[Call] = field(default_factory=list)
    streamed: Calls[Call] = field(default_factory=Calls)
    spoken: Spoken = field(default_factory=Spoken)
    content: list[str] = field(default_factory=list)  # held because a call was demanded
    settled: bool = False

    def _new(self) -> Call:
        self.calls.append(Call())
        return self.calls[-1]

    def take(self, place: int, piece: dict[str, Any]) -> None:
        call, text = self.streamed.take(place, piece, self._new)
        call.parts.append(text)


class ToolWatch:
    """An AnswerFilter."""

    def __init__(self, turn: Turn, answer: Answer, toolbox: Toolbox) -> None:
        self._turn, self._answer, self._toolbox = turn, answer, toolbox
        self._rule = turn.policy.tools
        self._demand = _demanded(turn.body.get("tool_choice"))
        self._choices: dict[int, Choice] = {}
        self._shown: list[dict[str, Any]] = []  # messages added for the model by retries
        self._retries = self._rule.retries if turn.body.get("n") in (None, 1) else 0
        self._said = False  # content has gone on
        self._passing = b""  # the block before this one, if nobody had to look into it
        self._mute = False  # the client has content of an earlier answer; that of the next one is dropped
        self._owed = ""  # content of the block in which the earlier answer was given up
        self._last: Chunk | None = None

    # --- AnswerFilter

    def wants(self, block: bytes) -> bool:
        if self._passing and not self._said:
            self._said = _CONTENT.search(self._passing) is not None
        wanted = self._looks_into(block)
        self._passing = b"" if wanted else block
        return wanted

    def _looks_into(self, block: bytes) -> bool:
        if b'"tool_calls"' in block or b'"finish_reason":"' in block or b'"finish_reason": "' in block:
            return True
        if self._mute or self._demand or (self._rule.rescue and (b"<" in block or b"\\u003c" in block)):
            return True
        return any([c.spoken.holding for c in self._choices.values()])

    def feed(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        out: list[Chunk] = []
        self._passing = b""
        try:
            for chunk in chunks:
                if chunk.raw and not self._looks_into(chunk.raw):
                    out.append(chunk)
                    continue
                self._last = chunk
                if chunk.seen is None or not self._only_calls(chunk.seen):
                    out += self._chunk(chunk)
        except Again:
            text = "".join(map(_content, out))
            self._mute = self._mute or self._said
            self._owed += text if self._said else ""
            raise
        self._said = self._said or any(map(_content, out))
        return out

    def _chunk(self, chunk: Chunk) -> list[Chunk]:
        choices = chunk.data.get("choices") if chunk.data else None
        if not isinstance(choices, list) or not choices:
            return [chunk]
        fresh = [f for c in choices for f in self._delta(c)]
        if self._owed:
            fresh.insert(0, {"index": 0, "delta": {"content": self._owed}, "finish_reason": None})
            self._owed = ""
        if not fresh and not chunk.data.get("usage"):
            return []
        if len(fresh) == len(choices) and all(a is b for a, b in zip(fresh, choices, strict=True)):
            return [chunk]
        rest = {k: v for k, v in chunk.data.items() if k != "choices"}
        out = [Chunk.of(_without_usage(rest) | {"choices": [choice]}) for choice in fresh]
        if rest.get("usage"):
            out.append(Chunk.of(rest | {"choices": fresh[-1:] if out else []}))
            del out[-2:-1]
        return out

    def _only_calls(self, seen: Event) -> bool:
        """Hold back an event that is nothing but fragments of calls, without parsing it; False when there is more in it."""
        if seen.usage is not None or not seen.choices:
            return False
        for choice in seen.choices:
            delta = choice.delta
            if delta is None or not delta.tool_calls or delta.content or delta.role or choice.finish_reason is not None:
                return False
            if delta.reasoning_content or delta.reasoning or delta.refusal or delta.text:
                return False
        for choice in seen.choices:
            state = self._choices.setdefault(choice.index, Choice())
            for place, call in enumerate(choice.delta.tool_calls):
                if isinstance(call, dict):
                    state.take(place, call)
        return True

    def finish(self) -> Sequence[Chunk]:
        out = []
        for index, state in list(self._choices.items()):
            if not state.settled and (state.calls or state.content or state.spoken.holding):
                base = _without_usage((self._last and self._last.data) or {})
                end = {"index": index, "delta": {}, "finish_reason": "stop"}
                out += [Chunk.of(base | {"choices": [c]}) for c in self._delta(end)]
        return out

    def whole(self, data: dict[str, Any]) -> dict[str, Any]:
        choices = data.get("choices")
        if not isinstance(choices, list):
            return data
        fresh = [self._message(c) for c in choices]
        return data if all(a is b for a, b in zip(fresh, choices, strict=True)) else data | {"choices": fresh}

    def restart(self) -> None:
        self._choices.clear()

    # --- one choice

    def _delta(self, choice: Any) -> list[Any]:
        """The choices that go on instead of this one; the same object alone when nothing changes."""
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            return [choice]
        index = choice.get("index") if isinstance(choice.get("index"), int) else 0
        state = self._choices.setdefault(index, Choice())
        fresh = self._take(state, delta)
        reason = choice.get("finish_reason")
        if not reason or state.settled:
            return [choice] if fresh is delta else [choice | {"delta": fresh}] if fresh else []
        text, calls, reason = self._settle(index, state, reason)
        if text:
            fresh = fresh | {"content": (fresh.get("content") or "") + text}
        if fresh is delta and not calls and reason == choice["finish_reason"]:
            return [choice]
        out = [{"index": index, "delta": fresh, "finish_reason": None}] if fresh else []
        out += [{"index": index, "delta": {"tool_calls": [call]}, "finish_reason": None} for call in calls]
        return [*out, choice | {"delta": {}, "finish_reason": reason}]

    def _take(self, state: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        """`delta` without what is held back; the same object when nothing is."""
        fresh = delta
        if isinstance(delta.get("tool_calls"), list):
            for place, call in enumerate(delta["tool_calls"]):
                if isinstance(call, dict):
                    state.take(place, call)
            fresh = {k: v for k, v in fresh.items() if k != "tool_calls"}
        text = delta.get("content")
        if not isinstance(text, str) or not text:
            return fresh
        out, spoken = state.spoken.feed(text) if self._rule.rescue else (text, [])
        for call in spoken:
            out += self._spoken_call(state, call)
        if self._demand and out:
            state.content.append(out)
            out = ""
        if out == text and not self._mute:
            return fresh
        fresh = {k: v for k, v in fresh.items() if k != "content"}
        return fresh | {"content": out} if out and not self._mute else fresh

    def _spoken_call(self, state: Choice, text: str) -> str:
        """Take a call that came as text; what is none goes on as the text it was."""
        call = read_call(text)
        if call is None or self._toolbox.check(call[0], "{}").name not in self._toolbox.names:
            return OPEN + text + CLOSE
        state.calls.append(Call(name=call[0], parts=[call[1]]))
        self._note("rescued", f"a call of {call[0][:64]!r} was text in the answer")
        return ""

    def _settle(self, index: int, state: Choice, reason: str) -> tuple[str, list[dict[str, Any]], str]:
        """The choice ends: (content that was held, calls that go on, finish_reason). Raises Again or a Refusal for bad ones."""
        state.settled = True
        text, unclosed = state.spoken.flush()
        text = "".join(state.content) + text
        if unclosed:
            text += OPEN + unclosed
        self._rescue_thought(index, state, text)
        calls: list[dict[str, Any]] = []
        ids: set[str] = set()
        truncated = False
        for place, call in enumerate(state.calls):
            verdict = self._toolbox.check(call.name, call.arguments)
            if reason == "length" and place == len(state.calls) - 1 and (verdict.problem or verdict.repairs):
                self._note("truncated", f"the call of {call.name[:64]!r} was cut off by the token limit and is left out")
                truncated = True
                continue
            if verdict.problem:
                self._bad(call, verdict)
            for repair in verdict.repairs:
                self._note("repaired", f"{verdict.name}: {repair}")
            id = call.id if call.id and call.id not in ids else f"call_{uuid.uuid4().hex[:24]}"
            ids.add(id)
            function = {"name": verdict.name, "arguments": verdict.arguments}
            calls.append({"index": len(calls), "id": id, "type": "function", "function": function})
        if self._demand and not truncated and not any(self._demand in ("*", c["function"]["name"]) for c in calls):
            self._not_called(text)
        return ("" if self._mute else text), calls, self._reason(reason, bool(calls))

    def _reason(self, reason: str, called: bool) -> str:
        right = "tool_calls" if called and reason == "stop" else "stop" if reason == "tool_calls" and not called else reason
        if right != reason:
            self._note("finish_reason", f"finish_reason {reason} became {right}")
        return right

    def _rescue_thought(self, index: int, state: Choice, text: str) -> None:
        """A call inside a thought counts when the answer has nothing else: the model meant to make it."""
        channel = self._answer.channel("reasoning_content", index)
        spoke = self._answer.channel("content", index)
        if self._rule.rescue and channel and not state.calls and not text and not (spoke and spoke.text.strip()):
            for call in calls_in(channel.text):
                self._spoken_call(state, call)

    def _message(self, choice: Any) -> Any:
        """A non-streamed choice: its message as one delta, settled at once."""
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            return choice
        index = choice.get("index") if isinstance(choice.get("index"), int) else 0
        state = self._choices.setdefault(index, Choice())
        fresh = self._take(state, message)
        reason = choice.get("finish_reason") or "stop"
        text, calls, reason = self._settle(index, state, reason)
        before = message.get("tool_calls") or []
        same_calls = [_essence(c) for c in before] == [_essence(c) for c in calls]
        content = ((fresh.get("content") or "") + text) or None
        if same_calls and content == (message.get("content") or None) and reason == choice.get("finish_reason"):
            return choice
        whole = {k: v for k, v in message.items() if k != "tool_calls"} | {"content": content}
        if calls:
            whole["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in calls] if not same_calls else before
        return choice | {"message": whole, "finish_reason": reason}

    # --- what is done about bad ones

    def _bad(self, call: Call, verdict: Verdict) -> None:
        """Returns only when the call is to be passed as it came."""
        id = call.id or "call_0"
        past = {"id": id, "type": "function", "function": {"name": call.name, "arguments": _object_or_empty(call.arguments)}}
        said = self._answer.channel("content")
        shown = (
            f"Error: this call was not run: {verdict.problem}. Its arguments: {call.arguments[:SHOWN]}\nCall again, corrected."
        )
        self._remedy(
            "invalid",
            f"{call.name[:64]}: {verdict.problem}",
            {"role": "assistant", "content": said.text if said else "", "tool_calls": [past]},
            {"role": "tool", "tool_call_id": id, "content": shown},
        )

    def _not_called(self, text: str) -> None:
        want = "a tool" if self._demand == "*" else f"the tool {self._demand!r}"
        self._remedy(
            "not_called",
            f"tool_choice asks for a call of {want}, the model did not make one",
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"Answer by calling {want}, nothing else."},
        )

    def _remedy(self, rule: str, problem: str, *messages: dict[str, Any]) -> None:
        refusal = UpstreamError(
            502,
            f"The model's tool call cannot be used: {problem}",
            "Send the request again; policies.tools says how often the model is asked again",
            kind="protocol",
            retryable=False,
            code="invalid_tool_call",
        )
        if self._retries > 0:
            self._retries -= 1
            self._shown += messages
            change = [*self._turn.body["messages"], *self._shown]
            raise Again(refusal, Decision("toolcheck", f"retry.{rule}", problem, edits(self._turn.body, (("messages",), change))))
        self._note(rule, problem)
        if self._rule.otherwise == "refuse":
            raise refusal

    def _note(self, rule: str, reason: str) -> None:
        self._answer.decide(Decision("toolcheck", rule, reason))


def _demanded(choice: Any) -> str:
    """The tool that must be called: its name, `*` for any, "" when none has to be."""
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        return str(choice["function"].get("name") or "")
    return "*" if choice == "required" else ""


def _object_or_empty(text: str) -> str:
    return "{}" if arguments(text) is None else text


def _essence(call: Any) -> tuple[Any, ...]:
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    return (call.get("id"), function.get("name"), function.get("arguments")) if isinstance(call, dict) else ()


def _content(chunk: Chunk) -> str:
    choices = chunk.data.get("choices") if chunk.data else None
    deltas = [c.get("delta") for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []
    return "".join(d["content"] for d in deltas if isinstance(d, dict) and isinstance(d.get("content"), str))


def _without_usage(data: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in data.items() if k != "usage"}
