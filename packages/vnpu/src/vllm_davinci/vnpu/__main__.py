"""The command `vnpu`."""

import argparse
import os
import pathlib
import sys
import tempfile
from typing import Any

from vllm_davinci.vnpu import _C, coverage, host_counts, refusals, timeline, triton_check
from vllm_davinci.vnpu import environment_variables as env
from vllm_davinci.vnpu.activate import prepare_environment
from vllm_davinci.vnpu.config import VirtualDeviceConfig
from vllm_davinci.vnpu.errors import VirtualDeviceError
from vllm_davinci.vnpu.supervised_command import run_to_end, run_traced
from vllm_davinci.vnpu.timing import chip_names, modelled_timeline, picture, topology_names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vnpu", description="Virtual Ascend NPUs.")
    commands = parser.add_subparsers(dest="command", required=True)

    _add_run(commands.add_parser("run", help="start a command on virtual NPUs"))

    trace = commands.add_parser("trace", help="work with traces of several processes")
    trace_commands = trace.add_subparsers(dest="trace_command", required=True)
    merge = trace_commands.add_parser("merge", help="merge them into one file")
    merge.add_argument("sources", nargs="+", type=pathlib.Path, metavar="FILE|DIRECTORY")
    merge.add_argument("--output", "-o", type=pathlib.Path, required=True, metavar="FILE")

    refused = commands.add_parser("refusals", help="print what `vnpu run --refusals` recorded")
    refused.add_argument("directory", type=pathlib.Path)

    checked = commands.add_parser(
        "triton-check", help="list what a chip's compiler refuses in a program's Triton kernels"
    )
    checked.add_argument(
        "--adapter",
        type=pathlib.Path,
        metavar="FILE",
        help="triton-adapter-opt of a wheel of triton-ascend (default: the one on the path)",
    )
    checked.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")

    drawing = commands.add_parser("picture", help="draw modelled timelines below each other")
    drawing.add_argument("sources", nargs="+", type=pathlib.Path, metavar="TIMELINE")
    drawing.add_argument(
        "--output", "-o", type=pathlib.Path, required=True, metavar="FILE.png|FILE.svg"
    )
    drawing.add_argument(
        "--begin",
        type=float,
        default=0.0,
        metavar="MS",
        help="begin of each panel after the first task (default: 0)",
    )
    drawing.add_argument("--length", type=float, metavar="MS", help="length (default: the longest)")

    commands.add_parser("machines", help="list the chips and topologies of the timing model")
    commands.add_parser("devices", help="list the virtual devices of this environment")

    cover = commands.add_parser("coverage", help="compare torch_npu's operators with vnpu's")
    cover.add_argument("names", nargs="*", help="explain these operators only")
    cover.add_argument("--missing", action="store_true", help="list every missing operator")
    cover.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    for flag, (text, more) in RUN_OPTIONS.items():
        run.add_argument(flag, help=text, **more)
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


_IS_SET: dict[str, Any] = {"action": "store_true"}
_FILE: dict[str, Any] = {"type": pathlib.Path, "metavar": "FILE"}
# Options of `vnpu run`: their help, and more for `add_argument`.
RUN_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "--devices": ("number of devices (default 8)", {"type": int}),
    "--soc": ("SoC name (default Ascend910B3), reference or reference:NAME", {}),
    "--cann": ("CANN release: 8.3, 8.5 or 9.0 (default 8.5)", {}),
    "--memory": ("memory of each device (default 64GiB)", {}),
    "--schedule": ("eager, threads or fuzz:SEED (default eager)", {}),
    "--no-compute": ("operators do no arithmetic", _IS_SET),
    "--wait-limit": ("maximum wait for the device, in seconds", {"type": float}),
    "--races": ("race detector: off, report or raise (default off)", {}),
    "--trace": ("write a trace of all tasks by stream, for https://ui.perfetto.dev", _FILE),
    "--count": (
        "print each process's numbers of launches, waits for a device and copies from it",
        _IS_SET,
    ),
    "--refusals": (
        "count calls checked against CANN's documents and record the refused ones",
        _FILE | {"metavar": "DIRECTORY"},
    ),
    "--chip": (
        "model the tasks' times on this chip (`vnpu machines` lists chips)",
        {"metavar": "NAME|FILE"},
    ),
    "--topology": ("the links between chips (default node-of-8)", {"metavar": "NAME|FILE"}),
    "--timeline": ("with --chip: write the modelled timeline, for https://ui.perfetto.dev", _FILE),
    "--paced": (
        "with --chip: waits take SCALE host seconds per modelled second",
        {"type": float, "metavar": "SCALE"},
    ),
    "--faults": (
        "inject faults, as in 'rank=1;alloc@17=oom'; count:DIRECTORY counts the points for them",
        {"metavar": "PLAN|@FILE"},
    ),
    "--triton": ("run Triton kernels on the devices", _IS_SET),
    "--triton-limits": (
        "like --triton, and refuse kernels that a chip's compiler is known to refuse",
        _IS_SET,
    ),
    "--takeover": ("hide a real CANN", _IS_SET),
}
# Options of `vnpu run` that are fields of VirtualDeviceConfig.
OF_DEVICE = (
    *("devices", "soc", "cann", "memory", "schedule", "wait_limit", "races", "refusals", "chip"),
    *("topology", "paced", "faults"),
)


def _run(options: argparse.Namespace) -> int:
    command = _command(options)
    config = VirtualDeviceConfig(
        **{name: getattr(options, name) for name in OF_DEVICE},
        compute=False if options.no_compute else None,
        triton=options.triton or options.triton_limits,
        triton_limits=options.triton_limits,
    )
    if options.faults is not None:
        _C.check_fault_plan(options.faults)
    if options.refusals is not None:
        options.refusals.mkdir(parents=True, exist_ok=True)
    if options.timeline is not None and options.trace is not None:
        print("vnpu run: --trace and --timeline exclude each other: use two runs.", file=sys.stderr)
        return 2
    if options.timeline is not None and options.chip is None:
        print(
            "vnpu run: --timeline is modelled and needs --chip; --trace records this host's time.",
            file=sys.stderr,
        )
        return 2
    prepare_environment(os.environ, config, takeover=options.takeover)
    try:
        if options.count:
            with tempfile.TemporaryDirectory(prefix="vnpu-counts-") as directory:
                status = _run_command(command, options, {env.VNPU_COUNTS: directory})
                host_counts.report(pathlib.Path(directory))
                return status
        if options.trace is not None or options.timeline is not None:
            return _run_command(command, options, {})
        os.execvp(command[0], command)
    except FileNotFoundError:
        return _not_started(options, command, "no such command", 127)
    except PermissionError:
        return _not_started(options, command, "not executable", 126)


def _command(options: argparse.Namespace) -> list[str]:
    """The command to start. Raises SystemExit(2) if there is none."""
    command: list[str] = options.arguments
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        name = f"vnpu {options.command}"
        print(f"{name}: name a command, as in `{name} -- python script.py`.", file=sys.stderr)
        raise SystemExit(2)
    return command


def _not_started(options: argparse.Namespace, command: list[str], why: str, status: int) -> int:
    print(f"vnpu {options.command}: {why}: {command[0]}", file=sys.stderr)
    return status


def _triton_check(options: argparse.Namespace) -> int:
    command = _command(options)
    if options.adapter is not None and not os.access(options.adapter, os.X_OK):
        print(f"vnpu triton-check: --adapter {options.adapter} is no program.", file=sys.stderr)
        return 2
    prepare_environment(os.environ, VirtualDeviceConfig(triton=True))
    try:
        return triton_check.check(command, options.adapter)
    except FileNotFoundError:
        return _not_started(options, command, "no such command", 127)
    except PermissionError:
        return _not_started(options, command, "not executable", 126)


def _run_command(command: list[str], options: argparse.Namespace, variables: dict[str, str]) -> int:
    if options.trace is not None:
        return run_traced(command, options.trace, variables, env.VNPU_TRACE, timeline.merge)
    if options.timeline is not None:
        merge = modelled_timeline.merge
        return run_traced(command, options.timeline, variables, env.VNPU_TIMELINE, merge)
    return run_to_end(command, variables)


def _merge(sources: list[pathlib.Path], destination: pathlib.Path) -> int:
    count = timeline.merge(sources, destination)
    print(f"{destination}: {count} tasks. https://ui.perfetto.dev shows it.")
    return 0


def _machines() -> int:
    print("chips:     ", ", ".join(chip_names()))
    print("topologies:", ", ".join(topology_names()))
    return 0


def _devices() -> int:
    count = _C.device_count()
    for device in range(count):
        print(f"{device}  {_C.soc_name()}  {_C.memory_bytes() / 2**30:g} GiB  virtual")
    return 0 if count else 1


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "run":
            return _run(options)
        if options.command == "triton-check":
            return _triton_check(options)
        if options.command == "trace":
            return _merge(options.sources, options.output)
        if options.command == "refusals":
            return refusals.report(options.directory)
        if options.command == "picture":
            picture.draw(options.sources, options.output, options.begin, options.length)
            return 0
        if options.command == "machines":
            return _machines()
        if options.command == "devices":
            return _devices()
        return coverage.report(options.names, missing=options.missing, as_json=options.json)
    except (VirtualDeviceError, RuntimeError) as error:
        print(f"vnpu: {str(error).removeprefix('vnpu: ')}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
