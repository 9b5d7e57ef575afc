"""The number of devices of dry-runs that a fork server starts."""

import subprocess
import sys

import pytest

from vllm_davinci.planner.dry_run.layout import MOST_DEVICES


@pytest.mark.nightly("planning")
def test_dry_runs_see_every_device_although_the_virtual_npu_is_active():
    """The tests run under `vnpu run`, whose processes have 8 devices."""
    code = (
        "import vllm_davinci.planner.dry_run.preload, torch;"
        "print('devices', torch.accelerator.device_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert f"devices {MOST_DEVICES}\n" in done.stdout, done.stderr[-2000:]
