"""Runs small programs in new interpreters, for settings that hold for a whole process."""

import os
import subprocess
import sys
import textwrap

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci.vnpu import environment_variables as env
from vllm_davinci.vnpu.activate import prepare_environment


def run_program(
    source: str, config: VirtualDeviceConfig | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python source on virtual devices; stderr and stdout are text. At most 120 s."""
    kept = {env.VNPU_REFUSALS}  # every run of tests counts these
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("VNPU_") or name in kept
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
