"""The engine process' first lines: the model's file is on its way into memory while all else is imported.

Started by `engine.early` or `engine.supervisor`; what it then is, `engine.worker` says.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType

from engine import mapped
from engine.config import EngineConfig, in_place_wanted, parse_config
from engine.early import WAIT
from engine.hostmem import available_bytes

BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def files_of(config: EngineConfig) -> list[Path]:
    """What a start of `config` reads from end to end."""
    if config.experts_pack:
        return [Path(config.experts_pack).expanduser() / "experts.bin"] if in_place_wanted(config) else []
    model = Path(config.model).expanduser()
    return [model] if model.is_file() else sorted(model.glob("*.gguf")) or sorted(model.glob("*.safetensors"))


def read_ahead(config: str) -> None:
    with contextlib.suppress(ValueError):  # the worker says what is wrong with it
        mapped.begin(files_of(parse_config(config)), available_bytes() or 0)


def wait() -> None:
    """Until the API process says what to serve, as our command line would have; the process ends when it never does."""
    socket, config = sys.stdin.readline().rstrip("\n"), sys.stdin.readline()
    if not config.endswith("\n"):
        os._exit(0)
    sys.argv[1:] = ["--socket", socket, "--config", config.rstrip("\n")]
    read_ahead(sys.argv[-1])


def import_worker() -> ModuleType:
    """numpy's BLAS starts a thread for each core, which spin while all else is imported; nothing here multiplies with it."""
    own = os.environ.get(BLAS_THREADS)
    os.environ[BLAS_THREADS] = own or "1"
    gc.disable()  # what is imported stays
    worker = importlib.import_module("engine.worker")
    gc.freeze()
    gc.enable()
    if own is None:
        del os.environ[BLAS_THREADS]  # torch may have a BLAS of its own, with which it computes
    return worker


def main() -> None:
    waiting = None
    if sys.argv[1:] == [WAIT]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the API process ends us
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
    elif "--config" in sys.argv[:-1]:
        read_ahead(sys.argv[sys.argv.index("--config") + 1])
    worker = import_worker()
    if waiting:
        waiting.join()
    worker.leave(worker.main())


if __name__ == "__main__":
    main()
