"""Machines of the timing model, as files.

Everything here is modelled. Nothing was measured on an NPU.
"""

from vllm_davinci.vnpu.timing.machine import (
    Assumption,
    Machine,
    chip_names,
    load_machine,
    topology_names,
)

__all__ = ["Assumption", "Machine", "chip_names", "load_machine", "topology_names"]
