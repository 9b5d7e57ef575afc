"""The modelled clock: machines as files, and what a process's devices did on it.

Everything here is modelled. Nothing was measured on an NPU.
"""

from vllm_davinci.vnpu.timing.machine import (
    Assumption,
    Machine,
    chip_names,
    load_machine,
    topology_names,
)
from vllm_davinci.vnpu.timing.report import (
    Report,
    is_modelled,
    place_group,
    read_report,
    restart_timeline,
    set_routed_share,
    write_timeline,
)

__all__ = [
    "Assumption",
    "Machine",
    "Report",
    "chip_names",
    "is_modelled",
    "load_machine",
    "place_group",
    "read_report",
    "restart_timeline",
    "set_routed_share",
    "topology_names",
    "write_timeline",
]
