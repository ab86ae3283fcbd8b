"""Where memory lies on a machine of several nodes: emulated, with a kernel of Debian's (`ops/virtual_machine`).

Two nodes with two cores each, one with a core and no memory, one with memory and no core. The kernel moves pages to who touches
them (NUMA balancing), as Debian sets it. Nothing here says what it brings: an emulator knows no distance.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from tests.support import guest
from tests.support.tiny import make_tiny
from tests.support.tiny_gguf import write_gguf

pytestmark = pytest.mark.slow

MB = 1 << 20
SIZES = (512, 512, 128)  # MB of the nodes that have any
MACHINE = ["-smp", "5,sockets=5", "-m", str(sum(SIZES))]
for number, size in enumerate(SIZES):
    MACHINE += ["-object", f"memory-backend-ram,id=m{number},size={size}M"]
for node in ("nodeid=0,memdev=m0,cpus=0-1", "nodeid=1,memdev=m1,cpus=2-3", "nodeid=2,memdev=m2", "nodeid=3,cpus=4"):
    MACHINE += ["-numa", f"node,{node}"]
HUGE = 512  # pages that lie together
SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "moe_intermediate_size": 256,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the machine found."""
    pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here")
    if reason := guest.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("machine")
    files = [folder / name for name in ("model.gguf", "cold.bin", "warm.bin")]
    write_gguf(make_tiny("qwen3_moe", folder / "hf", **SHAPE), files[0], Type.Q8_0)
    for file in files[1:]:
        file.write_bytes(os.urandom(16 * MB))
    image = guest.disk(folder, Path(__file__).with_name("inside_two_nodes.py"), files)
    found = guest.run(image, MACHINE)
    for name, result in found.items():
        assert not str(result).startswith("Traceback"), f"{name}: {result}"
    return found


def in_turn(places: Iterable[dict[str, int]], slack: int = 1) -> None:
    """All on nodes 0 and 1, and on both alike, within `slack` pages."""
    together = sum(map(Counter, places), Counter())
    assert together.keys() == {"0", "1"} and abs(together["0"] - together["1"]) <= slack, together


def test_nodes_are_those_with_cores_and_memory_and_threads_come_from_all(answer) -> None:
    assert answer["nodes"] == {
        "ours": [0, 1],
        "named": "0, 1",
        "with_cores": {"0": [0, 1], "1": [2, 3], "2": [4]},
        "two": [0, 2],
        "three": [0, 2, 4],
    }


def test_threads_of_the_pool_sit_on_cores_of_both_nodes(answer) -> None:
    assert answer["threads"] == [[True, [1, 2, 3]], [True, [1, 2]]]


def test_memory_lies_in_turn_whoever_writes_it_first(answer) -> None:
    (plain, on_one), (told, on_both) = answer["fresh_memory"]
    assert (plain, on_one.keys()) == (False, {"0"}) and told
    in_turn([on_both])


def test_files_lie_in_turn_whether_they_were_read_before_or_not(answer) -> None:
    files = answer["files"]
    assert files["before"][1].keys() == {"0"}  # a process of node 0 had read it
    in_turn([files["cold"]])
    in_turn([files["warm"]])


def test_copied_weights_lie_in_turn(answer) -> None:
    copied = answer["a_model"]["copied"]
    assert len(copied) == 10
    for places in copied.values():
        in_turn([places], slack=HUGE)


def test_mapped_weights_lie_in_turn(answer) -> None:
    """Also after they were copied, which left the file on the node of who copied."""
    assert answer["a_model"]["mapped_bytes"] > 8 * MB
    in_turn(answer["a_model"]["mapped"].values(), slack=HUGE)


def test_pages_of_conversations_and_slots_of_experts_lie_in_turn(answer) -> None:
    pages, slots = answer["a_model"]["pages"], answer["slots"]
    assert pages and slots
    for places in (*pages, *slots):
        in_turn([places], slack=HUGE)


def test_a_process_that_may_have_memory_of_one_node_asks_for_nothing(answer) -> None:
    assert answer["a_cpuset_of_one_node"] == "(0,) '' False"


def test_a_refusal_is_one_line(answer) -> None:
    assert answer["refused"]["done"] == [False] * 3
    (line,) = answer["refused"]["lines"]
    assert line.startswith('memory not interleaved nodes="50, 51" why="Invalid argument"')


def test_the_kernel_would_have_moved_pages_if_it_were_let(answer) -> None:
    assert answer["balancing"] == "1"
