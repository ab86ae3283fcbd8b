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

import json
import logging
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.arguments import plain
from engine.config import EngineConfig
from engine.experts_cli import experts
from engine.http_cli import FAST, LINK, PIN, PLACEMENT, URL, UserError, call, check_model_path, parse_size
from engine.pack_cli import pack
from engine.plan_cli import bench, plan

gc.enable()
cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Moorage's engine: runs one model on this machine and answers OpenAI-style HTTP on the loopback interface.",
)
MORE_MEMORY = "raise its limit (ulimit -v) or give it a machine with more"
MODELS_HELP = "A Hugging Face directory (config.json, *.safetensors, tokenizer.json) or a GGUF file."


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, bound before the model loads. Raises UserError when the port is taken or the host is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as e:
        sock.close()
        if e.errno == 98:
            raise UserError(f"port {port} on {host} is in use; stop the other server or choose another with --port") from None
        raise UserError(f"cannot listen on {host}:{port}: {e.strerror}") from None
    sock.listen(1024)
    return sock


@cli.command()
def serve(
    model: Annotated[str, typer.Argument(help=MODELS_HELP)],
    host: Annotated[
        str, typer.Option(help="Interface to listen on. The engine has no keys of its own: keep it on loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one and prints it.")] = 8008,
    name: Annotated[str, typer.Option(help="Name clients use for the model. Default: the file or directory name.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 = one for each core this process may use.")] = 0,
    kernels: Annotated[
        str,
        typer.Option(
            help="auto = native if built, else reference (slow, exact); cpu = native only; cuda (not yet run on a GPU)."
        ),
    ] = "auto",
    max_context: Annotated[
        int, typer.Option(min=0, help="Tokens one conversation may hold; 0 = what model and memory allow.")
    ] = 0,
    kv_memory: Annotated[
        str, typer.Option(help="Memory for conversations (KV cache), e.g. 4G; 0 = decide from free memory.")
    ] = "0",
    max_running: Annotated[int, typer.Option(min=1, help="Requests computed together; more wait in the queue.")] = 16,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; the next one gets status 429.")] = 256,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens computed in one step.")] = 512,
    experts_pack: Annotated[
        str, typer.Option(help="Directory made by `pack`: experts are read from it when needed. For models larger than memory.")
    ] = "",
    expert_memory: Annotated[
        str, typer.Option(help="Memory for packed experts, e.g. 8G; 0 = all, or half of what is free.")
    ] = "0",
    expert_policy: Annotated[
        str, typer.Option(help="Which packed experts leave memory first: lru, rate or s3fifo (see `experts sim`).")
    ] = "lru",
    placement: Annotated[str, typer.Option(help=PLACEMENT)] = "",
    fast_memory: Annotated[str, typer.Option(help=FAST)] = "0",
    fast_link: Annotated[str, typer.Option(help=LINK)] = "0",
    pin_memory: Annotated[str, typer.Option(help=PIN)] = "0",
    kv_disk: Annotated[
        str, typer.Option(help="Directory in which conversations outlive a restart; empty = none. Holds user text: mode 0600.")
    ] = "",
    kv_disk_space: Annotated[str, typer.Option(help="Most the disk cache may hold, e.g. 64G.")] = "32G",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve MODEL until Ctrl-C.

    The port answers at once (`/health` tells how far loading is); chat is refused with 503 until the model is ready.

    Example: moorage engine serve ~/models/Qwen3-30B-A3B --kv-memory 8G
    """
    from engine.config import dump_config, parse_config
    from engine.launch import run_server

    check_model_path(model)
    config = EngineConfig(
        model=model,
        kernels=kernels,  # type: ignore[arg-type]  # checked by parse_config
        threads=threads,
        max_context=max_context,
        kv_bytes=parse_size(kv_memory),
        max_running=max_running,
        max_queue=max_queue,
        prefill_chunk=prefill_chunk,
        experts_pack=experts_pack,
        expert_bytes=parse_size(expert_memory),
        expert_policy=expert_policy,  # type: ignore[arg-type]
        placement=placement,  # type: ignore[arg-type]
        fast_bytes=parse_size(fast_memory),
        fast_link=parse_size(fast_link),
        pin_bytes=parse_size(pin_memory),
        kv_disk=kv_disk,
        kv_disk_bytes=parse_size(kv_disk_space),
        log_level=log_level,  # type: ignore[arg-type]
    )
    try:
        config = parse_config(dump_config(config))
    except ValueError as e:
        raise UserError(str(e)) from None
    sock = bind(host, port)
    raise typer.Exit(run_server(config, name or Path(model).resolve().stem, sock))


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
    logging.captureWarnings(True)
    try:
        given = plain(serve, sys.argv[2:]) if sys.argv[1:2] == ["serve"] else None
        if given is not None:
            serve(**given)
        cli(standalone_mode=True, prog_name="moorage engine")
    except typer.Exit as e:
        sys.exit(e.exit_code)
    except KeyboardInterrupt:  # before the server takes care of it
        sys.exit(130)
    except UserError as e:
        problem = str(e)
    except MemoryError:
        problem = f"this process may not have the memory that it needs; {MORE_MEMORY}"
    except ImportError as e:
        if "failed to map" not in str(e):
            raise
        problem = f"a library does not fit into the memory that this process may have ({e}); {MORE_MEMORY}"
    else:
        return
    print(f"moorage: {problem}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
