"""Stream names and launch labels in the device's trace, if it writes one."""

from collections.abc import Callable

import torch_npu

from vllm_davinci.core import components


def name_streams() -> None:
    """Names the current stream and the stream scheduler's streams. Call it in each worker."""
    device = components.traced_device()
    if device is None:
        return
    device.name_stream(torch_npu.npu.current_stream().npu_stream, "compute")
    scheduler = components.stream_scheduler()
    if scheduler is not None:
        scheduler.name_streams(device.name_stream)


def launch_label() -> Callable[[str], None] | None:
    """A function that labels all later launches; None if no trace is written."""
    device = components.traced_device()
    return None if device is None else device.label_launches
