"""`moorage experts ...`: record which experts a running engine uses, and replay that through eviction policies and capacities."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.http_cli import URL, call
from engine.user import UserError, check_writable

experts = typer.Typer(no_args_is_help=True, help="See, record and simulate how experts use fast memory.")

POLL_S = 1.0  # between two looks at how far a recording is


@experts.command("status")
def status(url: Annotated[str, URL] = "http://127.0.0.1:8008") -> None:
    """Show where experts lie and why, and what was hit, missed and fetched."""
    typer.echo(json.dumps(call("GET", f"{url}/v1/experts/status"), indent=2))


@experts.command("trace")
def trace(
    out: Annotated[Path, typer.Argument(help="File to write, e.g. routing.npz.")],
    tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens were computed.")] = 2000,
    url: Annotated[str, URL] = "http://127.0.0.1:8008",
) -> None:
    """Record the routing of a running engine while others use it; Ctrl-C ends the recording and keeps what there is.

    Only expert numbers are recorded, no text and no tokens.
    """
    address = f"{url}/v1/experts/trace"
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is no directory; create it first")
    check_writable(out)  # not after minutes of recording
    call("POST", address, {"action": "start"})
    typer.echo(f"recording {tokens} tokens; use the engine now (Ctrl-C ends early)", err=True)
    try:
        _watch(address, tokens)
    except KeyboardInterrupt:
        typer.echo("ended early", err=True)
    got = call("POST", address, {"action": "stop"})
    if "trace" not in got:
        raise UserError("the recording is gone: the engine was restarted, or another recording was ended; record again")
    if not got["tokens"]:
        raise UserError("nothing was recorded: no request was computed meanwhile")
    try:
        out.write_bytes(base64.b64decode(got["trace"]))
    except OSError as e:
        raise UserError(
            f"{out} cannot be written ({e.strerror}), and the recording is gone: make room and record again"
        ) from None
    more = "; the recorder was full before" if got["full"] else ""
    typer.echo(f"{out}: {got['tokens']} tokens, {out.stat().st_size} bytes{more}")


def _watch(address: str, tokens: int) -> None:
    """Until so many are recorded, or the recording ends by itself; says how far it is."""
    from engine.progress import progress

    with progress(str) as update:
        while True:
            seen: dict[str, Any] = call("POST", address, {"action": "progress"})
            update(min(tokens, seen["tokens"]), tokens)
            if not seen["recording"] or seen["full"] or seen["tokens"] >= tokens:
                return
            time.sleep(POLL_S)


@experts.command("sim")
def sim(
    file: Annotated[Path, typer.Argument(help="A trace recorded with `experts trace`.")],
    policy: Annotated[list[str] | None, typer.Option(help="Policy to replay; repeatable. Default: all.")] = None,
    slots: Annotated[list[int] | None, typer.Option(min=1, help="Capacity in experts; repeatable. Default: a range.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Replay only steps of at most so many tokens.")] = 8,
    png: Annotated[Path | None, typer.Option(help="Draw the miss-rate curve into this PNG.")] = None,
) -> None:
    """Miss rates of eviction policies at several capacities, and Belady's bound, which no policy can beat.

    Example: moorage engine experts sim routing.npz --png misses.png
    """
    from engine.experts.plot import NoPlotting, draw_miss_rates
    from engine.experts.policies import POLICIES, make_policy
    from engine.experts.replay import belady, capacities, replay
    from engine.experts.trace import TraceError, load_trace, measure_locality

    policies = policy or list(POLICIES)
    try:
        for name in policies:
            make_policy(name, 1, 1, 1)
        steps = load_trace(file).decode_only(batch)
        if not steps.tokens:
            raise UserError(f"{file} has no step of at most {batch} tokens; raise --batch")
        locality = measure_locality(steps) if batch == 1 or len(steps.decode_only(1).rows) else None
    except (TraceError, ValueError) as e:
        raise UserError(str(e)) from None
    counts = sorted(set(slots or capacities(steps)))
    typer.echo(f"{steps.tokens} tokens, {steps.layers} layers of {steps.experts} experts, {steps.ids.shape[1]} a token")
    if locality:
        text = f"{locality.repeat:.1%} of a token's experts served the token before"
        typer.echo(f"{text}; the most used tenth serves {locality.skew:.1%}; drift {locality.drift:.2f}")
    typer.echo(f"{'slots':>7} {'of all':>7}  " + "".join(f"{name:>8}" for name in [*policies, "belady"]))
    results = []
    for count in counts:
        row = [*(replay(steps, name, count) for name in policies), belady(steps, count)]
        results += row
        typer.echo(f"{count:7} {count / steps.keys:7.1%}  " + "".join(f"{r.miss_rate:8.1%}" for r in row))
    if png is not None:
        try:
            draw_miss_rates(results, png, f"{file.name}: {steps.tokens} tokens")
        except NoPlotting as e:
            raise UserError(str(e)) from None
        except OSError as e:
            raise UserError(f"{png} cannot be written ({e.strerror}): name a file in a directory that is there") from None
        typer.echo(f"drawn: {png}")
