"""Activities that torch's profiler can record here."""

import ctypes
from collections.abc import Sequence

from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

# CANN's library through which torch_npu's profiler gets a device's activities.
DEVICE_LIBRARY = "libmspti.so"


def profiler_activities(asked: Sequence[str] | None) -> list[str]:
    """Names of vLLM's TorchProfilerWrapper for its activities: those asked for, else all there are.

    These are the host's and the device's; without CANN's library the host's alone, and the log says
    so.
    """
    if asked:
        return list(asked)
    try:
        ctypes.CDLL(DEVICE_LIBRARY)
    except OSError:
        logger.warning(
            "The profiler records the host's activities alone: %s is not on the loader path. It "
            "comes with CANN's toolkit.",
            DEVICE_LIBRARY,
        )
        return ["CPU"]
    return ["CPU", "PrivateUse1"]
