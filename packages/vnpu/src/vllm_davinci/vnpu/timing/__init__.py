"""The modelled clock: machines from files, and reports of a process's devices.

Everything here is modelled. Nothing was measured on an NPU.
"""

from vllm_davinci.vnpu.timing.figures import Assumption
from vllm_davinci.vnpu.timing.machine import Machine, chip_names, load_machine, topology_names
from vllm_davinci.vnpu.timing.report import (
    Report,
    is_modelled,
    pass_host_step,
    place_group,
    read_report,
    restart_timeline,
    set_routed_share,
    write_timeline,
)
from vllm_davinci.vnpu.timing.variants import read_variants, variants_of

__all__ = [
    "Assumption",
    "Machine",
    "Report",
    "chip_names",
    "is_modelled",
    "load_machine",
    "pass_host_step",
    "place_group",
    "read_report",
    "read_variants",
    "restart_timeline",
    "set_routed_share",
    "topology_names",
    "variants_of",
    "write_timeline",
]
