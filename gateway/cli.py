"""`moorage ...`: the command line. It imports the gateway only when it serves, and of the engine nothing at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

HELP = """A gateway and a Mixture-of-Experts engine for coding agents.

Two processes: the engine answers on :8008, the gateway stands in front of it on :8100.

\b
    moorage engine serve DIR             start the engine
    moorage plan DIR                     will it fit, how fast will it be
    moorage serve                        start the gateway in front of it
    moorage cache status                 what the engine's prefix cache holds; also: rebuild, delete
    moorage check CONFIG                 say what a configuration means, without starting anything
    moorage logs why REQUEST_ID          why a request did not reuse more of its prompt
    moorage logs report                  reuse and time to first token, per agent and kind of turn

Point an agent at http://127.0.0.1:8100/v1 (OpenAI chat completions).
"""
cli = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def fail(message: str) -> NoReturn:
    """One line for the user, exit status 1."""
    typer.echo(f"moorage: {message}", err=True)
    raise typer.Exit(1)


@cli.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML file; a LiteLLM config works as it is.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [config, else 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on [config, else 8100]; 0 takes a free one.")] = None,
    engine: Annotated[str | None, typer.Option(help="Engine URL when there is no config [http://127.0.0.1:8008].")] = None,
    records: Annotated[Path | None, typer.Option(help="Where request records go [config, else records/moorage.jsonl].")] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Start the gateway.

    Without --config it serves every model name from the engine on this machine, keeps records under ./records and
    listens on loopback only.
    """
    from gateway import server, tracing

    if log_level not in ("debug", "info", "warning", "error"):
        fail(f"--log-level {log_level} is none of debug, info, warning, error")
    settings = _load(config, engine)
    settings = _override(settings, host, port, records)
    try:
        server.serve(settings, log_level)
    except (server.CannotListen, tracing.NoTracing) as e:
        fail(str(e))


@cli.command()
def check(config: Annotated[Path, typer.Argument(help="The YAML file.")]) -> None:
    """Read a configuration and say what it means."""
    settings = _load(config, None)
    for d in settings.deployments:
        how = {"engine": "our engine", "openai": "direct, OpenAI", "provider": "through litellm"}[d.kind]
        typer.echo(f"model {d.serves}: {d.model} ({how}) {d.api_base}".rstrip())
    typer.echo(f"keys: {', '.join(k.name for k in settings.keys) or 'none, anyone who reaches the port may use it'}")
    for warning in settings.warnings:
        typer.echo(f"warning: {warning}")


PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
SHORTCUTS = {
    "cache": "See and change the engine's prefix cache: status, rebuild, delete",
    "memory": "See and move the memory of a running engine: status, set",
    "plan": "Will a model fit, and how fast will it be?",
    "pack": "Pack a model's experts into a file, for models larger than memory.",
    "bench": "Measure this machine: moorage bench bw",
    "experts": "See, record and simulate how experts use fast memory.",
}


@cli.command(context_settings=PASS_ON, short_help="Run an engine command, for example: moorage engine serve DIR")
def engine(ctx: typer.Context) -> None:
    """Everything behind `engine` is the engine's own command line; `moorage engine --help` shows it."""
    _become_engine_cli(ctx.args)


def _become_engine_cli(args: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "engine.cli", *args])


def _shortcut(name: str, text: str) -> None:
    """`moorage NAME ...` for `moorage engine NAME ...`."""

    @cli.command(name, context_settings=PASS_ON, short_help=text)
    def run(ctx: typer.Context) -> None:
        _become_engine_cli([name, *ctx.args])


for _name, _text in SHORTCUTS.items():
    _shortcut(_name, _text)


def _load(path: Path | None, engine_url: str | None):
    from gateway import config_file

    try:
        if path is not None and engine_url:
            fail("--engine and --config exclude each other. Write the engine's api_base into the configuration")
        if engine_url:
            entry = {"model_name": "*", "litellm_params": {"model": "moorage/*", "api_base": engine_url}}
            return config_file.parse({"model_list": [entry]}, "--engine")
        return config_file.load(path)
    except config_file.ConfigError as e:
        fail(str(e))


def _override(settings, host: str | None, port: int | None, records: Path | None):
    from msgspec.structs import replace

    listen = settings.listen
    listen = replace(listen, host=listen.host if host is None else host, port=listen.port if port is None else port)
    kept = settings.records if records is None else replace(settings.records, path=str(records))
    return replace(settings, listen=listen, records=kept)


def main() -> None:
    from gateway.diagnostics.cli import logs

    cli.add_typer(logs, name="logs")
    cli()


if __name__ == "__main__":
    main()
