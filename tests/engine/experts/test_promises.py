"""Memory that a running engine was promised and has not taken yet is not promised to the next one."""

import subprocess
import sys

import pytest

from engine.elastic import CannotResize, Elastic
from engine.experts.pressure import Memory
from engine.promises import GRAIN, PREFIX, Promise, promised
from engine.stores import Plain

GB = 1 << 30
HOLDER = """
import sys
from pathlib import Path
from engine.promises import Promise
promise = Promise(Path(sys.argv[1]))
promise.keep(int(sys.argv[2]))
print("said", flush=True)
sys.stdin.read()
"""


def test_what_an_engine_promised_counts_while_it_lives(tmp_path) -> None:
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path, str(n * GB)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for n in (1, 2)
    ]
    try:
        for holder in holders:
            assert holder.stdout.readline() == b"said\n"
        assert promised(tmp_path) == 3 * GB
        own = Promise(tmp_path)
        own.keep(5 * GB)
        assert promised(tmp_path) == 8 * GB and own.others() == 3 * GB
        own.close()
        holders[1].kill()
        holders[1].wait()
        assert promised(tmp_path) == GB
        assert len(list(tmp_path.iterdir())) == 1, "nothing is left of the dead"
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
            holder.stdin.close()
            holder.stdout.close()


def test_small_changes_are_not_told_and_the_last_byte_is(tmp_path) -> None:
    own = Promise(tmp_path)
    own.keep(4 * GRAIN)
    own.keep(4 * GRAIN - 1)
    assert promised(tmp_path) == 4 * GRAIN
    own.keep(3 * GRAIN)
    assert promised(tmp_path) == 3 * GRAIN
    own.keep(0)
    assert promised(tmp_path) == 0
    own.close()


def test_what_is_no_promise_counts_nothing(tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    (tmp_path / f"{PREFIX}link").symlink_to("/etc/passwd")
    (tmp_path / f"{PREFIX}folder").mkdir()
    (tmp_path / "other").write_text("7")
    assert promised(tmp_path) == 0 and promised(tmp_path / "none") == 0
    lost = Promise(tmp_path / "none")
    lost.keep(GB)
    lost.close()
    assert lost.others() == 0 and "memory promise not told" in caplog.text


class Lazy(Plain):
    """A store of which nothing was taken yet."""

    field, each, least, held, most = "kv_bytes", GB, 1, 1, 100

    def __init__(self) -> None:
        self.have = 4

    @property
    def unused(self) -> int:
        return self.have * GB

    def why_least(self) -> str:
        return "a request"

    def resize(self, count: int) -> None:
        self.have = count


def test_memory_that_moves_is_told_and_heeded(tmp_path) -> None:
    other = Promise(tmp_path)
    other.keep(6 * GB)
    elastic = Elastic([Lazy()], 64 * GB, lambda: Memory(16 * GB, 0.0), Promise(tmp_path))
    assert other.others() == 4 * GB, "from the first moment on"
    elastic.set({"kv_bytes": 10 * GB})
    elastic.tick(0.0)
    assert other.others() == 10 * GB
    with pytest.raises(CannotResize, match="10.00 GiB are available"):
        elastic.set({"kv_bytes": 11 * GB})
    other.close()
    elastic.set({"kv_bytes": 11 * GB})
