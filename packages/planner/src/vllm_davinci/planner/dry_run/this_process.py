"""This process as one rank of a modelled machine, whose engine runs in it."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from vllm_davinci.meta import core_access
from vllm_davinci.planner.dry_run.layout import MOST_DEVICES

if TYPE_CHECKING:
    from vllm_davinci.vnpu.timing import Machine


def become_rank(
    options: argparse.Namespace,
    timeline: str | None = None,
    variants: bool = False,
    mechanisms: bool = False,
) -> Machine:
    """Activates virtual devices of the machine that the options name. Raises VirtualDeviceError.

    timeline: directory that processes write theirs to, or None
    variants: whether steps are modelled on machines with other assumed figures, too
    mechanisms: whether they are without each of the model's mechanisms, too
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
    # Where the virtual NPU is active already, its settings are still read: no device is open.
    os.environ.update(virtual.environment())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    activate(virtual)
    core_access.prepare()
    return machine
