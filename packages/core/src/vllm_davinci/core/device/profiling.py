"""The activities that torch's profiler can record here."""

import ctypes
from collections.abc import Sequence

from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

# CANN's library that gives a device's activities to torch_npu's profiler.
DEVICE_LIBRARY = "libmspti.so"


def profiler_activities(asked: Sequence[str] | None) -> list[str]:
    """Activity names for vLLM's TorchProfilerWrapper: the requested ones, or all available.

    Available are the host's and the device's; without CANN's library only the host's, and the log
    says so.
    """
    if asked:
        return list(asked)
    try:
        ctypes.CDLL(DEVICE_LIBRARY)
    except OSError:
        logger.warning(
            "The profiler records only the host's activities: %s is not on the loader path. It "
            "comes with CANN's toolkit.",
            DEVICE_LIBRARY,
        )
        return ["CPU"]
    return ["CPU", "PrivateUse1"]
