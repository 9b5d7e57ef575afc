"""A virtual Ascend NPU: CANN's shared libraries for machines without an NPU."""

from vllm_davinci.vnpu.activate import activate, is_active, library_directory
from vllm_davinci.vnpu.config import VirtualDeviceConfig
from vllm_davinci.vnpu.errors import ActivationError, VirtualDeviceError

__all__ = [
    "ActivationError",
    "VirtualDeviceConfig",
    "VirtualDeviceError",
    "activate",
    "is_active",
    "library_directory",
]
