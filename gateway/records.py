"""Request records: one JSON object a line, one per request, written last and whatever happened.

The event loop only puts a finished dict into a bounded queue; one thread serialises, writes, rotates and syncs. A full queue or
a full disk never delays a request: the record is dropped, counted, and said once per outage. `kill -9` loses what waits for the
thread (BATCH_S, more while it is behind; a power cut also what was not synced, see `fsync`) and can tear at most the last line.
On start such a tail is closed with a newline, so the next record begins on a line of its own.

Fields of a record: docs/gateway.md.
"""

from __future__ import annotations

import base64
import codecs
import errno
import logging
import os
import re
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import orjson

from gateway.answer import Answer, Attempt
from gateway.config import Records as Settings
from gateway.redaction import Redactor
from gateway.rotation import Rotation
from gateway.turn import Turn

log = logging.getLogger("moorage.records")

VERSION = 1
RECORDED_HEADERS = ("user-agent", "content-type", "x-request-id", "anthropic-version", "anthropic-beta", "originator")
# What a record weighs in the queue beside its bodies.
BASE_BYTES = 4096
BATCH_S = 0.05  # what `kill -9` may lose: short enough to miss nothing of interest, long enough to cost nothing
BATCH_BYTES = 1 << 20  # of one write; bounds the memory of encoded lines
ESCAPES = ((b"\\", b"\\\\"), (b'"', b'\\"'), (b"\n", b"\\n"), (b"\r", b"\\r"), (b"\t", b"\\t"))
PIECE_BYTES = 64 << 10  # takes a tenth of a millisecond, for which nobody else has the interpreter
BUSY_S = 0.001  # of work at a stretch; then the event loop has as long a time for itself


def record(turn: Turn, answer: Answer) -> dict[str, Any]:
    """The record of one request as plain data; bodies are still bytes, `encode` makes them text."""
    received, session = turn.received, turn.session
    sent = answer.attempts[-1] if answer.attempts else None
    return {
        "v": VERSION,
        "id": turn.id,
        "time": received.at,
        "dialect": turn.dialect.name,
        "route": received.route,
        "model": turn.model,
        "stream": turn.stream,
        "caller": turn.caller.key,
        "peer": received.peer,
        "session": {"id": session.id, "source": session.source, "agent": session.agent, "turn_class": session.turn_class},
        "received": {
            "body": received.body,
            "content_encoding": received.content_encoding,
            "headers": {k: received.headers[k] for k in RECORDED_HEADERS if k in received.headers},
        },
        "sent": None if sent is None else {"body": sent.sent, "deployment": sent.deployment.name},
        "thinking": {"mode": turn.thinking.mode, "budget": turn.thinking.budget, "source": turn.thinking.source},
        "decisions": [d.record() for d in (*turn.decisions, *answer.decisions)],
        "hints": msgspec.to_builtins(turn.hints),
        "attempts": [_attempt(a, answer) for a in answer.attempts],
        "status": answer.status,
        "outcome": answer.outcome,
        "error": _error(answer),
        "answer": _answer(answer),
        "usage": answer.usage,
        "reuse": reuse(answer.usage),
        "ms": {"first_byte": answer.ms(answer.first_byte), "total": answer.ms(answer.ended)},
    }


def _attempt(attempt: Attempt, answer: Answer) -> dict[str, Any]:
    error = attempt.error
    return {
        "deployment": attempt.deployment.name,
        "at_ms": answer.ms(attempt.at),
        "ms": round(attempt.seconds * 1000, 3),
        "status": attempt.status,
        "error": error.text if error else None,
    }


def _error(answer: Answer) -> dict[str, Any] | None:
    e = answer.error
    return None if e is None else {"status": e.status, "code": e.code, "message": e.message, "remedy": e.remedy}


def _answer(answer: Answer) -> dict[str, Any]:
    """Channels in the order they began. Choice 0 has the plain name, further ones `name[1]`."""
    channels = {}
    for (choice, name), c in answer.channels.items():
        times = {"first_ms": answer.ms(c.first), "last_ms": answer.ms(c.last), "chunks": c.chunks, "chars": c.chars}
        text = {} if name == "tool_calls" else {"text": c.text}
        channels[f"{name}[{choice}]" if choice else name] = times | text
    calls = [
        {"choice": choice, "id": call.id, "name": call.name, "arguments": call.arguments} for choice, call in answer.tool_calls
    ]
    return {
        "id": answer.upstream_id,
        "finish_reason": answer.finish.get(0),
        "channels": channels,
        "tool_calls": calls,
        "bytes": answer.upstream_bytes,
        "malformed": answer.malformed,
        "keepalives": answer.keepalives,
    }


def reuse(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """prompt, common, new and, from our engine, lost, source, reason: whatever the upstream's usage tells of them."""
    if not usage:
        return None
    if isinstance(ours := usage.get("moorage"), dict):
        return ours
    details = usage.get("prompt_tokens_details")
    common = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt = usage.get("prompt_tokens")
    if not isinstance(prompt, int) or not isinstance(common, int):
        return None
    return {"prompt": prompt, "common": common, "new": prompt - common}


def encode(data: dict[str, Any]) -> bytes:
    """One line. Bodies that are UTF-8 stand as text (byte-identical when encoded again), others as base64."""
    out = dict(data)
    names = [name for name in ("received", "sent") if out.get(name)]
    for name, (text, encoding) in zip(names, _texts([out[name]["body"] for name in names]), strict=True):
        out[name] = out[name] | {"body": orjson.Fragment(text), "encoding": encoding}
    return orjson.dumps(out, default=str, option=orjson.OPT_APPEND_NEWLINE)


def _texts(bodies: list[bytes]) -> list[tuple[bytes, str]]:
    """`_text` of each body. One that led to another was JSON, as that is. What was sent mostly begins as what was received;
    that beginning is made once.
    """
    if len(bodies) != 2 or not all(map(_is_text, bodies)):
        return [_text(body) for body in bodies]
    cut = len(bodies[0].rstrip()) - 1
    cut = cut if cut > 0 and bodies[1].startswith(bodies[0][:cut]) else 0
    begin = _escaped(bodies[0][:cut])
    return [(b'"%s%s"' % (begin, _escaped(body[cut:])), "utf-8") for body in bodies]


def _is_text(body: bytes) -> bool:
    if body.isascii():
        return True
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _escaped(json: bytes) -> bytes:
    """A piece of a JSON text as it stands inside a JSON string. JSON has no control characters but white space; knowing that,
    this takes a fifth of the time of `_text`.
    """
    for char, escape in ESCAPES:
        if char in json:
            json = json.replace(char, escape)
    return json


def _text(body: bytes) -> tuple[bytes, str]:
    """(a body as a JSON string, its encoding). In pieces, between which the event loop may have the interpreter."""
    if len(body) <= PIECE_BYTES:
        try:
            return orjson.dumps(body.decode()), "utf-8"
        except UnicodeDecodeError:
            return b'"%s"' % base64.b64encode(body), "base64"
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        pieces = [orjson.dumps(decoder.decode(body[i : i + PIECE_BYTES]))[1:-1] for i in range(0, len(body), PIECE_BYTES)]
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return b'"%s"' % base64.b64encode(body), "base64"
    return b'"%s"' % b"".join(pieces), "utf-8"


class RecordWriter:
    """The queue and its thread. `put` never blocks and takes no lock; `close` writes what is queued and stops.

    The thread looks every BATCH_S and writes everything there is at once: waking it for each record would make it fight the event
    loop for the interpreter, which costs requests milliseconds.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._path = Path(settings.path)
        self._queue: deque[tuple[int, dict[str, Any]]] = deque()  # append and popleft are atomic
        self._put_bytes = 0  # written by the event loop only
        self._taken_bytes = 0  # written by the thread only
        self._refused = 0  # by the event loop only
        self._lost_lines = 0  # by the thread only
        self._rotation = Rotation(settings)
        self._redactor = Redactor(settings.redact, settings.bodies)
        self._opened = 0.0  # when the present file began, wall clock
        self._stop = threading.Event()
        self._failing = False
        self._file: int | None = None
        self._size = 0
        self._synced = time.monotonic()
        self._dirty = False  # something was written since the last fsync
        self._rested = 0.0  # CPU time of the thread when it last let the event loop have the interpreter
        self.written = 0
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records lost to a full queue or a disk that takes nothing."""
        return self._refused + self._lost_lines

    @property
    def queued(self) -> int:
        """Records that wait for the thread."""
        return len(self._queue)

    def put(self, data: dict[str, Any]) -> bool:
        """Queue one record; False when the queue is full and it was dropped (and counted)."""
        size = BASE_BYTES + len(data["received"]["body"]) + (len(data["sent"]["body"]) if data["sent"] else 0)
        waiting = self._put_bytes - self._taken_bytes
        if self._queue and (len(self._queue) >= self._settings.queue or waiting + size > self._settings.queue_mb * (1 << 20)):
            self._refused += 1
            return False
        self._put_bytes += size
        self._queue.append((size, data))
        return True

    def close(self, timeout: float = 10.0) -> None:
        self._stop.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.error("records: %d were not written before the stop; the disk of %s is too slow", len(self._queue), self._path)

    # --- the thread

    def _run(self) -> None:
        self._rotation.tidy()
        stopping = False
        while not stopping:
            stopping = self._stop.wait(BATCH_S)
            while self._queue:
                self._write_batch(self._batch())
            self._sync_if_due(stopping)
        self._shut()
        self._rotation.wait()

    def _rest(self) -> None:
        """Not more than half of the interpreter for records, unless so many wait that some may be lost."""
        busy = time.thread_time() - self._rested
        if busy < BUSY_S or self._stop.is_set():
            return
        if (
            4 * (self._put_bytes - self._taken_bytes) < self._settings.queue_mb * (1 << 20)
            and 4 * self.queued < self._settings.queue
        ):
            time.sleep(busy)
        self._rested = time.thread_time()

    def _batch(self) -> list[bytes]:
        lines, size = [], 0
        while self._queue and size < BATCH_BYTES:
            self._rest()
            weight, data = self._queue.popleft()
            self._taken_bytes += weight
            try:
                lines.append(encode(self._redactor.apply(data)))
                size += len(lines[-1])
            except Exception:  # our own bug; the thread and every other record must survive it
                self._lost_lines += 1
                log.exception("records: the record of %s cannot be written as JSON", data.get("id"))
        return lines

    def _write_batch(self, lines: list[bytes]) -> None:
        """All of `lines`, in as few writes as rotation allows; what the disk does not take is lost and counted."""
        limit, done, before = self._settings.rotate_mb * (1 << 20), 0, self.written
        try:
            if self._file is not None and self._taken_away():
                log.warning("records: %s was moved or removed; it is begun anew", self._path)
                self._shut()
                self._opened = 0.0
            while done < len(lines):
                if self._file is None:
                    self._open()
                if self._size and (self._size + len(lines[done]) > limit or self._old()):
                    self._rotate()
                    continue
                end, size = done + 1, self._size + len(lines[done])
                while end < len(lines) and size + len(lines[end]) <= limit:
                    size += len(lines[end])
                    end += 1
                self._append(lines[done:end])
                done = end
        except OSError as e:
            self._lost(e, len(lines) - (self.written - before))

    def _append(self, lines: list[bytes]) -> None:
        data = lines[0] if len(lines) == 1 else b"".join(lines)
        taken = os.write(self._file, data)
        self._size += taken
        self._dirty = True
        if taken < len(data):  # a disk that fills up takes part of a line; opening the file again closes that line
            self.written += data.count(b"\n", 0, taken)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.written += len(lines)
        if self._failing:
            self._failing = False
            log.warning("records: writing to %s again; %d records were lost so far", self._path, self.dropped)
        if self._settings.fsync == "always":
            self._sync()

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Prompts are private: nobody but the owner reads them.
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._size = os.fstat(self._file).st_size
        self._opened = self._opened or self._began()
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
            self._size += os.write(self._file, b"\n")

    def _taken_away(self) -> bool:
        """Has somebody moved or removed the file, or the folder that it was in? What is written to it then, nobody finds."""
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except OSError:
            return True

    def _began(self) -> float:
        """When the present file began: the time of its first record, which stands near its start."""
        found = re.search(rb'"time":(\d+(?:\.\d+)?)', os.pread(self._file, 4096, 0)) if self._size else None
        return float(found[1]) if found else time.time()

    def _rotate(self) -> None:
        """The full (or old) file gets a number."""
        self._shut()
        self._rotation.rotate()
        self._opened = 0.0

    def _old(self) -> bool:
        """Has the file been written to for longer than one file may be?"""
        hours = self._settings.rotate_hours
        return bool(hours and self._opened and time.time() - self._opened >= hours * 3600)

    def _sync_if_due(self, stopping: bool) -> None:
        if self._dirty and self._settings.fsync != "never" and (stopping or time.monotonic() - self._synced >= 1.0):
            try:
                self._sync()
            except OSError as e:
                self._lost(e, 0)

    def _sync(self) -> None:
        if self._file is not None:
            os.fsync(self._file)
        self._dirty = False
        self._synced = time.monotonic()

    def _shut(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _lost(self, error: OSError, lines: int) -> None:
        self._lost_lines += lines
        if not self._failing:
            self._failing = True
            log.error("records: cannot write %s (%s); records are lost until there is room", self._path, error.strerror)
        self._shut()
