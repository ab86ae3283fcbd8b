"""The engine process' first lines: the model's file is on its way into memory while torch is imported, a second or two.

Started by `engine.supervisor`; what it then is, `engine.worker` says.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from engine import mapped
from engine.config import EngineConfig, in_place_wanted, parse_config
from engine.hostmem import available_bytes
from engine.lean import import_torch


def files_of(config: EngineConfig) -> list[Path]:
    """What a start of `config` reads from end to end."""
    if config.experts_pack:
        return [Path(config.experts_pack).expanduser() / "experts.bin"] if in_place_wanted(config) else []
    model = Path(config.model).expanduser()
    return [model] if model.is_file() else sorted(model.glob("*.gguf")) or sorted(model.glob("*.safetensors"))


def main() -> None:
    try:
        text = sys.argv[sys.argv.index("--config") + 1]
        mapped.begin(files_of(parse_config(text)), available_bytes() or 0)
    except (ValueError, IndexError):
        pass  # the worker says what is wrong with it
    import_torch()
    worker = importlib.import_module("engine.worker")
    worker.leave(worker.main())


if __name__ == "__main__":
    main()
