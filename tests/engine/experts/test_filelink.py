"""The native reader of packs: order, pieces, what is taken back, what fails; kernels that compute on pieces as they come."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from engine.experts import filelink, filepool
from engine.experts.call import Unreadable
from engine.experts.executor import Tier, TieredExperts
from engine.experts.filelink import FileLink
from engine.experts.filepool import Pack
from engine.experts.link import Link
from engine.experts.pack import BLOCK, write_pack
from engine.kernels.cpu import stored
from engine.kernels.reference import ReferenceOps
from tests.engine.experts.tiers import EXPERTS, LAYERS, TOP_K, banks, kernels, step

native = pytest.importorskip("engine._native", reason="the native module is not built here")
PIECES, SLOTS = 3, 8
RECORD = PIECES * BLOCK
WHOLE, FAILED = 0, 2


class Shelf:
    """A file of records of three blocks, of which two are gate_up's, and a reader that reads when `step` is called."""

    def __init__(self, directory: Path, records: int = SLOTS, threads: int = 0) -> None:
        self.path = directory / "records"
        self.path.write_bytes(b"".join(bytes([key]) * RECORD for key in range(records)))
        self.file = os.open(self.path, os.O_RDONLY)
        self.up = torch.zeros(SLOTS, 2 * BLOCK, dtype=torch.uint8)
        self.down = torch.zeros(SLOTS, BLOCK, dtype=torch.uint8)
        self.reader = native.Reader(self.file, RECORD, BLOCK, 1, threads, self.up, self.down)

    def submit(self, *keys: int, behind: bool = False, check: bool = False) -> None:
        self.reader.submit([(key, key * RECORD, key, check) for key in keys], behind)

    def order(self) -> list[int]:
        """Keys of the pieces in the order in which they are read."""
        while self.reader.step():
            pass
        return [key for _, _, key in self.reader.reads()]

    def holds(self, key: int) -> bool:
        return bool((self.up[key] == key).all() and (self.down[key] == key).all())


@pytest.fixture
def shelf(tmp_path):
    found = Shelf(tmp_path)
    yield found
    found.reader.close()
    os.close(found.file)


def test_experts_come_one_after_the_other_piece_by_piece(shelf) -> None:
    shelf.submit(5, 1, 2)
    assert shelf.order() == [5] * PIECES + [1] * PIECES + [2] * PIECES and shelf.reader.bytes == 3 * RECORD
    assert all(shelf.reader.wait(key)[1] == WHOLE and shelf.holds(key) for key in (1, 2, 5)) and shelf.reader.busy_s > 0


def test_what_is_behind_comes_when_there_is_nothing_else_and_can_hurry(shelf) -> None:
    shelf.submit(0)
    shelf.submit(1, 2, behind=True)
    shelf.submit(3)
    shelf.reader.hurry([2, 3, 7])
    assert list(dict.fromkeys(shelf.order())) == [0, 3, 2, 1]


def test_of_what_is_taken_back_no_further_piece_begins(shelf) -> None:
    shelf.submit(4, 6)
    assert shelf.reader.step()
    assert shelf.reader.cancel([4, 5, 6]) == [4, 6] and shelf.order() == [4]
    shelf.submit(4)  # may be asked for again
    assert shelf.order() == [4] * PIECES and shelf.reader.wait(4)[1] == WHOLE and shelf.holds(4)


def test_nobody_is_told_before_it_was_checked(shelf) -> None:
    shelf.submit(3, 4, check=True)
    shelf.order()
    assert not shelf.reader.arrived(3) and not shelf.reader.arrived(4)
    assert shelf.reader.cancel([3]) == [], "all of it has been read"
    assert shelf.reader.unchecked() == (3, 3) and shelf.reader.unchecked() == (4, 4)
    shelf.reader.checked(4, "")
    shelf.reader.checked(3, "it is damaged")
    assert shelf.reader.first([3, 4]) == [3, 4]
    assert shelf.reader.wait(3)[1:] == (FAILED, "it is damaged") and shelf.reader.wait(4)[1] == WHOLE


def test_a_short_file_fails_with_what_was_read_and_the_rest_is_left_unread(shelf) -> None:
    os.truncate(shelf.path, 2 * RECORD + 100)
    shelf.submit(2, 1)
    assert shelf.order() == [2] + [1] * PIECES
    assert shelf.reader.wait(2)[1:] == (FAILED, f"read 100 of {BLOCK} bytes at {2 * RECORD}") and shelf.reader.wait(1)[1] == WHOLE


def test_what_is_queued_when_it_closes_fails_and_who_checks_goes_home(shelf) -> None:
    shelf.submit(1, 2)
    ended = []
    waiting = threading.Thread(target=lambda: ended.append(shelf.reader.wait(2)))
    checking = threading.Thread(target=lambda: ended.append(shelf.reader.unchecked()))
    for thread in (waiting, checking):
        thread.start()
    shelf.reader.close()
    for thread in (waiting, checking):
        thread.join(10)
    assert None in ended and [end[1:] for end in ended if end] == [(FAILED, "the link was closed")]
    shelf.submit(3)
    assert shelf.reader.wait(3)[1:] == (FAILED, "the link is closed")


def test_everything_ends_whenever_it_closes(tmp_path) -> None:
    """Also what was read whole when who checks had gone home already."""

    def check(reader: native.Reader) -> None:
        while (found := reader.unchecked()) is not None:
            reader.checked(found[0], "")

    for turn in range(100):
        shelf = Shelf(tmp_path, threads=4)
        checking = threading.Thread(target=check, args=(shelf.reader,))
        checking.start()
        shelf.submit(*range(SLOTS), check=True)
        for _ in range(turn % SLOTS):
            shelf.reader.first([*range(SLOTS)])
        shelf.reader.close()
        ends = []
        waiting = threading.Thread(
            target=lambda reader=shelf.reader, to=ends: to.extend(reader.wait(k)[1] for k in range(SLOTS)), daemon=True
        )
        waiting.start()
        for thread in (waiting, checking):
            thread.join(30)
        os.close(shelf.file)
        assert len(ends) == SLOTS and set(ends) <= {WHOLE, FAILED}


def test_threads_share_the_work_and_every_byte_is_where_it_belongs(tmp_path) -> None:
    shelf = Shelf(tmp_path, threads=4)
    for turn in range(50):
        shelf.up.zero_(), shelf.down.zero_()
        shelf.submit(*range(0, SLOTS, 2), behind=turn % 2 == 0)
        shelf.submit(*range(1, SLOTS, 2))
        shelf.reader.hurry([0, 4])
        assert all(shelf.reader.wait(key)[1] == WHOLE and shelf.holds(key) for key in range(SLOTS))
    shelf.reader.close()
    os.close(shelf.file)


def test_what_is_asked_of_it_is_checked(shelf) -> None:
    with pytest.raises(ValueError, match="slot"):
        shelf.reader.submit([(0, 0, SLOTS, False)])
    with pytest.raises(ValueError, match="offset"):
        shelf.reader.submit([(0, -1, 0, False)])
    with pytest.raises(ValueError, match="keys"):
        shelf.reader.first([])
    with pytest.raises(ValueError, match="smaller than an expert"):
        native.Reader(shelf.file, BLOCK, BLOCK, 1, 1, shelf.up, shelf.down)
    with pytest.raises(ValueError, match="belong together"):
        native.Reader(shelf.file, RECORD, BLOCK, 1, 1, shelf.up, shelf.down[1:])


# --- kernels on what comes


def packed(directory: Path, kind: str, ops) -> tuple[Pack, list]:
    pool = banks(ops, kind)
    write_pack(directory, "model", LAYERS, lambda layer: pool[layer], lambda done, total: None)
    return Pack(directory), pool


@pytest.mark.parametrize("kind", ["bf16", "f32", "Q8_0", "Q4_K", "Q6_K", "F8_E4M3", "MXFP4", "NVFP4_SCALED"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_experts_are_computed_as_far_as_they_are_read_with_the_bits_of_the_pool(tmp_path, kind: str, rows: int) -> None:
    """Each block of the file is read only when the kernels may wait for it."""
    ops, generator = kernels("cpu"), torch.Generator().manual_seed(rows)
    pack, pool = packed(tmp_path / "p", kind, ops)
    (file,) = pack.pools
    experts = TieredExperts(file, ops, Tier(EXPERTS, workers=1))
    bank, (x, ids, weights) = experts.arena.bank, step(generator, rows, kind)
    reader = native.Reader(file.file, file.record, BLOCK, 1, 0, *(stored(w)[0] for w in (bank.gate_up, bank.down)))
    keys = sorted(set(ids.flatten().tolist()))
    place = torch.arange(EXPERTS, dtype=torch.int32)
    reader.submit([(key, file.offset(key), key, False) for key in keys])
    while not reader.arrived(keys[0]):
        assert reader.step()
    came = []
    arguments = (x, ids, weights, bank.gate_up, bank.down, "silu", place, [(key, key) for key in keys[1:]], reader)
    computing = threading.Thread(target=lambda: came.append(ops.moe_arriving(*arguments)))
    computing.start()
    while reader.step():
        pass
    computing.join(30)
    out, lost, waited = came[0]
    assert torch.equal(out, ops.moe(x, ids, weights, pool[0].gate_up, pool[0].down, "silu")) and not lost and waited >= 0
    reader.close()
    experts.close()


def test_kernels_are_told_of_experts_that_do_not_come(tmp_path) -> None:
    ops = kernels("cpu")
    pack, pool = packed(tmp_path / "p", "bf16", ops)
    (file,) = pack.pools
    experts = TieredExperts(file, ops, Tier(EXPERTS, workers=2))
    x, ids, weights = step(torch.Generator().manual_seed(1), 1)
    bank, place = experts.arena.bank, torch.arange(EXPERTS, dtype=torch.int32)
    never = [(int(ids[0, 0]), 7777)]
    _, lost, _ = ops.moe_arriving(x, ids, weights, bank.gate_up, bank.down, "silu", place, never, experts.link.reader)
    assert lost == [7777]
    with pytest.raises(ValueError, match="not those that the reader reads into"):
        other = pool[0]
        ops.moe_arriving(x, ids, weights, other.gate_up, other.down, "silu", place, never, experts.link.reader)
    os.truncate(tmp_path / "p" / "experts.bin", BLOCK)
    with pytest.raises(Unreadable, match="experts of layer 2 could not be read"):
        experts.run(2, x, ids, weights)
    experts.slots.check()
    experts.close()


def test_which_link_reads_a_pack(tmp_path, monkeypatch) -> None:
    """The native one where kernels compute in host memory; without the native module the one of Python, with the same bits."""
    monkeypatch.setattr(filepool, "PIECE", BLOCK)
    ops, generator = ReferenceOps(), torch.Generator().manual_seed(0)
    pack, pool = packed(tmp_path / "p", "f32", ops)
    for reader, link in ((native.Reader, FileLink), (None, Link)):
        monkeypatch.setattr(filelink, "_reader", lambda reader=reader: reader)
        experts = TieredExperts(pack.pools[0], ops, Tier(TOP_K, workers=2))
        assert type(experts.link) is link
        for layer in range(LAYERS):
            x, ids, weights = step(generator, 4)
            want = ops.moe(x, ids, weights, pool[layer].gate_up, pool[layer].down, "silu")
            assert torch.equal(experts.run(layer, x, ids, weights), want)
        experts.close()
        assert not experts.link.alive
