"""Runs small programs in new interpreters, for settings that hold for a whole process."""

import os
import subprocess
import sys
import textwrap

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
