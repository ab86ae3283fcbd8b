"""`moorage engine`: serve a model, look at one, or see what a running engine does. The configuration's only edge.

Every failure is one line on stderr and a non-zero exit; Ctrl-C ends in order.
"""

from __future__ import annotations

import gc
import sys

from engine import early

if __name__ == "__main__":  # before all imports that take time
    early.begin(sys.argv[1:])
    gc.disable()  # what is imported stays

from engine.serve_cli import MODELS_HELP, serve, serve_plainly, told

if __name__ == "__main__":  # before typer is imported
    serve_plainly(sys.argv[1:])

import json
from typing import Annotated, Any

import typer

from engine.arguments import typed
from engine.experts_cli import experts
from engine.http_cli import URL, call
from engine.pack_cli import pack
from engine.plan_cli import bench, plan
from engine.user import UserError, check_model_path, parse_size

gc.enable()
cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Moorage's engine: runs one model on this machine and answers OpenAI-style HTTP on the loopback interface.",
)

cli.command()(typed(serve))


@cli.command()
def models(model: Annotated[str, typer.Argument(help=MODELS_HELP)]) -> None:
    """Show what the text side finds in MODEL: vocabulary, special tokens, template, thinking, tool calls. Loads no weights."""
    from engine.text.text_model import load_text_model

    check_model_path(model)
    try:
        text = load_text_model(model)
    except ValueError as e:
        raise UserError(str(e)) from None
    off = (
        "always off"
        if not text.thinking.thinks
        else text.thinking.off
        if text.thinking.off is not None
        else "cannot be switched off"
    )
    rows: list[tuple[str, Any]] = [
        ("vocabulary", f"{text.tokenizer.vocab_size} tokens, {len(text.tokenizer.specials)} special"),
        ("stops at", ", ".join(text.tokenizer.decode([i]) for i in text.stop_ids)),
        ("chat template", "yes" if text.template else "none: only /v1/completions works"),
        ("thinking", f"{text.thinking.open} ... {text.thinking.close}" if text.thinking.thinks else "no thought tags"),
        ("thinking off", off),
        ("tool calls", text.output.tools if text.shows_tools else "not supported by the template"),
    ]
    for key, value in rows:
        typer.echo(f"{key:14} {value}")


@cli.command()
def status(url: Annotated[str, typer.Option(help="Address of a running engine.")] = "http://127.0.0.1:8008") -> None:
    """Show health, load and cache of a running engine as JSON."""
    import urllib.error
    import urllib.request

    out: dict[str, Any] = {}
    for key, path in (("health", "/health"), ("engine", "/v1/status"), ("cache", "/v1/cache/status")):
        try:
            with urllib.request.urlopen(url + path, timeout=10) as answer:
                out[key] = json.load(answer)
        except urllib.error.HTTPError as e:
            out[key] = json.load(e)
        except (OSError, ValueError) as e:
            raise UserError(f"no engine answers at {url} ({e}); start one with `serve`, or give its --url") from None
    typer.echo(json.dumps(out, indent=2))


cache = typer.Typer(no_args_is_help=True, help="See and change the prefix cache of a running engine.")
cli.add_typer(cache, name="cache")
cli.add_typer(experts, name="experts")
cli.add_typer(bench, name="bench")
cli.command("plan")(plan)
cli.command("pack")(pack)


def _call(method: str, url: str, body: dict[str, Any] | None = None) -> None:
    """One control request; prints the JSON answer. Raises UserError."""
    typer.echo(json.dumps(call(method, url, body), indent=2))


@cache.command("status")
def cache_status(url: Annotated[str, URL] = "http://127.0.0.1:8008") -> None:
    """Show capacity, use and counters by tier."""
    _call("GET", f"{url}/v1/cache/status")


@cache.command("rebuild")
def cache_rebuild(
    flush: Annotated[str, typer.Option(help="Forget what no running request holds, in this tier: ram, disk or all.")] = "",
    session: Annotated[str, typer.Option(help="Forget what only this session used, in every tier.")] = "",
    disk: Annotated[str, typer.Option(help="New disk budget, e.g. 64G; what no longer fits goes at once.")] = "",
    states: Annotated[str, typer.Option(help="New budget for saved recurrent states in memory, e.g. 2G.")] = "",
    url: Annotated[str, URL] = "http://127.0.0.1:8008",
) -> None:
    """Flush, forget a session, change budgets: without a restart, in any combination. `memory set` moves memory."""
    body: dict[str, Any] = {key: text for key, text in (("flush", flush), ("session", session)) if text}
    body |= {key: parse_size(text) for key, text in (("disk_bytes", disk), ("state_bytes", states)) if text}
    if not body:
        raise UserError("nothing to do: give --flush, --session, --disk or --states")
    _call("POST", f"{url}/v1/cache/rebuild", body)


@cache.command("delete")
def cache_delete(
    session: Annotated[str, typer.Argument(help="Session id, as in the log.")],
    url: Annotated[str, URL] = "http://127.0.0.1:8008",
) -> None:
    """Forget what only this session used, in memory and on disk."""
    from urllib.parse import quote

    _call("DELETE", f"{url}/v1/cache/sessions/{quote(session, safe='')}")


memory = typer.Typer(no_args_is_help=True, help="See and move the memory of a running engine.")
cli.add_typer(memory, name="memory")


@memory.command("status")
def memory_status(url: Annotated[str, URL] = "http://127.0.0.1:8008") -> None:
    """Show who holds how much, how far each can move, and what the machine has left."""
    _call("GET", f"{url}/v1/memory/status")


@memory.command("set")
def memory_set(
    kv: Annotated[str, typer.Option(help="Memory for the pages of conversations, e.g. 4G.")] = "",
    states: Annotated[str, typer.Option(help="Memory for saved recurrent states, e.g. 1G.")] = "",
    experts: Annotated[str, typer.Option(help="Memory for slots of packed experts, e.g. 8G.")] = "",
    running: Annotated[int, typer.Option(min=0, help="Requests computed together; 0 = as many as now.")] = 0,
    url: Annotated[str, URL] = "http://127.0.0.1:8008",
) -> None:
    """Move memory between experts, conversations and the system while requests run: all that is named, or nothing.

    Example: moorage memory set --kv 2G --experts 10G
    """
    sizes = (("kv_bytes", kv), ("state_bytes", states), ("expert_bytes", experts))
    body = {key: parse_size(text) for key, text in sizes if text} | ({"max_running": running} if running else {})
    if not body:
        raise UserError("nothing to do: give --kv, --states, --experts or --running")
    _call("POST", f"{url}/v1/cache/rebuild", body)


def main() -> None:
    serve_plainly(sys.argv[1:])
    with told():
        try:
            cli(standalone_mode=True, prog_name="moorage engine")
        except typer.Exit as e:
            sys.exit(e.exit_code)


if __name__ == "__main__":
    main()
