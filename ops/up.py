"""`./ops/up`: from a clean clone to a running service in one command, with visible steps. Standard library only.

Owns the order of the steps and what the user is told. The environment is ops/env.py's, the processes are ops/service.py's,
the example request is ops/showcase.py's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import env  # noqa: E402
import service  # noqa: E402
import showcase  # noqa: E402

ROOT = env.ROOT
DEMO_MODEL = ROOT / "ops" / "demo_model"
LOG_SECONDS = 5.0  # a log gets a line of progress this often; a terminal always shows the newest
LOAD_SECONDS = 1800  # a 60 GB checkpoint from a 100 MB/s disk takes 600 s; three times that is not coming any more


class UpError(Exception):
    """One line: cause and remedy."""


def say(text: str) -> None:
    """A line of detail under the current step; on a terminal the next one overwrites it."""
    if sys.stdout.isatty():
        print("\r\033[K  " + text[: shutil.get_terminal_size().columns - 3], end="", flush=True)
    else:
        print(f"  {text}", flush=True)


def step(text: str) -> None:
    print(("\r\033[K" if sys.stdout.isatty() else "") + f"== {text}", flush=True)


def run_folder() -> Path:
    return Path(os.environ.get("MOORAGE_RUN", ROOT / ".run")).resolve()


def check_port(port: int, option: str) -> None:
    """Raises UpError when somebody else listens on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            raise UpError(f"not allowed to use port {port}; choose one above 1023 with {option}") from None
        except OSError:
            raise UpError(f"port {port} is in use by another program; stop it or choose another with {option}") from None


def check_model(path: Path) -> Path:
    if path.is_file() or (path / "config.json").is_file():
        return path.resolve()
    what = "holds no config.json" if path.is_dir() else "does not exist"
    raise UpError(f"model {path} {what}; give a Hugging Face checkpoint directory or a GGUF file with --model")


def model_name(path: Path) -> str:
    return "moorage-demo" if path == DEMO_MODEL else path.stem if path.is_file() else path.name


def gateway_config(args: argparse.Namespace, name: str, folder: Path) -> Path:
    """Write the gateway's configuration for this service. JSON is YAML; quoting is then nobody's worry."""
    path = folder / "gateway.yaml"
    engine = {"model": f"moorage/{name}", "api_base": f"http://127.0.0.1:{args.engine_port}"}
    config = {
        "listen": {"host": "127.0.0.1", "port": args.port},
        "records": {"path": str(folder / "records" / "moorage.jsonl")},
        "model_list": [{"model_name": name, "litellm_params": engine}],
    }
    path.write_text(json.dumps(config, indent=2) + "\n")
    return path


def plan(args: argparse.Namespace, python: Path, model: Path, folder: Path) -> service.Service:
    name = model_name(model)
    search = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    engine = [str(python), "-m", "engine.cli", "serve", str(model), "--name", name]
    engine += ["--host", "127.0.0.1", "--port", str(args.engine_port), "--kv-disk", str(folder / "kv")]
    gateway = [str(python), "-m", "gateway.cli", "serve", "--config", str(gateway_config(args, name, folder))]
    parts = [service.Part("engine", engine, args.engine_port, search), service.Part("gateway", gateway, args.port, search)]
    return service.Service(parts=parts, cwd=str(ROOT), model=str(model))


def get_health(port: int) -> dict | None:
    """The /health body whatever its status; None while nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        body = json.loads(response.read())
        return {**body, "http": response.status} if isinstance(body, dict) else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()


class Start:
    """A supervisor that stops by itself unless `keep` is called: it watches the pipe that dies with this process."""

    def __init__(self, wanted: service.Service, folder: Path) -> None:
        self.folder = folder
        read_end, self._keep = os.pipe()
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "failure").unlink(missing_ok=True)
        command = [sys.executable, str(ROOT / "ops" / "service.py"), str(folder), json.dumps(asdict(wanted)), str(read_end)]
        with (folder / "logs" / "service.log").open("a") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(read_end,), start_new_session=True
            )
        os.close(read_end)

    def keep(self) -> None:
        os.write(self._keep, service.KEEP)
        os.close(self._keep)

    def abandon(self) -> None:
        os.close(self._keep)
        self.process.wait()

    def wait_ready(self, wanted: service.Service) -> None:
        """Show progress until engine and gateway answer 200. Raises UpError when a part ended or the time is over."""
        began, shown = time.monotonic(), ("", 0.0)
        for part in wanted.parts:
            while True:
                if self.process.poll() is not None:
                    raise UpError(f"{service.read_failure(self.folder) or 'the supervisor ended'} (logs: {self.folder / 'logs'})")
                health = get_health(part.port)
                if health and health["http"] == 200:
                    break
                if time.monotonic() - began > LOAD_SECONDS:
                    raise UpError(f"{part.name} is not ready after {LOAD_SECONDS} s; see {self.folder / 'logs'}")
                stage = str(health and health.get("stage"))
                now = time.monotonic()
                if sys.stdout.isatty() or stage != shown[0] or now - shown[1] >= LOG_SECONDS:
                    say(progress(part.name, health, now - began))
                    shown = (stage, now)
                time.sleep(0.3)
            say(f"{part.name} is ready on port {part.port} ({time.monotonic() - began:.1f} s)")
            if sys.stdout.isatty():
                print()


def progress(name: str, health: dict | None, seconds: float) -> str:
    if health is None:
        return f"{name}: starting, {seconds:.0f} s"
    fraction, stage = health.get("fraction"), health.get("stage") or health.get("status", "")
    bar = f"{'#' * int(20 * fraction):.<20} {100 * fraction:.0f} % " if isinstance(fraction, int | float) else ""
    return f"{name}: {bar}{stage}, {seconds:.0f} s"


def same_service(state: dict, args: argparse.Namespace, model: Path) -> bool:
    ports = {part["name"]: part["port"] for part in state["parts"]}
    return state["model"] == str(model) and ports == {"engine": args.engine_port, "gateway": args.port}


def engine_lines(folder: Path, offset: int) -> list[str]:
    """The `kv cache hit|miss` lines the engine logged behind byte `offset`; not those of work it gives itself (`-next-`)."""
    with (folder / "logs" / "engine.log").open("rb") as log:
        log.seek(offset)
        lines = log.read().decode(errors="replace").splitlines()
    wanted = [line for line in lines if "kv cache hit" in line or "kv cache miss" in line]
    return [line[line.index("kv cache ") :] for line in wanted if "-next-" not in line]


def show(args: argparse.Namespace, model: Path, folder: Path) -> None:
    step("one agent-like request through the gateway")
    log = folder / "logs" / "engine.log"
    offset = log.stat().st_size if log.exists() else 0
    showcase.run(args.port, model_name(model))
    time.sleep(0.2)  # the log goes through a pipe
    for line in engine_lines(folder, offset):
        print(f"  {'engine':>9} | {line}")


def explain(args: argparse.Namespace, model: Path, folder: Path) -> None:
    step("running")
    print(f"""\
  endpoint   http://127.0.0.1:{args.port}/v1   (any API key; model {model_name(model)})
  engine     http://127.0.0.1:{args.engine_port}
  logs       {folder / "logs"}
  records    {folder / "records"}
  status     ./ops/up --status
  stop       ./ops/up --stop""")


def up(args: argparse.Namespace, folder: Path) -> None:
    model = check_model(args.model)
    state = service.read_state(folder)
    if state is not None:
        if not same_service(state, args, model):
            raise UpError(f"already running with another model or port (model {state['model']}); ./ops/up --stop first")
        step("already running")
        show(args, model, folder)
        explain(args, model, folder)  # --once stops what it started, and it started nothing
        return
    if args.engine_port == args.port:
        raise UpError(f"engine and gateway cannot both listen on port {args.port}; choose another with --port")
    check_port(args.engine_port, "--engine-port")
    check_port(args.port, "--port")
    step("environment")
    python = env.ensure("run", say, folder / "setup.log")
    step(f"engine with {model.relative_to(ROOT) if model.is_relative_to(ROOT) else model}, gateway")
    wanted = plan(args, python, model, folder)
    start = Start(wanted, folder)
    try:
        start.wait_ready(wanted)
        show(args, model, folder)
    except BaseException:
        step("stopping what was started")
        start.abandon()
        raise
    if args.once:
        step("stopping (--once)")
        start.abandon()
    else:
        start.keep()
        explain(args, model, folder)


def status(folder: Path) -> int:
    state = service.read_state(folder)
    if state is None:
        failure = service.read_failure(folder)
        print("not running" + (f"; the last service gave up: {failure}" if failure else ""))
        return 1
    print(f"model {state['model']}")
    for part in state["parts"]:
        health = get_health(part["port"])
        word = "no answer" if health is None else "ready" if health["http"] == 200 else progress(part["name"], health, 0)
        restarts = state["restarts"].get(part["name"], 0)
        print(f"{part['name']:8} port {part['port']}  pid {state['pids'].get(part['name'])}  {word}  recent restarts {restarts}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./ops/up", description="start engine and gateway on this machine and try them")
    parser.add_argument(
        "--model", type=Path, default=DEMO_MODEL, help="checkpoint directory or GGUF file (default: the demo model)"
    )
    parser.add_argument("--port", type=int, default=8100, help="the gateway's port (default 8100)")
    parser.add_argument("--engine-port", type=int, default=8008, help="the engine's port (default 8008)")
    parser.add_argument("--once", action="store_true", help="stop again after the example request what this command started")
    parser.add_argument("--stop", action="store_true", help="stop the running service")
    parser.add_argument("--status", action="store_true", help="say what runs")
    return parser.parse_args()


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    args, folder = parse_arguments(), run_folder()
    signal.signal(signal.SIGTERM, interrupt)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if args.status:
            return status(folder)
        if args.stop:
            print("stopped" if service.stop(folder) else "nothing was running")
            return 0
        up(args, folder)
    except (UpError, env.SetupError, showcase.ShowcaseError) as problem:
        print(f"moorage: {problem}", file=sys.stderr)
        return 2
    except PermissionError as problem:
        print(f"moorage: no permission for {problem.filename}; the clone must belong to you", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `./ops/up --status | grep -q`: who asked has stopped listening
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # the interpreter flushes it at exit
        return 1
    except KeyboardInterrupt:
        print("moorage: interrupted, nothing was left running", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
