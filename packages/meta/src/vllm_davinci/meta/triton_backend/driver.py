"""Decides whether the backend is active, and answers what Triton asks before it compiles."""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from vllm_davinci.meta import device_library

NAME = "npu"
ARCHITECTURE = "none"  # differs from that of vnpu's own backend


def another_is_active() -> bool:
    """True if another backend, such as a Triton for Ascend, drives this process's device."""
    from triton.backends import backends  # later, because it imports this module

    return any(
        backend.driver is not NPUDriver and backend.driver.is_active()
        for name, backend in backends.items()
        if name != "cpu"  # active on every machine
    )


class NPUDriver(DriverBase):  # type: ignore[misc]
    """Names the device without device access: vLLM asks at import, before it forks."""

    @staticmethod
    def is_active() -> bool:
        return device_library.loader_error() is None and not another_is_active()

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("The backend for NPUs makes no launchers.")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(NAME, ARCHITECTURE, 1)

    def get_current_device(self) -> int:
        import torch  # later: loads torch_npu, which Triton does not need

        return int(torch.accelerator.current_device_index())

    def set_current_device(self, device: int) -> None:
        import torch

        torch.accelerator.set_device_index(device)

    def get_current_stream(self, device: int) -> int:
        return 0  # only a launch would use it

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device(NAME, self.get_current_device())

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("The backend for NPUs has no kernels to measure.")
