"""`moorage logs ...`: the questions a user asks of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.diagnostics.reader import Reader, session
from gateway.diagnostics.report import as_data, report
from gateway.diagnostics.why import lines, why

logs = typer.Typer(help="Ask the request records what happened and why.", no_args_is_help=True, rich_markup_mode=None)
DEFAULT = Path("records/moorage.jsonl")
RecordsFile = Annotated[Path, typer.Option("--records", "-r", help="The record file; its rotated ones are read too.")]


@logs.command("why")
def why_command(
    request: Annotated[str, typer.Argument(help="Request id, as in the header x-moorage-request-id; `last` is the newest.")],
    records: RecordsFile = DEFAULT,
) -> None:
    """Say where a request departs from its session's history, what that cost, and what to do about it."""
    reader = Reader(records)
    try:
        record = _find(reader, request)
    except (FileNotFoundError, OSError) as e:
        _fail(f"{e}. Name the record file with --records")
    if record is None:
        _fail(f"no request {request} in {records}. `moorage logs report` shows ids; older files may be gone (keep_files)")
    mine = json.dumps(session(record)).encode()
    before = [r for r in reader.records(mine) if session(r) == session(record) and r["id"] != record["id"] and _older(r, record)]
    for line in lines(why(record, before)):
        typer.echo(line)


@logs.command("report")
def report_command(
    records: Annotated[Path, typer.Argument(help="The record file; its rotated ones are read too.")] = DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Per agent and kind of turn: prompt, reuse, lost tokens, time to first token, top causes with a remedy."""
    reader = Reader(records)
    try:
        data = as_data(report(reader.records()))
    except (FileNotFoundError, OSError) as e:
        _fail(f"{e}. Name the record file")
    if as_json:
        typer.echo(json.dumps(data, indent=1))
        return
    _table(data)
    if reader.skipped:
        typer.echo(f"{reader.skipped} lines were no records (torn by a crash or foreign) and were left out")


def _find(reader: Reader, request: str) -> dict[str, Any] | None:
    found = None
    for record in reader.records(b"" if request == "last" else json.dumps(request).encode()):
        if request == "last":
            found = record
        elif record["id"] == request:
            return record
    return found


def _older(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (a.get("time") or 0) <= (b.get("time") or 0)


def _table(data: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("agent", "turn", "requests", "failed", "prompt p50", "reuse", "lost", "first token ms p50", box=None)
    for row in data:
        first = " ".join(f"{name}={ms:.0f}" for name, ms in row["first_token_ms_p50"].items())
        reuse = "-" if row["reuse"] is None else f"{row['reuse']:.1%}"
        prompt = "-" if row["prompt_p50"] is None else f"{row['prompt_p50']:.0f}"
        counts = (str(row["requests"]), str(row["failed"]), prompt, reuse, str(row["lost"]))
        table.add_row(row["agent"], row["turn_class"], *counts, first)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for row in data:
        for cause in row["causes"]:
            what = (
                f"{row['agent']} {row['turn_class']}: {cause['cause']} in {cause['requests']} requests, {cause['tokens']} tokens"
            )
            typer.echo(f"{what} (see {cause['example']}). {cause['remedy']}")


def _fail(message: str) -> None:
    typer.echo(f"moorage: {message}", err=True)
    raise typer.Exit(1)
