"""Reports whether a model can run here, and if not, what to do.

This module does not import torch, because that import may end the process if CANN is not on the
loader path. `device_probe` tries everything in a separate process.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from rich.console import Console

from vllm_davinci.meta import device_library, supported_versions
from vllm_davinci.meta.device_probe import REQUIRED_LIBRARIES
from vllm_davinci.meta.machine import machine_checks
from vllm_davinci.meta.registration import PLATFORM_CLASS
from vllm_davinci.meta.report import Check, Report, Status
from vllm_davinci.meta.report_table import print_report

# Importing torch and vLLM takes about 15 s on two busy cores; a device that needs longer than this
# limit counts as dead.
PROBE_LIMIT_S = 120.0
DISTRIBUTION = "vllm-davinci"
# Without an x86-64 processor, no requirement of vLLM installs Triton.
INSTALL_TRITON = "pip install 'triton>=3.6,<3.10'"
# Package -> the role that it provides to core, and what happens without it.
OPTIONAL_COMPONENTS = {
    "vllm-davinci-kernels": ("vllm_davinci.op_providers", "torch_npu's operators are used"),
    "vllm-davinci-models": (
        "vllm_davinci.model_providers",
        "vLLM's own model definitions are used",
    ),
    "vllm-davinci-multistream": ("vllm_davinci.stream_schedulers", "everything runs on one stream"),
}
CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
CANN_DIRECTORIES = (
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/cann",
    "~/Ascend/ascend-toolkit/latest",
)
# Entry-point groups that vLLM reads -> the effect if ours is missing. The third only adds overlap
# decisions to the metrics.
PLUGIN_GROUPS = {
    "vllm.platform_plugins": Status.PROBLEM,
    "vllm.general_plugins": Status.PROBLEM,
    "vllm.stat_logger_plugins": Status.NOTE,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the report. Exit status 0 only if a model could run."""
    report = run_checks()
    if options.json:
        print(report.to_json())
    else:
        print_report(report, Console())
    return 0 if report.can_run else 1


def run_checks() -> Report:
    """Checks packages, libraries, device and entry points, in the order of their dependencies."""
    checks = [*machine_checks(), *_packages(), *_components(), *_entry_points(), *_installations()]
    libraries = _probe("libraries")
    checks += _libraries(libraries)
    if all("path" in found for found in libraries.answers.get("libraries", {"": {}}).values()):
        checks += _device(_probe("device", "platform"))
    return Report(checks)


def _packages() -> Iterator[Check]:
    area = "packages"
    python = ".".join(map(str, sys.version_info[:3]))
    problem = supported_versions.problem_with_python()
    yield Check(area, "python", _status(problem), python, problem or "")
    for requirement in supported_versions.REQUIREMENTS:
        problem = supported_versions.problem_with(requirement)
        seen = supported_versions.installed_version(requirement.distribution) or "not installed"
        yield Check(area, requirement.distribution, _status(problem), seen, problem or "")


def _components() -> Iterator[Check]:
    """Checks that our other packages are installed in the pinned version and found by core."""
    area = "components"
    required = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    pins = {pin.name: pin for pin in required if pin.name.startswith(DISTRIBUTION)}
    for distribution, pin in pins.items():
        seen = supported_versions.installed_version(distribution)
        is_right = seen is not None and pin.specifier.contains(seen, prereleases=True)
        if is_right and distribution not in OPTIONAL_COMPONENTS:
            yield Check(area, distribution, Status.OK, str(seen))
        elif not is_right and (
            seen or (not pin.marker and distribution not in OPTIONAL_COMPONENTS)
        ):
            remedy = f'pip install "{distribution}{pin.specifier}"'
            yield Check(area, distribution, Status.PROBLEM, seen or "not installed", remedy)
    for distribution, (group, without) in OPTIONAL_COMPONENTS.items():
        seen = supported_versions.installed_version(distribution)
        providers = sorted(entry.name for entry in importlib.metadata.entry_points(group=group))
        if providers:
            shown = f"{seen or 'another package'} ({', '.join(providers)})"
            yield Check(area, distribution, Status.OK, shown)
            continue
        reason = f"without it {without}"
        if seen is None:
            remedy = f"optional: pip install {distribution}; {reason}"
        else:
            remedy = f"names no provider: pip install --force-reinstall {distribution}; {reason}"
        yield Check(area, distribution, Status.NOTE, seen or "not installed", remedy)


def _entry_points() -> Iterator[Check]:
    area = "vLLM plugins"
    for group, without_ours in PLUGIN_GROUPS.items():
        found = {
            entry.name: entry.value
            for entry in importlib.metadata.entry_points(group=group)
            if entry.dist is None or entry.dist.name != "vllm"
        }
        ours = found.pop("davinci", None)
        if ours is None:
            remedy = f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
            yield Check(area, group, without_ours, "no entry `davinci`", remedy)
        else:
            yield Check(area, group, Status.OK, f"davinci = {ours}")
        for name, value in sorted(found.items()):
            remedy = (
                f"vLLM takes one platform: uninstall the package of `{name}` if it claims too"
                if group == "vllm.platform_plugins"
                else ""
            )
            yield Check(area, group, Status.NOTE, f"{name} = {value}", remedy)
    if (chosen := os.environ.get("VLLM_PLUGINS")) is not None:
        names = chosen.split(",")
        status = Status.OK if "davinci" in names else Status.PROBLEM
        remedy = (
            ""
            if status is Status.OK
            else f"export VLLM_PLUGINS={chosen + ',' if chosen else ''}davinci"
        )
        yield Check(area, "VLLM_PLUGINS", status, chosen or "(empty)", remedy)


def _installations() -> Iterator[Check]:
    """Lists the CANN installations and the virtual NPU of this machine, active or not."""
    area = "device"
    cann = _cann_directories()
    chips = sorted(Path("/dev").glob("davinci[0-9]*"))
    vnpu_version = supported_versions.installed_version(f"{DISTRIBUTION}-vnpu")
    yield Check(area, "chips in /dev", Status.NOTE if not chips else Status.OK, str(len(chips)))
    yield Check(
        area, "CANN", Status.OK if cann else Status.NOTE, ", ".join(map(str, cann)) or "not found"
    )
    if vnpu_version is None:
        remedy = "" if cann else f"no NPU here? pip install {DISTRIBUTION}-vnpu"
        yield Check(area, "virtual NPU", Status.NOTE, "not installed", remedy)
    else:
        active = os.environ.get("VNPU_ACTIVE") == "1"
        state = "active" if active else "installed, not active"
        remedy = "" if active or cann else "start commands with: vnpu run -- COMMAND"
        yield Check(area, "virtual NPU", Status.OK, f"{vnpu_version}, {state}", remedy)
    if cann and vnpu_version is not None:
        wins = "the virtual NPU" if os.environ.get("VNPU_ACTIVE") == "1" else "CANN"
        yield Check(
            area,
            "both present",
            Status.NOTE,
            f"{wins} wins in this process",
            "the paths under `libraries` are what the loader takes",
        )


def _libraries(probe: _Probe) -> Iterator[Check]:
    area = "libraries"
    if (found := probe.answers.get("libraries")) is None:
        yield Check(area, "dynamic loader", Status.PROBLEM, "failed", probe.failure)
        return
    virtual = _vnpu_library_directory()
    for library in REQUIRED_LIBRARIES:
        where = found[library]
        if "path" in where:
            path = Path(where["path"])
            origin = "vnpu" if virtual and path.is_relative_to(virtual) else "CANN"
            yield Check(area, library, Status.OK, f"{origin}: {path}")
        else:
            is_missing = where["error"].startswith(library)
            seen = "not on the loader path" if is_missing else where["error"]
            yield Check(area, library, Status.PROBLEM, seen, _library_remedy())


def _device(probe: _Probe) -> Iterator[Check]:
    area = "run"
    if (device := probe.answers.get("device")) is None:
        yield Check(area, "one operator", Status.PROBLEM, "failed", probe.failure)
        return
    gib = device["total_bytes"] / 2**30
    yield Check(
        area,
        "device",
        Status.OK if device["devices"] else Status.PROBLEM,
        f"{device['devices']} x {device['name']}, {gib:.0f} GiB",
    )
    yield Check(
        area,
        "one operator",
        Status.OK if device["equal"] else Status.PROBLEM,
        "equal to the CPU's result" if device["equal"] else "differs from the CPU's result",
        "" if device["equal"] else "the device computes wrong values: do not use it",
    )
    platform = probe.answers.get("platform")
    if platform is None:
        yield Check(area, "vLLM's platform", Status.PROBLEM, "failed", probe.failure)
    elif platform["class"] != PLATFORM_CLASS:
        yield Check(
            area,
            "vLLM's platform",
            Status.PROBLEM,
            platform["class"],
            "vLLM chose another platform; see `vLLM plugins` above and VLLM_TARGET_DEVICE",
        )
    else:
        yield Check(area, "vLLM's platform", Status.OK, platform["class"])
        active = ", ".join(platform["triton_backends"]) or "none"
        yield Check(
            area,
            "Triton, active backends",
            Status.OK if platform["triton"] else Status.PROBLEM,
            active,
            "" if platform["triton"] else _triton_remedy(platform["triton_backends"]),
        )


def _triton_remedy(active: list[str]) -> str:
    """Advice if the number of active backends is not one."""
    if len(active) > 1:
        return "vLLM's model runner needs exactly one: remove the other packages"
    return f"vLLM's model runner needs Triton: {INSTALL_TRITON}"


@dataclass(frozen=True)
class _Probe:
    """The output of `device_probe`, and how it ended."""

    answers: dict[str, Any]
    failure: str


def _probe(*stages: str) -> _Probe:
    command = [sys.executable, "-m", "vllm_davinci.meta.device_probe", *stages]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False
        )
        output, status, errors = done.stdout, done.returncode, done.stderr
    except subprocess.TimeoutExpired as expired:
        partial = expired.stdout or b""
        output = partial.decode() if isinstance(partial, bytes) else partial
        status, errors = -1, f"no answer within {PROBE_LIMIT_S:.0f} s"
    answers: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith('{"'):
            answers.update(json.loads(line))
    return _Probe(answers, "" if status == 0 else _last_words(errors, status))


def _last_words(errors: str, status: int) -> str:
    """Returns the message at the end of a traceback, or a program's last explanation."""
    words: list[str] = []
    for line in reversed(errors.rstrip().splitlines()):
        if line.startswith((" ", "Traceback")) or len(words) == 8:
            break
        words.insert(0, line)
    return "\n".join(words) or f"the probe ended with status {status} and no message"


def _cann_directories() -> list[Path]:
    """Directories of real CANN installations, from the environment and the usual places."""
    named = [os.environ[name] for name in CANN_VARIABLES if os.environ.get(name)]
    virtual = _vnpu_library_directory()
    found: list[Path] = []
    for candidate in (*named, *CANN_DIRECTORIES):
        directory = Path(candidate).expanduser().resolve()
        library = directory / "lib64" / device_library.RUNTIME_LIBRARY
        if not library.exists() or directory in found:
            continue
        if virtual and library.resolve().is_relative_to(virtual):
            continue
        found.append(directory)
    return found


def _vnpu_library_directory() -> Path | None:
    """Directory of the virtual NPU's libraries; None when it is not installed."""
    if supported_versions.installed_version(f"{DISTRIBUTION}-vnpu") is None:
        return None
    return Path(import_module("vllm_davinci.vnpu").library_directory()).resolve()


def _library_remedy() -> str:
    if cann := _cann_directories():
        return f"source {cann[0]}/set_env.sh (or its parent's), then run the command again"
    if supported_versions.installed_version(f"{DISTRIBUTION}-vnpu") is not None:
        return "vnpu run -- vllm-davinci doctor"
    return (
        "install CANN and source its set_env.sh, or: pip install vllm-davinci-vnpu and start "
        "commands with `vnpu run --`"
    )


def _status(problem: str | None) -> Status:
    return Status.OK if problem is None else Status.PROBLEM
