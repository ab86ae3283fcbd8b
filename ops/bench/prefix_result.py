"""What a run of the prefix simulator found, and the table it is printed as."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    policy: str
    users: int
    ram_gib: float
    disk_gib: float
    requests: int
    prompt_mtok: float
    ideal_mtok: float
    prefill_ratio: float  # prefilled / ideal
    written_gib: float
    written_ratio: float  # written / ideal
    from_ram: float  # share of reused tokens
    from_disk: float
    thrash: int
    lost_by_reason: dict[str, int]
    seconds: float


def table(results: list[Result]) -> str:
    head = (
        "policy",
        "users",
        "ram/disk GiB",
        "requests",
        "prefilled/ideal",
        "written/ideal",
        "GiB written",
        "ram",
        "disk",
        "thrash",
        "lost tokens",
    )
    rows = [
        (
            r.policy,
            str(r.users),
            f"{r.ram_gib:.0f}/{r.disk_gib:.0f}",
            str(r.requests),
            f"{r.prefill_ratio:.3f}",
            f"{r.written_ratio:.3f}",
            f"{r.written_gib:.0f}",
            f"{r.from_ram:.0%}",
            f"{r.from_disk:.0%}",
            str(r.thrash),
            ", ".join(f"{k} {v:,}" for k, v in sorted(r.lost_by_reason.items())) or "0",
        )
        for r in results
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows))
