"""Runs small programs in new interpreters, for settings that apply to a whole process."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci.vnpu import environment_variables as env
from vllm_davinci.vnpu.activate import prepare_environment


def is_of_virtual_devices(variable: str) -> bool:
    """True if a variable is a setting of virtual devices, which programs must not inherit."""
    # Every run counts these calls.
    return variable.startswith("VNPU_") and variable != env.VNPU_REFUSALS


def run_to_end(
    command: Sequence[str | Path], limit_s: float = 120.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a command; stderr and stdout are text. options: arguments of `subprocess.run`"""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, check=False, **options
    )


def run_program(
    source: str, config: VirtualDeviceConfig | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python source on virtual devices; stderr and stdout are text. At most 120 s."""
    environment = {
        name: value for name, value in os.environ.items() if not is_of_virtual_devices(name)
    }
    prepare_environment(environment, config)
    environment.update(variables, OMP_NUM_THREADS="1")
    return run_to_end([sys.executable, "-c", textwrap.dedent(source)], env=environment)


def output_of(
    source: str, config: VirtualDeviceConfig | None = None, **variables: str
) -> list[str]:
    """Returns the lines that a program printed; fails with its errors if it failed."""
    done = run_program(source, config, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split("\n")[:-1]


def copied(package: Path, folder: Path) -> Path:
    """Copies a package's sources to `folder`/vllm_davinci/NAME, for `said_in`."""
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(package, folder / "vllm_davinci" / package.name, ignore=ignored)


def insert(path: Path, after: str, text: str) -> None:
    before = path.read_text(encoding="utf-8")
    assert before.count(after) == 1, f"{path.name} has {before.count(after)} lines {after!r}"
    path.write_text(before.replace(after, after + text), encoding="utf-8")


def said_in(folder: Path, source: str, *arguments: str) -> Any:
    """Runs Python source that imports the copies in `folder`; returns its last line, from JSON."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = run_to_end([sys.executable, "-c", source, *arguments], 300, env=environment)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["file"].startswith(str(folder))
    return said


def run_programs_together(
    programs: Sequence[str], variables: Sequence[Mapping[str, str]], limit_s: float
) -> list[tuple[int, str]]:
    """Runs each program in its own interpreter, with this process's settings.

    variables: additional environment variables of each program Returns their statuses and what they
    printed to both outputs. If one does not end in time, kills all and raises TimeoutError.
    """
    processes = []
    with tempfile.TemporaryDirectory() as directory:
        logs = [Path(directory) / str(number) for number in range(len(programs))]
        for program, own, log in zip(programs, variables, logs, strict=True):
            environment = {**os.environ, **own}
            prepare_environment(environment)
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", program],
                        env=environment,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        deadline = time.monotonic() + limit_s
        try:
            statuses = [each.wait(max(0.1, deadline - time.monotonic())) for each in processes]
        except subprocess.TimeoutExpired as error:
            printed = [log.read_text(errors="replace")[-2000:] for log in logs]
            raise TimeoutError(f"programs still ran after {limit_s} s: {printed}") from error
        finally:
            for each in processes:
                each.kill()
                each.wait()
        return [
            (status, log.read_text(errors="replace"))
            for status, log in zip(statuses, logs, strict=True)
        ]
