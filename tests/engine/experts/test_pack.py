"""The packed file, and a model whose experts do not fit in memory."""

import fcntl
import os
import shutil
from collections import namedtuple

import pytest
import torch

from engine.experts import executor, filepool
from engine.experts.call import Unreadable
from engine.experts.executor import Tier, TieredExperts
from engine.experts.filepool import PIECE, Pack
from engine.experts.grouped import share_out
from engine.experts.pack import BLOCK, PackError, read_index, write_pack
from engine.experts.pool import Room, bank_bytes, data_of, read_whole
from engine.kernels.ops import Ops
from engine.nn.experts import Bank
from engine.packing import slot_counts, stream_experts
from tests.engine.experts.tiers import EXPERTS, HIDDEN, LAYERS, TOP_K, banks, kernels, step

FORMATS = [("reference", "f32"), ("cpu", "bf16"), ("cpu", "Q8_0"), ("cpu", "Q4_0"), ("cpu", "Q4_K"), ("cpu", "F8_E4M3")]


def pack(directory, pool: list[Bank], source: str = "model", stop: int | None = None):
    """`stop`: fail before that layer, as a full disk or a power cut would."""

    def bank(layer: int) -> Bank:
        if layer == stop:
            raise OSError("power cut")
        return pool[layer]

    return write_pack(directory, source, len(pool), bank, lambda done, total: None)


@pytest.fixture(autouse=True, params=[BLOCK, PIECE], ids=["pieces", "whole"])
def piece(request, monkeypatch) -> None:
    """Experts of tests are small: most of a block of the disk, each of which is read alone."""
    monkeypatch.setattr(filepool, "PIECE", request.param)


@pytest.mark.parametrize(("name", "kind"), FORMATS)
def test_what_is_read_is_what_was_packed(tmp_path, name: str, kind: str) -> None:
    pool = banks(kernels(name), kind)
    index = pack(tmp_path / "p", pool)
    assert index.complete and index.kinds[0].record % BLOCK == 0
    (file,) = Pack(tmp_path / "p", "model").pools
    room = Room(file.like, 2).bank
    for key in range(LAYERS * EXPERTS):
        assert read_whole(file, key, room, key % 2) == bank_bytes(pool[0]) // EXPERTS
        for a, b in ((room.gate_up, pool[key // EXPERTS].gate_up), (room.down, pool[key // EXPERTS].down)):
            assert torch.equal(data_of(a)[key % 2], data_of(b)[key % EXPERTS])


def stream(directory, ops: Ops, slots: int) -> TieredExperts:
    return TieredExperts(Pack(directory).pools[0], ops, Tier(slots, workers=4))


@pytest.mark.parametrize(("name", "kind"), FORMATS)
@pytest.mark.parametrize("slots", [LAYERS * EXPERTS // 2, TOP_K, 1])
def test_a_pool_twice_the_memory_gives_the_same_bits(tmp_path, name: str, kind: str, slots: int) -> None:
    ops, generator = kernels(name), torch.Generator().manual_seed(1)
    pool = banks(ops, kind)
    pack(tmp_path / "p", pool)
    experts = stream(tmp_path / "p", ops, slots)
    for batch in (1, 2, 4, 8, 30, 1):
        for layer in range(LAYERS):
            x, ids, weights = step(generator, batch, kind)
            want = ops.moe(x, ids, weights, pool[layer].gate_up, pool[layer].down, "silu")
            assert torch.equal(experts.run(layer, x, ids, weights), want)
    assert experts.arena._room.slots == slots
    assert experts.slots.counts.fetched > LAYERS * EXPERTS / 2
    experts.close()


@pytest.mark.parametrize("stop", range(LAYERS))
def test_an_interrupted_pack_goes_on_where_it_stopped(tmp_path, stop: int) -> None:
    pool = banks(kernels("reference"), "f32")
    with pytest.raises(OSError, match="power cut"):
        pack(tmp_path / "p", pool, stop=stop)
    if stop:
        assert read_index(tmp_path / "p").done == stop
        with pytest.raises(PackError, match=f"{stop} of {LAYERS} layers are packed; run the same `pack` again"):
            Pack(tmp_path / "p")
        with open(tmp_path / "p" / "experts.bin", "ab") as file:
            file.write(b"half a layer")
    else:
        shutil.rmtree(tmp_path / "p", ignore_errors=True)
    asked = []
    write_pack(tmp_path / "p", "model", LAYERS, lambda layer: asked.append(layer) or pool[layer], lambda done, total: None)
    assert asked == [0, *range(max(1, stop), LAYERS)], "the first layer is read for its shape; packed ones are not written again"
    pack(tmp_path / "whole", pool)
    assert (tmp_path / "p" / "experts.bin").read_bytes() == (tmp_path / "whole" / "experts.bin").read_bytes()
    assert read_index(tmp_path / "p") == read_index(tmp_path / "whole")


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(tmp_path, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 100_000))
    with pytest.raises(PackError, match=r"MiB are still to be written, the disk has 0.1 MiB free"):
        pack(tmp_path / "p", banks(kernels("reference"), "f32"))
    assert not (tmp_path / "p" / "experts.bin").exists()


def test_a_disk_that_fills_up_meanwhile_is_found_before_the_next_layer_is_written(tmp_path, monkeypatch) -> None:
    """Somebody else writes too: room for all of it when it began, for one layer after that."""
    pool, usage = banks(kernels("reference"), "f32"), namedtuple("usage", "total used free")
    layer = read_index_of(tmp_path / "whole", pool).offset(1)
    free = iter([LAYERS * layer, LAYERS * layer, layer])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, next(free)))
    with pytest.raises(PackError, match="are still to be written, the disk has"):
        pack(tmp_path / "p", pool)
    assert read_index(tmp_path / "p").done == 1 and (tmp_path / "p" / "experts.bin").stat().st_size == layer


def read_index_of(directory, pool: list[Bank]):
    pack(directory, pool)
    return read_index(directory)


def test_an_index_is_never_on_disk_before_what_it_tells_of(tmp_path, monkeypatch) -> None:
    """A power cut keeps what was synchronized and maybe more, in any order."""
    synced, told, fsync, rename = {}, [], os.fsync, os.replace

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))] = os.fstat(descriptor).st_size

    def replace(source, target) -> None:
        assert synced.pop(os.path.basename(source)) == os.path.getsize(source)
        rename(source, target)
        told.append((read_index(tmp_path / "p").size, synced["experts.bin"]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noted)
        patch.setattr(os, "replace", replace)
        pack(tmp_path / "p", banks(kernels("reference"), "f32"))
    assert len(told) == LAYERS and all(size == there for size, there in told)


def test_two_packers_of_one_directory_do_not_write_at_once(tmp_path) -> None:
    pool = banks(kernels("reference"), "f32")

    def bank(layer: int) -> Bank:
        if layer == 1:
            with pytest.raises(PackError, match="another process packs into .*: wait for it, or give another directory"):
                pack(tmp_path / "p", pool)
        return pool[layer]

    write_pack(tmp_path / "p", "model", LAYERS, bank, lambda done, total: None)
    pack(tmp_path / "p", pool)
    assert Pack(tmp_path / "p").layers == LAYERS


def test_experts_are_read_past_the_page_cache(tmp_path) -> None:
    pack(tmp_path / "p", banks(kernels("reference"), "f32"))
    try:
        os.close(os.open(tmp_path / "p" / "experts.bin", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the disk of temporary files has no direct reads")
    assert fcntl.fcntl(Pack(tmp_path / "p").file, fcntl.F_GETFL) & os.O_DIRECT


@pytest.mark.parametrize("link", ["the native reader", "threads of Python"])
def test_an_expert_is_verified_when_it_is_first_read_and_not_again(tmp_path, monkeypatch, link: str) -> None:
    ops, generator, seen = kernels("reference"), torch.Generator().manual_seed(1), []
    if link != "the native reader":
        monkeypatch.setattr(executor, "reads_by_itself", lambda pool: False)
    pack(tmp_path / "p", banks(ops, "f32"))
    real = filepool.xxhash.xxh3_64
    monkeypatch.setattr(filepool.xxhash, "xxh3_64", lambda: seen.append(1) or real())
    experts = stream(tmp_path / "p", ops, TOP_K)
    x, _, weights = step(generator, 1)
    for first, distinct in ((0, TOP_K), (TOP_K, 2 * TOP_K), (0, 2 * TOP_K), (TOP_K, 2 * TOP_K)):
        experts.run(0, x, torch.arange(first, first + TOP_K).int()[None], weights)
        assert len(seen) == distinct
    assert experts.slots.counts.fetched == 4 * TOP_K, "read again each time"
    experts.close()


def test_progress_runs_to_the_end_and_never_back(tmp_path) -> None:
    pool, seen = banks(kernels("reference"), "f32"), []
    index = write_pack(tmp_path / "p", "model", LAYERS, lambda layer: pool[layer], lambda done, total: seen.append((done, total)))
    assert len(seen) > LAYERS and seen[-1] == (index.size, index.size) and {total for _, total in seen} == {index.size}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_another_models_pack_is_not_overwritten(tmp_path) -> None:
    pool = banks(kernels("reference"), "f32")
    pack(tmp_path / "p", pool)
    with pytest.raises(PackError, match="another model's pack"):
        pack(tmp_path / "p", pool, source="other")
    with pytest.raises(PackError, match="packed from another checkpoint"):
        Pack(tmp_path / "p", "other")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(PackError, match="not empty and no pack"):
        pack(tmp_path / "mine", pool)
    with pytest.raises(PackError, match="is a file, and a pack is a directory"):
        pack(tmp_path / "mine" / "letter.txt", pool)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": 9}', "\x00"])
def test_a_broken_index_is_one_line(tmp_path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(PackError, match="pack again"):
        Pack(tmp_path)
    with pytest.raises(PackError, match="is no pack"):
        Pack(tmp_path / "nothing")


def test_a_shortened_file_is_refused(tmp_path) -> None:
    pack(tmp_path / "p", banks(kernels("reference"), "f32"))
    os.truncate(tmp_path / "p" / "experts.bin", 5 * BLOCK)
    with pytest.raises(PackError, match="has not the size"):
        Pack(tmp_path / "p")


def test_a_flipped_bit_is_never_computed_with(tmp_path, caplog) -> None:
    ops, generator = kernels("reference"), torch.Generator().manual_seed(1)
    pack(tmp_path / "p", banks(ops, "f32"))
    with open(tmp_path / "p" / "experts.bin", "r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))
    experts = stream(tmp_path / "p", ops, EXPERTS)
    x, _, weights = step(generator, 1)
    ids = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    with pytest.raises(Unreadable, match="1 experts of layer 0 could not be read"):
        experts.run(0, x, ids, weights)
    assert "expert 0 of layer 0 is damaged" in caplog.text and experts.slots.room() == EXPERTS
    experts.run(0, x, ids + 1, weights)  # the others are sound
    experts.close()


def test_layers_of_another_number_of_experts_cannot_be_packed(tmp_path) -> None:
    ops = kernels("reference")
    one, other = banks(ops, "f32", 2)
    odd = Bank(other.gate_up[1:], other.down[1:], "silu")
    with pytest.raises(PackError, match="layer 1 has 11 experts, layer 0 has 12"):
        pack(tmp_path / "p", [one, odd])


# --- layers of several kinds, as in quantized files


def mixed(ops: Ops, kinds: tuple[str, ...]) -> list[Bank]:
    """The down matrices of layer i are stored as kinds[i], what is above them as kinds[0]."""
    return [Bank(banks(ops, kinds[0], 1, i)[0].gate_up, banks(ops, kind, 1, i)[0].down, "silu") for i, kind in enumerate(kinds)]


MIXES = [("reference", ("f32", "f32", "f32")), ("cpu", ("Q4_0", "Q8_0", "Q8_0", "Q4_0", "Q4_0", "bf16"))]


@pytest.mark.parametrize(("name", "kinds"), MIXES)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_mixed_layers_give_the_bits_of_the_pool(tmp_path, name: str, kinds: tuple[str, ...], share: float) -> None:
    ops, generator = kernels(name), torch.Generator().manual_seed(1)
    pool = mixed(ops, kinds)
    index = pack(tmp_path / "p", pool)
    order = list(dict.fromkeys(kinds))
    assert index.layout == tuple(order.index(kind) for kind in kinds) and len(index.kinds) == len(order)
    file = Pack(tmp_path / "p")
    budget = int(file.least_bytes + share * (file.expert_bytes - file.least_bytes))
    routers = [torch.randn(EXPERTS, HIDDEN, generator=generator) for _ in kinds]
    experts, _ = stream_experts(file, ops, slot_counts(file, budget, budget), "lru", routers)
    for turn, batch in enumerate((1, 2, 4, 8, 30, 1)):
        for layer in range(len(kinds)):
            x, ids, weights = step(generator, batch)
            want = ops.moe(x, ids, weights, pool[layer].gate_up, pool[layer].down, "silu")
            assert torch.equal(experts.run(layer, x, ids, weights), want)
        size = experts.least + (experts.most - experts.least) * turn // 6
        before = experts.capacity
        if experts.slot_bytes == 1:
            experts.resize(size)
            assert experts.capacity <= size
            experts.resize(before)
            assert experts.capacity == before
    seen = experts.status()
    assert seen["slots"] and seen["hits"] + seen["misses"] > 0
    experts.close()


@pytest.mark.parametrize("stop", range(4))
def test_an_interrupted_mixed_pack_goes_on_where_it_stopped(tmp_path, stop: int) -> None:
    pool = mixed(kernels("cpu"), ("Q4_0", "Q8_0", "Q4_0", "bf16"))
    with pytest.raises(OSError, match="power cut"):
        pack(tmp_path / "p", pool, stop=stop)
    if not stop:
        shutil.rmtree(tmp_path / "p", ignore_errors=True)
    pack(tmp_path / "p", pool)
    pack(tmp_path / "whole", pool)
    assert (tmp_path / "p" / "experts.bin").read_bytes() == (tmp_path / "whole" / "experts.bin").read_bytes()
    assert read_index(tmp_path / "p") == read_index(tmp_path / "whole")


def test_memory_is_shared_out_after_size_and_a_layer_of_each_kind_at_least() -> None:
    sized = namedtuple("sized", "layers experts expert_bytes")
    small, large = sized(6, 10, 100), sized(3, 10, 300)
    assert share_out([small, large], 4000) == [10, 10]
    assert share_out([small, large], 4000 + 5500) == [35, 20]
    assert share_out([small, large], 1 << 30) == [60, 30]
    with pytest.raises(ValueError, match="4000 bytes"):
        share_out([small, large], 3999)


def test_a_move_that_fails_for_one_kind_is_undone_for_all(tmp_path, monkeypatch) -> None:
    ops = kernels("cpu")
    pack(tmp_path / "p", mixed(ops, ("Q4_0", "Q8_0", "Q8_0", "Q4_0")))
    file = Pack(tmp_path / "p")
    experts, _ = stream_experts(file, ops, slot_counts(file, file.least_bytes, file.least_bytes), "lru")
    before = [part.capacity for part in experts.parts]
    last, real = experts.parts[-1], Room.resize
    with monkeypatch.context() as patch:
        patch.setattr(Room, "resize", lambda room, n: 1 / 0 if room is last.arena._room and n > room.slots else real(room, n))
        with pytest.raises(ZeroDivisionError):
            experts.resize(experts.most)
    assert [part.capacity for part in experts.parts] == before
    experts.resize(experts.most)
    assert experts.capacity == experts.most
    experts.close()


def test_slots_are_full_before_the_first_request(tmp_path) -> None:
    ops, generator, read = kernels("reference"), torch.Generator().manual_seed(1), []
    pool = banks(ops, "f32")
    pack(tmp_path / "p", pool)
    experts = stream(tmp_path / "p", ops, LAYERS * EXPERTS)
    experts.preload(read.append)
    assert sum(read) == sum(map(bank_bytes, pool)) and len(experts.slots.resident) == LAYERS * EXPERTS
    for layer in range(LAYERS):
        x, ids, weights = step(generator, 4)
        want = ops.moe(x, ids, weights, pool[layer].gate_up, pool[layer].down, "silu")
        assert torch.equal(experts.run(layer, x, ids, weights), want)
    assert experts.slots.counts.misses == 0
    experts.close()
