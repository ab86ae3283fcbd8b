"""The body of `POST /v1/cache/rebuild` -> calls on the prefix cache and on memory that moves. Owns its fields and their errors.

{"flush": "ram" | "disk" | "all"}   forget what no running request holds
{"session": "id"}                   forget what only this session used
{"disk_bytes": n}                   change the disk's budget; what no longer fits goes at once
{"kv_bytes": n, "state_bytes": n, "expert_bytes": n, "max_running": n}   move memory: all of them or none
"""

from __future__ import annotations

from typing import Any

from engine.elastic import CannotResize, Elastic
from engine.prefix.base import PrefixCache

MOVES = {  # field -> why a model may lack it
    "kv_bytes": "this model has no KV pages",
    "state_bytes": "this model keeps no states",
    "expert_bytes": "there are no expert slots to resize: this engine computes experts where they lie",
    "max_running": "requests are not counted here",
}
FIELDS = ("flush", "session", "disk_bytes", *MOVES)


class BadCommand(Exception):
    """One line: what is wrong with the command."""


def rebuild(prefix: PrefixCache, options: dict[str, Any], memory: Elastic) -> dict[str, object]:
    """Do what `options` says; returns what went and the new status. Raises BadCommand before anything is changed.

    Memory is moved first, because that alone can fail; it then leaves everything as it was.
    """
    unknown = sorted(options.keys() - set(FIELDS))
    if unknown or all(value is None for value in options.values()):
        what = f"unknown field {unknown[0]!r}" if unknown else "an empty command"
        raise BadCommand(f"{what}: give {', '.join(FIELDS)}")
    sizes = _sizes(options)
    disk = sizes.pop("disk_bytes", None)
    if disk is not None and prefix.status().get("disk") is None:
        raise BadCommand("there is no disk tier to resize: start the engine with --kv-disk DIRECTORY")
    missing = next((field for field in sizes if field not in memory.fields), None)
    if missing:
        raise BadCommand(MOVES[missing])
    tier, session = options.get("flush"), options.get("session")
    if tier is not None and tier not in ("ram", "disk", "all"):
        raise BadCommand(f"flush must be ram, disk or all, got {tier!r}")
    if session is not None and (not isinstance(session, str) or not session):
        raise BadCommand(f"session must be the id of a session, got {session!r}")
    try:
        memory.set(sizes)
    except CannotResize as problem:
        raise BadCommand(str(problem)) from problem
    gone = prefix.flush(tier) if tier is not None else {}
    if session is not None:
        gone = {**gone, **prefix.delete_session(session)}
    if disk is not None:
        prefix.resize(disk_bytes=disk)
    return {"gone": gone, "status": prefix.status(), "memory": memory.status()}


def _sizes(options: dict[str, Any]) -> dict[str, int]:
    sizes = {key: options[key] for key in ("disk_bytes", *MOVES) if options.get(key) is not None}
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            what = "of requests" if key == "max_running" else "of bytes"
            raise BadCommand(f"{key} must be a number {what}, got {value!r}")
    return sizes
