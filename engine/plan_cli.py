"""`moorage engine plan MODEL` and `moorage engine bench bw`: will it fit, how fast will it be, what was measured for both."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.user import FAST, LINK, PIN, UserError, check_model_path, check_writable, parse_size

if TYPE_CHECKING:
    from engine.experts.calibrate import Figure
    from engine.plan import Plan

bench = typer.Typer(no_args_is_help=True, help="Measure this machine.")
PROFILE = typer.Option(help="Where measurements are kept. Default: ~/.cache/moorage/bandwidth.json.")
KERNELS = typer.Option(help="auto, cpu, cuda or reference, as in `serve`.")
THREADS = typer.Option(min=0, help="CPU threads; 0 = one for each core this process may use.")


def plan(
    model: Annotated[str, typer.Argument(help="A Hugging Face directory or a GGUF file.")],
    mode: Annotated[
        str,
        typer.Option(
            help="Ask for one placement of the experts: resident, in_place, offload, hybrid, host or stream; refused with the "
            "arithmetic if impossible."
        ),
    ] = "",
    max_context: Annotated[int, typer.Option(min=0, help="Tokens one conversation may hold; 0 = the default.")] = 0,
    memory: Annotated[str, typer.Option(help="Plan for so much memory, e.g. 16G, instead of what is available now.")] = "",
    experts_pack: Annotated[str, typer.Option(help="Directory made by `pack`, as in `serve`: experts read when needed.")] = "",
    fast_memory: Annotated[str, typer.Option(help=FAST)] = "0",
    fast_link: Annotated[str, typer.Option(help=LINK)] = "0",
    pin_memory: Annotated[str, typer.Option(help=PIN)] = "0",
    kernels: Annotated[str, KERNELS] = "auto",
    threads: Annotated[int, THREADS] = 0,
    profile: Annotated[Path | None, PROFILE] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Will MODEL fit, where will its experts lie, how fast will it answer? Reads no weights.

    Example: moorage engine plan ~/models/Qwen3-30B-A3B
    """
    from engine.build import BuildError, choose_kernels
    from engine.experts.budget import MODES
    from engine.experts.pack import PackError
    from engine.memory import TooLittleMemory
    from engine.models.errors import ModelError
    from engine.models.load import open_checkpoint
    from engine.packing import open_pack
    from engine.plan import FastMemory, make_plan

    check_model_path(model)
    fast = FastMemory(parse_size(fast_memory), parse_size(fast_link), parse_size(pin_memory))
    if mode and mode not in MODES:
        raise UserError(f"no placement {mode!r}; there are {', '.join(MODES)}")
    try:
        ops = choose_kernels(kernels, threads)
        if fast.size and not fast.link and ops.device.type == "cpu":
            raise UserError("--fast-memory needs --fast-link, e.g. 8G a second")
        found = make_plan(
            open_checkpoint(model),
            ops,
            profile_path=profile,
            max_context=max_context,
            forced=mode or None,  # type: ignore[arg-type]  # checked above
            available=parse_size(memory) if memory else None,
            pack=open_pack(Path(experts_pack).expanduser(), model, ops) if experts_pack else None,
            fast=fast if fast.size else None,
        )
    except (BuildError, ModelError, PackError, TooLittleMemory) as e:
        raise UserError(str(e)) from None
    typer.echo(json.dumps(describe(found), indent=2) if as_json else "\n".join(lines(found)))
    if found.placement is None:
        raise typer.Exit(1)


def describe(plan: Plan) -> dict[str, object]:
    """The plan as JSON; the same figures as `lines`."""
    from engine.experts.placement import would_fit
    from engine.plan import groups_status

    placement = plan.placement
    return {
        "weights": plan.kinds,
        "cache_bytes": plan.load.cache,
        "max_context": plan.cache.max_context if plan.cache else 0,
        "available": plan.available,
        "promised_to_others": plan.promised,
        "mode": placement.mode if placement else None,
        "reason": placement.reason if placement else plan.refusal,
        "others": placement.refused if placement else {},
        "groups": groups_status(placement, plan.load) if placement else [],
        "pin_short_bytes": placement.pin_short if placement else 0,
        "bytes_per_token": plan.load.read + plan.load.routed,
        "at_context": plan.context,
        "decode_tok_s": placement.tokens_per_second if placement and plan.profile else None,
        "devices": [asdict(device) for device in plan.devices],
        "would_fit_with": would_fit(plan.load, plan.hardware),
    }


def lines(plan: Plan) -> list[str]:
    """The plan for people."""
    from engine.experts.placement import would_fit
    from engine.memory import gib
    from engine.numa import describe as describe_nodes

    load, cache = plan.load, plan.cache
    rows = [(kind, gib(size)) for kind, size in plan.kinds.items()]
    if cache is not None:
        rows.append(("conversations", f"{gib(cache.total_bytes)}, {cache.max_context} tokens in one"))
    rows.append(("together", f"{gib(plan.weights + load.cache)} of {gib(plan.available)} available"))
    if plan.on_device and plan.hardware.own_memory:
        rows.append(("on the device", f"{gib(plan.hardware.fast)} free"))
    if plan.promised:
        rows.append(("other engines", f"{gib(plan.promised)} are promised to those that run: not counted as available"))
    if nodes := describe_nodes():
        rows.append(("memory nodes", f"{nodes}: weights and conversations lie in turn on them"))
    used = "computes" if plan.on_device else "not used, these kernels compute on the processor"
    rows += [("accelerator", f"{device}: {used}") for device in plan.devices]
    out = [f"{name:26}{text}" for name, text in rows]
    if plan.placement is None:
        out.append(f"{'placement':26}none: {plan.refusal}")
    else:
        out += _placement(plan)
        out += [f"{'':26}not {mode}: {why}" for mode, why in plan.placement.refused.items()]
    if plan.placement and plan.placement.mode == "stream":
        slots = _size(plan.placement.slots * load.expert_bytes)
        out.append(f"{'serve it with':26}--experts-pack DIRECTORY --expert-memory {slots} --kv-memory {_size(load.cache)}")
    missing = would_fit(load, plan.hardware)
    if missing:
        out.append(f"{'all in memory with' if plan.placement else 'would fit with':26}{missing}")
    each = f"{gib(load.read + load.routed)} read at {plan.context} tokens of context"
    if plan.placement is None or plan.profile is None:
        out.append(f"{'a token':26}{each}; its speed is unknown until `moorage engine bench bw` has measured this machine")
    else:
        out.append(f"{'a token':26}{each}; at the measured rates {plan.placement.tokens_per_second:.1f} tok/s alone, at most")
    return out


def _placement(plan: Plan) -> list[str]:
    from engine.experts.layers import spans
    from engine.memory import gib

    found = plan.placement
    if len(found.groups) == 1:
        return [f"{'placement':26}{found.mode}: {found.reason}"]
    named = [f"layers {spans(group.layers)}: {group.mode}: {group.reason}" for group in found.groups]
    out = [f"{'' if i else 'placement':26}{text}" for i, text in enumerate(named)]
    if found.pin_short:
        out.append(f"{'pin budget':26}{gib(plan.hardware.lockable)}, {gib(found.pin_short)} short of all layers alike")
    return out


def _size(size: int) -> str:
    """As options take it, rounded down."""
    return f"{size >> 20}M" if size >= 1 << 24 else str(size)


@bench.command("bw")
def bw(
    kind: Annotated[
        list[str] | None, typer.Option("--format", help="Expert format, e.g. BF16, Q4_0, ds_fp4; repeatable. Default: all.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A large file on the disk that would hold a packed model: its read rate.")
    ] = None,
    kernels: Annotated[str, KERNELS] = "auto",
    threads: Annotated[int, THREADS] = 0,
    profile: Annotated[Path | None, PROFILE] = None,
) -> None:
    """Measure memory, copies and the real expert kernels until they are steady, and keep the figures for `plan` and `serve`.

    Example: moorage bench bw --format Q4_K --file /fast/a3b.pack/experts.bin
    """
    from engine.build import BuildError, choose_kernels
    from engine.experts import calibrate
    from engine.experts.cuda import device_of
    from engine.experts.devicerates import measure_device
    from engine.experts.identity import kernel_version, this_machine
    from engine.plan import default_profile

    try:
        ops = choose_kernels(kernels, threads)
        device = device_of(ops)
        host = ops if device is None else choose_kernels("cpu", threads)  # what the processor would do beside it
    except BuildError as e:
        raise UserError(str(e)) from None
    possible = calibrate.measurable(ops)
    chosen = list(dict.fromkeys(calibrate.kernel_of(name) for name in kind or possible))
    wrong = [name for name in kind or () if calibrate.kernel_of(name) not in possible]
    if wrong:
        names = ", ".join(f"{name}{calibrate.also_called(name)}" for name in possible)
        raise UserError(f"no kernel for {wrong[0]} here; there are {names}")
    if file is not None:  # measured last: found out now, not after a minute
        try:
            calibrate.measurable_disk(file)
        except (OSError, ValueError) as e:
            raise UserError(f"{file} cannot be measured: {e}") from None
    path = profile or default_profile()
    check_writable(path)
    typer.echo("measuring; other work on this machine makes it slower", err=True)
    read = calibrate.measure_read(host)
    _show("memory read", read)
    formats = {}
    for name in chosen:
        formats[name], copies = calibrate.measure_format(host, name)
        _show(f"{name}{calibrate.also_called(name)} experts", formats[name].alone)
        _show(f"{name} beside copies", formats[name].shared)
        _show(f"copies of {name} experts", copies)
    disk = None
    if file is not None:
        try:
            disk = calibrate.measure_disk(file)
        except (OSError, ValueError) as e:
            raise UserError(f"{file} cannot be measured: {e}") from None
        _show("disk", disk)
    here = this_machine(kernel_version(ops))
    there = measure_device(device, ops, device.name, chosen, _show) if device else None
    found = calibrate.Profile(here, read, None, formats, disk, time.time(), there)
    calibrate.save_profile(found, path)
    typer.echo(f"{path}: {', '.join(f'{k} {v}' for k, v in asdict(here).items() if v)}")


def _show(what: str, figure: Figure) -> None:
    settled = f"{figure.cold} cold rounds left out" if figure.steady else "never settled: the machine is busy"
    typer.echo(f"{what:28}{figure.rate / 1e9:8.2f} GB/s  ({settled})")
