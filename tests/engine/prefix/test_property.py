"""Random traffic against the cache: contents, accounting and reported losses are always right."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import engine.prefix.cache as cache_module
import engine.prefix.store as store_module
from engine.ipc import Anchor
from engine.prefix.base import OutOfPages
from tests.engine.prefix.fakes import Sequence_, audit, kill, make, written

MIN_RESTORE = cache_module.MIN_RESTORE
INDEX_EVERY = store_module.INDEX_EVERY
SESSIONS = ("a", "b")
token = st.integers(1, 3)  # few tokens: branches, splits and re-joins are the rule

disks = st.sampled_from([None, 300, 1000, 1 << 20])
some = st.lists(token, min_size=1, max_size=12)


class Traffic(RuleBasedStateMachine):
    root: Path | None = None
    exact = True  # nothing of what was sent has been forgotten

    @initialize(
        hybrid=st.booleans(), pages=st.integers(10, 40), states=st.integers(0, 6), page=st.sampled_from([1, 2, 4]), disk=disks
    )
    def start(self, hybrid: bool, pages: int, states: int, page: int, disk: int | None) -> None:
        cache_module.MIN_RESTORE = 1  # sequences are short here, and every restored row is checked
        if disk is not None:
            self.root = Path(tempfile.mkdtemp())
        self.make = lambda: make(pages, 3, page=page, hybrid=hybrid, states=states, root=self.root, budget=disk, most_pages=50)
        self.cache = self.make()
        self.running: list[Sequence_] = []
        self.sent: dict[str, list[list[int]]] = {name: [] for name in SESSIONS}

    @rule(
        session=st.sampled_from(SESSIONS), extra=st.lists(token, min_size=1, max_size=12), cut=st.integers(0, 30), data=st.data()
    )
    def open(self, session: str, extra: list[int], cut: int, data: st.DataObject) -> None:
        seen = [s for sent in self.sent.values() for s in sent]
        base = data.draw(st.sampled_from(seen)) if seen else []
        prompt = [*base[: len(base) - cut if cut < len(base) else 0], *extra]
        anchors = [Anchor(offset=at, kind=data.draw(st.sampled_from(["system", "user"]))) for at in {len(prompt) // 2} if at]
        try:
            sequence = Sequence_(self.cache, prompt, session=session, anchors=anchors)
        except OutOfPages:
            return
        match = sequence.lease.match
        known = max((lcp(prompt, s) for s in self.sent[session]), default=0)
        lost = max(0, min(known, len(prompt) - 1) - match.common)
        assert match.lost == lost if self.exact else match.lost <= lost
        assert match.common < len(prompt) and (match.lost == 0 or match.reason not in ("", "first"))
        self.sent[session].append(prompt)
        sequence.name = session
        self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), upto=st.integers(1, 40))
    def prefill(self, data: st.DataObject, upto: int) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        try:
            sequence.run(min(upto, len(sequence.tokens)))
        except OutOfPages:
            sequence.check()

    @precondition(lambda self: any(s.done == len(s.tokens) for s in self.running))
    @rule(data=st.data(), more=st.lists(token, min_size=1, max_size=8), kind=st.sampled_from(["", "tool_call"]))
    def decode(self, data: st.DataObject, more: list[int], kind: str) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.running if s.done == len(s.tokens)]))
        for each in more:
            try:
                sequence.lease.grow(len(sequence.tokens) + 1)
            except OutOfPages:
                break
            sequence.decode([each])
        sequence.lease.checkpoint(sequence.tokens, kind)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reason=st.sampled_from(["stop", "cancelled", "preempted", "error"]))
    def close(self, data: st.DataObject, reason: str) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        sequence.check()
        sequence.close(reason)
        if reason != "error" and sequence.done > 0:
            self.sent[sequence.name].append(sequence.tokens[: sequence.done])

    @precondition(lambda self: self.root)
    @rule()
    def settle(self) -> None:
        written(self.cache)

    @precondition(lambda self: self.root)
    @rule(clean=st.booleans(), indexed=st.booleans())
    def restart(self, clean: bool, indexed: bool) -> None:
        store_module.INDEX_EVERY = 1 if indexed else INDEX_EVERY
        if clean:
            for sequence in self.running:
                sequence.close("shutdown")
            self.cache.shutdown()
        else:
            kill(self.cache)
        self.running.clear()
        self.exact = False
        self.cache = self.make()

    @rule(what=st.sampled_from(["ram", "disk", "all", "a", "ghosts"]))
    def forget(self, what: str) -> None:
        if what == "a":
            self.cache.delete_session("a")
            self.exact = False
        elif what == "ghosts":
            self.cache.ram.bound_ghosts(5)
            self.exact = False
        else:
            self.cache.flush(what)

    @rule(pages=st.integers(1, 50), slots=st.integers(1, 3))
    def resize(self, pages: int, slots: int) -> None:
        before = self.cache.pool.total, self.cache.slots.total
        held = {page for sequence in self.running for page in sequence.lease.pages}
        try:
            self.cache.resize(pages=pages)
        except OutOfPages:
            assert pages < self.cache.pool.total == before[0] and (pages < len(held) or any(s.lease.locked for s in self.running))
        else:
            assert self.cache.pool.total == pages
        try:
            self.cache.resize(slots=slots)
        except OutOfPages:
            assert slots < len(self.running) and self.cache.slots.total == before[1]

    def teardown(self) -> None:
        cache_module.MIN_RESTORE = MIN_RESTORE
        store_module.INDEX_EVERY = INDEX_EVERY
        if self.root is not None:
            kill(self.cache)
            shutil.rmtree(self.root)

    @invariant()
    def accounts(self) -> None:
        if hasattr(self, "cache"):
            audit(self.cache, self.running)
            for sequence in self.running:
                sequence.check()


def lcp(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=40, suppress_health_check=list(HealthCheck))
