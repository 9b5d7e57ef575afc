"""Makes this process one rank of a modelled machine."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from vllm_davinci.meta import core_access
from vllm_davinci.planner.devices import MOST_DEVICES

if TYPE_CHECKING:
    from vllm_davinci.vnpu.timing import Machine


def become_rank(
    options: argparse.Namespace,
    timeline: str | None = None,
    variants: bool = False,
    mechanisms: bool = False,
) -> Machine:
    """Activates virtual devices of the options' machine. Raises VirtualDeviceError.

    timeline: directory for the timelines of processes, or None
    variants: also model steps on machines with other assumed figures
    mechanisms: also model steps without each of the model's mechanisms
    """
    from vllm_davinci.vnpu import VirtualDeviceConfig, activate

    virtual = VirtualDeviceConfig(
        devices=MOST_DEVICES,
        compute=False,
        chip=options.chip,
        topology=options.topology,
        timeline=timeline,
        variants=variants,
        mechanisms=mechanisms,
        phantom_ranks=True,
    )
    machine = virtual.machine()
    assert machine is not None
    # Also works if the virtual NPU is active already: settings are read when a device opens.
    os.environ.update(virtual.environment())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    activate(virtual)
    core_access.prepare()
    return machine
