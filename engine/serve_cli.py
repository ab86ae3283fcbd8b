"""`moorage engine serve`: the command that a start waits for, so nothing here imports typer, which only help and mistakes need.

Every failure is one line on stderr and a non-zero exit; Ctrl-C ends in order.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from engine.arguments import Argument, Option, plain
from engine.config import EngineConfig, dump_config, parse_config
from engine.user import FAST, LINK, PIN, PLACEMENT, UserError, check_model_path, parse_size

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


def serve(
    model: Annotated[str, Argument(help=MODELS_HELP)],
    host: Annotated[
        str, Option(help="Interface to listen on. The engine has no keys of its own: keep it on loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 takes a free one and prints it.")] = 8008,
    name: Annotated[str, Option(help="Name clients use for the model. Default: the file or directory name.")] = "",
    threads: Annotated[int, Option(min=0, help="CPU threads; 0 = one for each core this process may use.")] = 0,
    kernels: Annotated[
        str,
        Option(help="auto = native if built, else reference (slow, exact); cpu = native only; cuda (not yet run on a GPU)."),
    ] = "auto",
    max_context: Annotated[int, Option(min=0, help="Tokens one conversation may hold; 0 = what model and memory allow.")] = 0,
    kv_memory: Annotated[str, Option(help="Memory for conversations (KV cache), e.g. 4G; 0 = decide from free memory.")] = "0",
    max_running: Annotated[int, Option(min=1, help="Requests computed together; more wait in the queue.")] = 16,
    max_queue: Annotated[int, Option(min=1, help="Requests that may wait; the next one gets status 429.")] = 256,
    prefill_chunk: Annotated[int, Option(min=1, help="Prompt tokens computed in one step.")] = 512,
    experts_pack: Annotated[
        str, Option(help="Directory made by `pack`: experts are read from it when needed. For models larger than memory.")
    ] = "",
    expert_memory: Annotated[str, Option(help="Memory for packed experts, e.g. 8G; 0 = all, or half of what is free.")] = "0",
    expert_policy: Annotated[
        str, Option(help="Which packed experts leave memory first: lru, rate or s3fifo (see `experts sim`).")
    ] = "lru",
    placement: Annotated[str, Option(help=PLACEMENT)] = "",
    fast_memory: Annotated[str, Option(help=FAST)] = "0",
    fast_link: Annotated[str, Option(help=LINK)] = "0",
    pin_memory: Annotated[str, Option(help=PIN)] = "0",
    kv_disk: Annotated[
        str, Option(help="Directory in which conversations outlive a restart; empty = none. Holds user text: mode 0600.")
    ] = "",
    kv_disk_space: Annotated[str, Option(help="Most the disk cache may hold, e.g. 64G.")] = "32G",
    log_level: Annotated[str, Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve MODEL until Ctrl-C.

    The port answers at once (`/health` tells how far loading is); chat is refused with 503 until the model is ready.

    Example: moorage engine serve ~/models/Qwen3-30B-A3B --kv-memory 8G
    """
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
    sys.exit(run_server(config, name or Path(model).resolve().stem, sock))


def serve_plainly(words: Sequence[str]) -> None:
    """Serve, and end the process, if `words` are `serve` and arguments that say nothing unusual."""
    given = plain(serve, words[1:]) if words[:1] == ["serve"] else None
    if given is not None:
        with told():
            serve(**given)


@contextmanager
def told() -> Iterator[None]:
    """Ends the process with one line on stderr when what is done inside fails."""
    logging.captureWarnings(True)
    try:
        yield
        return
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
    print(f"moorage: {problem}", file=sys.stderr)
    sys.exit(1)
