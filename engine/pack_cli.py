"""`moorage engine pack MODEL DIRECTORY`: routed experts into a file from which they can be read one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.user import UserError, check_model_path

KERNELS = typer.Option(help="auto, cpu, reference or cuda, as in `serve`: the layout they compute on is what is packed.")


def pack(
    model: Annotated[str, typer.Argument(help="A Hugging Face directory or a GGUF file.")],
    directory: Annotated[Path, typer.Argument(help="New or empty directory for the pack; on a fast disk.")],
    kernels: Annotated[str, KERNELS] = "auto",
) -> None:
    """Pack the routed experts of MODEL, for `serve --experts-pack`. Interrupted, the same command goes on where it stopped.

    Example: moorage engine pack ~/models/Qwen3-30B-A3B /fast/a3b.pack
    """
    from engine.build import BuildError, choose_kernels
    from engine.experts.pack import PackError
    from engine.memory import gib
    from engine.models.errors import ModelError
    from engine.packing import pack_model
    from engine.progress import progress

    check_model_path(model)
    try:
        with progress(gib) as update:
            index = pack_model(model, directory, choose_kernels(kernels, 0), update)
    except (BuildError, ModelError, PackError) as e:
        raise UserError(str(e)) from None
    except OSError as e:
        kept = "the layers already packed are kept: " if (directory / "index.json").exists() else ""
        raise UserError(f"{directory}: {e.strerror or e}; {kept}run the same command again when that is repaired") from None
    typer.echo(f"{directory}: {index.layers} layers of {index.experts} experts, {gib(index.size)}")
    typer.echo(f"serve it with: moorage engine serve {model} --experts-pack {directory}")
