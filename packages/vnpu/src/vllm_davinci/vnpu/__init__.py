"""A virtual Ascend NPU: CANN's shared libraries for machines without an NPU."""

from vllm_davinci.vnpu.activate import (
    activate,
    can_fork,
    computes,
    is_active,
    library_directory,
    limit_host_waits,
)
from vllm_davinci.vnpu.config import VirtualDeviceConfig
from vllm_davinci.vnpu.errors import ActivationError, TraceError, VirtualDeviceError
from vllm_davinci.vnpu.host_counts import HostCounts, counted
from vllm_davinci.vnpu.timeline import is_traced, label_launches, name_stream

# Version of the role `vllm_davinci.devices` that this module implements (core.components).
api_version = 1

__all__ = [
    "ActivationError",
    "HostCounts",
    "TraceError",
    "VirtualDeviceConfig",
    "VirtualDeviceError",
    "activate",
    "api_version",
    "can_fork",
    "computes",
    "counted",
    "is_active",
    "is_traced",
    "label_launches",
    "library_directory",
    "limit_host_waits",
    "name_stream",
]
