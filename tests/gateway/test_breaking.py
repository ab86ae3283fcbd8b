"""What a team's gateway lives through, done to real processes under load: Redis, the engine and the record disk go and come back.

Nothing here looks at a clock: every request must end, and end the way it should. (That a disk which hangs holds nobody up is in
test_claims.py.)
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.diagnostics.reader import Reader
from tests.support.gateway import ask
from tests.support.processes import GatewayProcess, Redis, Upstream

pytestmark = pytest.mark.slow

KEYS = [{"name": "free", "key": "free", "rpm": 10**6, "tpm": 10**9}, {"name": "few", "key": "few", "rpm": 20}]
WORKERS = 8


def config(*upstreams: Upstream, **sections: Any) -> dict[str, Any]:
    models = [{"model_name": "m", "litellm_params": {"model": "moorage/m", "api_base": up.base}} for up in upstreams]
    return {"model_list": models} | sections


class Load:
    """Streams asked for in a loop by some workers until the `async with` ends. `ends` counts how they ended."""

    def __init__(self, *gateways: GatewayProcess, key: str = "free", **more: Any) -> None:
        self._gateways, self._key, self._more = gateways, key, more
        self.ends: Counter[str] = Counter()
        self.seen: list[str] = []
        self._stop = False

    async def __aenter__(self) -> Load:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
        self._tasks = [asyncio.create_task(self._worker(g)) for g in self._gateways for _ in range(WORKERS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)
        await self._http.close()

    async def _worker(self, gateway: GatewayProcess) -> None:
        while not self._stop:
            self.ends[await self.one(gateway)] += 1

    async def one(self, gateway: GatewayProcess, key: str = "") -> str:
        """How one stream ended: done | error (an event) | cut (neither) | a status."""
        body, headers = ask(stream=True) | self._more, {"x-api-key": key or self._key}
        async with self._http.post(gateway.url + "/v1/chat/completions", json=body, headers=headers) as response:
            data = await response.read()
        if response.status != 200:
            self.seen.append(data[:300].decode())
            return str(response.status)
        return "done" if data.endswith(b"data: [DONE]\n\n") else "error" if b'"error"' in data.split(b"\n\n")[-2] else "cut"

    async def more(self, count: int) -> None:
        """Until so many further streams have ended."""
        until = self.ends.total() + count
        await eventually(lambda: self.ends.total() >= until)


async def eventually(true: Callable[[], Any]) -> None:
    for _ in range(6000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within a minute")


def records(gateway: GatewayProcess) -> list[dict[str, Any]]:
    """Whole lines; a torn one, which a full disk leaves, must be no record."""
    out = []
    for line in gateway.records.read_bytes().split(b"\n"):
        try:
            out.append(json.loads(line))
        except ValueError:
            assert not line.endswith(b"}")
    return out


@pytest.fixture
def up() -> Iterator[Upstream]:
    with Upstream() as up:
        yield up


async def test_redis_goes_and_comes_back_under_load_of_two_gateways(up: Upstream, tmp_path: Path) -> None:
    """No request fails; limits hold per process while it is gone and are shared again afterwards; each says so once an outage."""
    with Redis(tmp_path) as redis:
        data = config(up, keys=KEYS, store={"redis": redis.url})
        with GatewayProcess(data, tmp_path / "1") as one, GatewayProcess(data, tmp_path / "2") as two:
            async with Load(one, two) as load:
                await load.more(50)
                assert await granted(load, one, two) == 20  # of both together
                redis.kill()
                await eventually(lambda: said(one, "redis is gone") and said(two, "redis is gone"))
                await load.more(100)
                assert (await granted(load, one), await granted(load, two)) == (20, 20)
                redis.start()
                await eventually(lambda: said(one, "redis is back") and said(two, "redis is back"))
                await load.more(200)
                assert await granted(load, one, two) == 20  # it has forgotten what was used before
            assert set(load.ends) == {"done"}, (load.ends, load.seen[:3])
            # Connections that died with it are no further outages.
            assert [said(g, f"redis is {word}") for g in (one, two) for word in ("gone", "back")] == [1] * 4


async def granted(load: Load, *gateways: GatewayProcess) -> int:
    """How many of 30 requests to each gateway the key with few of them got."""
    got = await asyncio.gather(*(load.one(g, "few") for g in gateways for _ in range(30)))
    assert set(got) <= {"done", "429"}
    return got.count("done")


def said(gateway: GatewayProcess, words: str) -> int:
    return gateway.log.read_text().count(words)


async def test_a_disk_that_fills_up_under_load_costs_records_and_no_request(up: Upstream, tmp_path: Path) -> None:
    """A file that takes no more (EFBIG from the system), then room again: every request is answered, every loss is counted."""
    with GatewayProcess(config(up), tmp_path, file_limit=200_000) as gateway:
        full = lambda: gateway.metric('moorage_records{what="dropped"}')  # noqa: E731
        async with Load(gateway) as load:
            await eventually(full)
            await load.more(200)
            gateway.limit_files(1 << 40)
            await eventually(lambda: said(gateway, "writing to"))
            await load.more(100)
        # The thread may still have some in its hands.
        await eventually(lambda: len(records(gateway)) + full() == load.ends.total())
        assert set(load.ends) == {"done"} and said(gateway, "records are lost") == 1


async def test_a_full_file_system_under_load(up: Upstream, tmp_path: Path) -> None:
    """The same on a small file system of its own (ENOSPC, after part of a line), which needs the right to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        (disk / "filler").write_bytes(b"x" * 700_000)
        data = config(up, records={"path": str(disk / "records.jsonl"), "fsync": "second"})
        with GatewayProcess(data, tmp_path / "gateway") as gateway:
            full = lambda: gateway.metric('moorage_records{what="dropped"}')  # noqa: E731
            async with Load(gateway) as load:
                await eventually(full)
                await load.more(100)
                (disk / "filler").unlink()
                await eventually(lambda: said(gateway, "writing to"))
                await load.more(20)
            gateway.kill(signal.SIGTERM)
            assert set(load.ends) == {"done"} and said(gateway, "records are lost") == 1 <= len(records(gateway))
            assert said(gateway, "No space left on device") == 1
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


async def test_kill_9_under_load_loses_what_waited_and_nothing_that_was_written(up: Upstream, tmp_path: Path) -> None:
    """Every record that was counted as written is there; the next start goes on behind the torn line, if there is one."""
    with GatewayProcess(config(up), tmp_path) as gateway:
        async with Load(gateway) as load:
            await load.more(100)
            written = gateway.metric('moorage_records{what="written"}')
            assert written
            for task in load._tasks:
                task.cancel()  # their gateway dies under them
            gateway.kill(signal.SIGKILL)
            await asyncio.gather(*load._tasks, return_exceptions=True)
            load._tasks = []
        left = records(gateway)
        assert len(left) >= written and [r["outcome"] for r in left].count("ok") <= load.ends.total() + WORKERS
        with gateway.records.open("ab") as torn:  # as a kill in the middle of a write leaves it; this one may have
            torn.write(b'{"v":1,"id":"req_torn')
        gateway.start()
        async with Load(gateway) as load:
            await load.more(20)
        # Nothing waits any more: nothing is lost.
        await eventually(lambda: len(records(gateway)) == len(left) + load.ends.total())
        assert gateway.metric('moorage_records{what="queued"}') == gateway.metric('moorage_records{what="dropped"}') == 0
        gateway.kill(signal.SIGKILL)
        reader = Reader(gateway.records)
        assert len(list(reader.records())) == len(left) + load.ends.total() and reader.skipped == 1


async def test_the_only_engine_is_killed_mid_stream_and_comes_back(up: Upstream, tmp_path: Path) -> None:
    """Every open stream ends in an error event, requests meanwhile are refused in words, and afterwards all is well by itself."""
    with GatewayProcess(config(up, routing={"backoff": 0.01}), tmp_path) as gateway:
        async with Load(gateway) as quick:
            async with Load(gateway, seed=100_000) as endless:
                await eventually(lambda: gateway.metric("moorage_active_requests") >= WORKERS)
                await quick.more(50)
                endless._stop = True
                up.kill()
            assert endless.ends == {"error": WORKERS}, (endless.ends, endless.seen[:3])
            await eventually(lambda: quick.ends["503"] > 20)
            up.start()
            before = quick.ends["done"]
            await eventually(lambda: quick.ends["done"] > before + 50)
        assert set(quick.ends) <= {"done", "error", "503", "502"} and all("upstream" in words for words in quick.seen)
        await eventually(lambda: len(records(gateway)) == quick.ends.total() + WORKERS)
    outcomes = Counter(r["outcome"] for r in records(gateway))
    assert outcomes["ok"] == quick.ends["done"] and outcomes["died"] >= WORKERS and "cancelled" not in outcomes
    died = [r for r in records(gateway) if r["outcome"] == "died" and r["answer"]["channels"]]
    assert len(died) >= WORKERS and all(set(r["answer"]["channels"]["content"]["text"]) == {"x"} for r in died)


async def test_one_of_two_engines_is_killed_and_no_new_request_fails(up: Upstream, tmp_path: Path) -> None:
    """Only streams that had begun at the dead one end in an error; all others are answered by the living one."""
    with Upstream() as other, GatewayProcess(config(up, other, routing={"cooldown": 1}), tmp_path) as gateway:
        async with Load(gateway) as load:
            await load.more(50)
            for _ in range(3):
                up.kill()
                await load.more(100)
                up.start()
                await load.more(50)
        assert set(load.ends) <= {"done", "error"} and load.ends["error"] <= 3 * WORKERS, (load.ends, load.seen[:3])
        deployments = Counter(r["sent"]["deployment"] for r in records(gateway) if r["outcome"] == "ok")
    assert set(deployments) == {"m#0", "m#1"}


async def test_a_gateway_that_is_told_to_stop_ends_its_streams(up: Upstream, tmp_path: Path) -> None:
    """SIGTERM under load: streams that are nearly done finish, endless ones end within the grace, all leave a record."""
    with GatewayProcess(config(up), tmp_path) as gateway:
        load = Load(gateway, seed=50)
        async with load:
            await eventually(lambda: gateway.metric("moorage_active_requests") == WORKERS)
            load._stop = True
            gateway.popen.send_signal(signal.SIGTERM)
        assert load.ends == {"done": WORKERS}
        assert gateway.popen.wait(60) in (0, -signal.SIGTERM)
        assert [r["outcome"] for r in records(gateway)] == ["ok"] * WORKERS
