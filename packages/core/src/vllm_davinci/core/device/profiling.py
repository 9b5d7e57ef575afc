"""Activities that torch's profiler can record here."""

import ctypes

from vllm_davinci.core import components
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

# CANN's library through which torch_npu's profiler gets a device's activities.
DEVICE_LIBRARY = "libmspti.so"


def profiler_activities() -> list[str]:
    """Names of vLLM's TorchProfilerWrapper for its activities: the host's, and the device's.

    Without CANN's library the host's alone; the log says how to see the device's then.
    """
    try:
        ctypes.CDLL(DEVICE_LIBRARY)
    except OSError:
        instead = (
            "start the command with `vnpu run --trace FILE --` for those of the virtual NPU"
            if components.active_device() is not None
            else "it comes with CANN's toolkit"
        )
        logger.warning(
            "The profiler records the host's activities alone: %s is not on the loader path; %s.",
            DEVICE_LIBRARY,
            instead,
        )
        return ["CPU"]
    return ["CPU", "PrivateUse1"]
