"""Runs small programs in new interpreters, for settings that hold for a whole process."""

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci.vnpu import environment_variables as env
from vllm_davinci.vnpu.activate import prepare_environment


def is_of_virtual_devices(variable: str) -> bool:
    """Whether a variable is a setting of this process's own, which programs do not take over."""
    return variable.startswith("VNPU_") and variable != env.VNPU_REFUSALS  # every run counts these


def run_program(
    source: str, config: VirtualDeviceConfig | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python source on virtual devices; stderr and stdout are text. At most 120 s."""
    environment = {
        name: value for name, value in os.environ.items() if not is_of_virtual_devices(name)
    }
    prepare_environment(environment, config)
    environment.update(variables, OMP_NUM_THREADS="1")
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def output_of(
    source: str, config: VirtualDeviceConfig | None = None, **variables: str
) -> list[str]:
    """The lines a program printed; fails with its errors if it failed."""
    done = run_program(source, config, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split("\n")[:-1]


def run_programs_together(
    programs: Sequence[str], variables: Sequence[Mapping[str, str]], limit_s: float
) -> list[tuple[int, str]]:
    """Runs each program in an interpreter of its own, which takes this process's settings over.

    variables: of each program's environment
    Returns their statuses and what they printed, both outputs together. Raises TimeoutError if one
    does not end in time, and kills them.
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
