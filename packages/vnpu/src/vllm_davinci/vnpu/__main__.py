"""The command `vnpu`."""

import argparse
import os
import sys

from vllm_davinci.vnpu import _C, coverage
from vllm_davinci.vnpu.activate import prepare_environment
from vllm_davinci.vnpu.config import VirtualDeviceConfig
from vllm_davinci.vnpu.errors import VirtualDeviceError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vnpu", description="Virtual Ascend NPUs.")
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="start a command on virtual NPUs")
    run.add_argument("--devices", type=int, help="number of devices (default 8)")
    run.add_argument("--soc", help="SoC name (default Ascend910B3)")
    run.add_argument("--memory", help="memory of each device (default 64GiB)")
    run.add_argument("--schedule", help="eager, threads or fuzz:SEED (default eager)")
    run.add_argument("--no-compute", action="store_true", help="operators do no arithmetic")
    run.add_argument("--wait-limit", type=float, help="longest wait for the device, seconds")
    run.add_argument("--takeover", action="store_true", help="hide a real CANN")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")

    commands.add_parser("devices", help="the virtual devices of this environment")

    cover = commands.add_parser("coverage", help="operators asked for and present")
    cover.add_argument("names", nargs="*", help="explain these operators only")
    cover.add_argument("--missing", action="store_true", help="list every missing operator")
    cover.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def _run(options: argparse.Namespace) -> int:
    command = options.arguments
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        print("vnpu run: name a command, as in `vnpu run -- python script.py`.", file=sys.stderr)
        return 2
    config = VirtualDeviceConfig(
        devices=options.devices,
        soc=options.soc,
        memory=options.memory,
        schedule=options.schedule,
        compute=False if options.no_compute else None,
        wait_limit=options.wait_limit,
    )
    prepare_environment(os.environ, config, takeover=options.takeover)
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        print(f"vnpu run: no such command: {command[0]}", file=sys.stderr)
        return 127
    except PermissionError:
        print(f"vnpu run: not executable: {command[0]}", file=sys.stderr)
        return 126


def _devices() -> int:
    count = _C.device_count()
    for device in range(count):
        print(f"{device}  {_C.soc_name()}  {_C.memory_bytes() / 2**30:g} GiB  virtual")
    return 0 if count else 1


def main() -> int:
    """Entry point of the command; returns its exit status."""
    options = _parser().parse_args()
    try:
        if options.command == "run":
            return _run(options)
        if options.command == "devices":
            return _devices()
        return coverage.report(options.names, missing=options.missing, as_json=options.json)
    except (VirtualDeviceError, RuntimeError) as error:
        print(f"vnpu: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
