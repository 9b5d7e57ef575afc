"""The device of this process: its properties and its clock."""

import ctypes
import os
from collections.abc import Callable
from typing import Any

MEASURED = "measured on the device"
MODELLED = "modelled by the virtual NPU"
OF_THIS_HOST = "of this host, on which a virtual NPU runs: not a chip's times"


class Device:
    """A device, which this process uses from construction on."""

    def __init__(self, number: int = 0) -> None:
        import torch
        import torch_npu  # noqa: F401  registers torch.npu

        self.torch: Any = torch
        self.torch.npu.set_device(number)

    @property
    def is_virtual(self) -> bool:
        return os.environ.get("VNPU_ACTIVE") == "1"

    @property
    def clock(self) -> str:
        """Describes this process's times: measured, modelled, or the host's."""
        if not self.is_virtual:
            return MEASURED
        return MODELLED if os.environ.get("VNPU_TIMING") else OF_THIS_HOST

    @property
    def has_times(self) -> bool:
        return self.clock != OF_THIS_HOST

    @property
    def soc(self) -> str:
        return str(self.torch.npu.get_device_name(0))

    @property
    def generation(self) -> str:
        """ "A2" or "A3", as documents of operators name chips; "" for others."""
        if self.soc.startswith("Ascend910B"):
            return "A2"
        return "A3" if self.soc.startswith(("Ascend910_93", "Ascend910C")) else ""

    def cann_release(self) -> str:
        """CANN's release, such as "8.5", from torch_npu; "" if it finds none.

        A virtual NPU follows the documents of the release that VNPU_CANN names.
        """
        if self.is_virtual:
            return os.environ.get("VNPU_CANN", "8.5")
        from torch_npu.npu.utils import get_cann_version

        version = str(get_cann_version(module="CANN"))
        return ".".join(version.split(".")[:2]) if version[:1].isdigit() else ""

    def facts(self) -> dict[str, Any]:
        """Facts that are equal on identical devices."""
        properties = self.torch.npu.get_device_properties(0)
        _, total_bytes = self.torch.npu.mem_get_info()
        return {
            "SoC": self.soc,
            "CANN": self.cann_release(),
            "devices": self.torch.npu.device_count(),
            "memory bytes": total_bytes,
            "cube cores": getattr(properties, "cube_core_num", None),
            "vector cores": getattr(properties, "vector_core_num", None),
            "L2 bytes": getattr(properties, "L2_cache_size", None),
        }

    def count_streams(self, most: int) -> tuple[int, str]:
        """Creates streams until the runtime refuses one; returns their number and the refusal's
        message.
        """
        runtime = ctypes.CDLL("libascendcl.so")
        message = runtime.aclGetRecentErrMsg
        message.restype = ctypes.c_char_p
        streams: list[ctypes.c_void_p] = []
        said = ""
        while len(streams) < most:
            stream = ctypes.c_void_p()
            if (status := runtime.aclrtCreateStream(ctypes.byref(stream))) != 0:
                said = f"status {status}: {(message() or b'').decode(errors='replace').strip()}"
                break
            streams.append(stream)
        for stream in streams:
            runtime.aclrtDestroyStream(stream)
        return len(streams), said

    def seconds_of(self, work: Callable[[], object], repetitions: int = 1) -> float:
        """Seconds on the device's clock from idle to the end of the last repetition."""
        events = [self.torch.npu.Event(enable_timing=True) for _ in range(2)]
        self.torch.npu.synchronize()
        events[0].record()
        for _ in range(repetitions):
            work()
        events[1].record()
        self.torch.npu.synchronize()
        return float(events[0].elapsed_time(events[1])) / 1e3 / repetitions
