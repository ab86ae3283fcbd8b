"""The machine that tests of experts run on: its memory, who else is promised some, and whether anybody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import build, hostmem, plan
from engine.experts import pressure

FREE, ALL = 8 << 30, 16 << 30


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    """FREE of ALL bytes are available, nobody waits, and no other engine runs, whatever else this machine is doing."""
    memory, limits = hostmem._machine, hostmem.limits
    sizes = {"MemAvailable": FREE, "MemTotal": ALL}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hostmem, "_machine", lambda path, key: [sizes[key]] if path == hostmem.MEMINFO else memory(path, key))
        patch.setattr(hostmem, "limits", lambda cgroup, own: [] if cgroup == hostmem.CGROUP else limits(cgroup, own))
        patch.setattr(pressure, "pressure_file", lambda: Path("/no/pressure"))
        for module in (build, plan):
            patch.setattr(module, "promised", lambda: 0)
        yield
