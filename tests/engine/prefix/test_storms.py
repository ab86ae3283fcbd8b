"""Everything at once: forks in flight together, clients that leave, budgets for next to nothing, kills while it writes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from pathlib import Path

import pytest

from engine.prefix import store
from engine.prefix.base import OutOfPages
from tests.engine.prefix.fakes import Sequence_, audit, kill, make
from tests.engine.prefix.server import Server, serving

BOTH = pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])


def as_killed(source: Path, target: Path) -> None:
    """What a machine that stops now leaves of `source`: files half written, some missing, the journal wherever it is."""

    def copy(a: str, b: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # renamed or deleted while we copy
            shutil.copyfile(a, b)

    shutil.copytree(source, target, copy_function=copy, ignore=shutil.ignore_patterns("lock"))


@BOTH
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [400, 1 << 20], ids=["tiny", "roomy"])
def test_a_kill_in_the_middle_of_writes_leaves_nothing_wrong(
    tmp_path: Path, hybrid: bool, seed: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten lives of a cache, each opened over what a kill left of the one before, none of them given time to write."""
    chance = random.Random(seed)
    talks = {name: [base] for name, base in (("a", 1), ("b", 2), ("c", 3))}
    for life in range(10):
        monkeypatch.setattr(store, "INDEX_EVERY", chance.choice([1, 20, 1000]))
        cache = make(pages=30, hybrid=hybrid, states=6, root=tmp_path / str(life), budget=budget)
        for _ in range(chance.randrange(1, 12)):
            name = chance.choice(list(talks))
            talk = talks[name][: chance.randrange(1, len(talks[name]) + 1)] if chance.random() < 0.3 else talks[name]
            with contextlib.suppress(OutOfPages):
                new = [chance.randrange(10, 20) for _ in range(chance.randrange(1, 9))]
                running = Sequence_(cache, [*talk[-80:], *new], session=name).run()
                running.decode([chance.randrange(10, 20)]).close(chance.choice(["stop", "stop", "cancelled", "error"]))
                talks[name] = running.tokens
            if chance.random() < 0.3:
                cache.tick()
            audit(cache)
        as_killed(tmp_path / str(life), tmp_path / str(life + 1))
        kill(cache)


# --- over HTTP

PAGES = 12  # of 64 tokens: the two longest prompts with their answers, or a few short ones


def prompts(chance: random.Random) -> list[list[int]]:
    """Forks of forks: each goes on from a random place of an earlier one."""
    found = [[chance.randrange(690) for _ in range(150)]]
    while len(found) < 14:
        base = chance.choice(found)
        cut = chance.choice([len(base), chance.randrange(1, len(base))])
        found.append([*base[:cut], *(chance.randrange(690) for _ in range(chance.randrange(1, 100)))][:300])
    return found


async def answer(server: Server, prompt: list[int], session: str) -> list[int]:
    reply = await server.complete(prompt, session, max_tokens=4, logprobs=1, ignore_eos=True)
    return reply["choices"][0]["logprobs"]["token_ids"]


async def storm(server: Server, sent: list[list[int]], chance: random.Random) -> dict[int, list[int]]:
    """All prompts, a few at a time; every third client leaves before its answer. Prompt number -> answer of those who stayed."""
    got: dict[int, list[int]] = {}
    places = asyncio.Semaphore(6)

    async def client(n: int) -> None:
        async with places:
            task = asyncio.create_task(answer(server, sent[n], f"s{n % 3}"))
            if chance.random() < 0.3:
                for _ in range(chance.randrange(1, 40)):  # turns of the loop: as long on every machine
                    await asyncio.sleep(0)
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                got[n] = await task

    await asyncio.gather(*(client(n) for n in range(len(sent))))
    return got


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["tiny", "roomy"])
async def test_forks_in_flight_with_clients_that_leave_get_the_answers_of_a_cold_run(
    model: Path, tmp_path: Path, disk: str
) -> None:
    chance = random.Random(7)
    sent, cold = prompts(chance), []
    async with serving(model, prefill_chunk=64) as other:
        row, state = other.prefix.storage.row_bytes, other.prefix.storage.state_bytes
        for prompt in sent:
            await other.engine.control("cache.rebuild", options={"flush": "all"})
            cold.append(await answer(other, prompt, "s"))
    options = {"prefill_chunk": 64, "max_context": 350, "kv_bytes": PAGES * 64 * row + 8 * state}
    space, seen = {"tiny": 400 * row + 2 * state, "roomy": 1 << 30}[disk], 0
    for life in range(2):
        folder = tmp_path / str(life)
        async with serving(model, clean=False, kv_disk=str(folder), kv_disk_bytes=space, **options) as server:
            got = await storm(server, sent, chance)
            as_killed(folder, tmp_path / str(life + 1))
            prefix = server.prefix
            while prefix.tick():
                prefix.disk.collect(wait_s=10)
            assert prefix.slots.free == prefix.slots.total, "somebody who left holds a slot"
            await server.engine.control("cache.rebuild", options={"flush": "all"})
            assert prefix.pool.free == prefix.pool.total, "somebody who left holds pages"
        assert {n: got[n] for n in got} == {n: cold[n] for n in got}
        seen += len(got)
    assert seen > len(sent), "most clients were to stay"
