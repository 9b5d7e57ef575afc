"""Tells Triton about virtual NPUs, and launches compiled kernels on their streams."""

import os
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from vllm_davinci.vnpu.environment_variables import VNPU_ACTIVE, VNPU_TRITON
from vllm_davinci.vnpu.triton_backend import chip_limits

NAME = "npu"  # also the name of torch's device module: vLLM's delta rules look it up by this name
ARCHITECTURE = "vnpu"
MAX_THREADS = 1 << 20  # no limit on num_warps: programs run in one thread


def flattened(arguments: tuple[Any, ...]) -> Iterator[Any]:
    """Arguments in the order of the kernel's parameters; tuples become their elements."""
    for each in arguments:
        if isinstance(each, tuple):
            yield from flattened(each)
        else:
            yield each


def is_passed(signature: Any) -> Any:
    """True if a parameter of this type reaches the lowered kernel; for a tuple, a tuple of
    answers.
    """
    if isinstance(signature, tuple):
        return tuple(map(is_passed, signature))
    return signature != "constexpr"


class Launcher:
    """Launches one compiled kernel; Triton creates it at the first launch."""

    def __init__(self, src: Any, metadata: Any) -> None:
        from vllm_davinci.vnpu import _C

        types = list(src.signature.values())
        if any(isinstance(each, str) and each.startswith("tensordesc") for each in types):
            raise NotImplementedError(
                f"Triton kernel {metadata.name}: tensor descriptors made on the host cannot be "
                "passed to virtual NPUs. Pass pointer, shape and strides, and call "
                "tl.make_tensor_descriptor in the kernel."
            )
        self.has_tuples = any(isinstance(each, tuple) for each in types)
        self.passed = list(flattened(tuple(map(is_passed, types))))
        self.places = [place for place, passed in enumerate(self.passed) if passed]
        self.launch = _C.launch_triton_kernel
        self.name = metadata.name

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        function: int,
        packed_metadata: Any,
        launch_metadata: Any,
        enter_hook: Callable[[Any], None] | None,
        exit_hook: Callable[[Any], None] | None,
        *arguments: Any,
    ) -> None:
        """Raises RuntimeError naming kernel, program and source line if the kernel fails."""
        chip_limits.check_grid(self.name, (grid_x, grid_y, grid_z))
        if enter_hook is not None:
            enter_hook(launch_metadata)
        given = tuple(flattened(arguments)) if self.has_tuples else arguments
        passed = [given[place] for place in self.places]
        self.launch(function, stream, grid_x, grid_y, grid_z, passed)
        if exit_hook is not None:
            exit_hook(launch_metadata)


def load_binary(
    name: str, kernel: bytes, shared: int, device: int
) -> tuple[int, int, int, int, int]:
    """Loads a kernel once per process; returns module, function, registers, spills, threads."""
    from vllm_davinci.vnpu import _C

    function = _C.load_triton_kernel(kernel)
    return function, function, 0, 0, MAX_THREADS


def device_properties(device: int) -> dict[str, int]:
    """Properties by Triton's and Triton-Ascend's names; shared memory is no limit."""
    import torch_npu

    cores = torch_npu.npu.get_device_properties(device)
    return {
        "max_shared_mem": 1 << 62,
        "num_aicore": cores.cube_core_num,
        "num_vectorcore": cores.vector_core_num,
    }


class FirstConfiguration:
    """Triton's interface to benchmark a kernel: reports the same time for every call.

    Times of a virtual NPU do not compare tilings of a chip, so autotuning takes the first.
    """

    def __init__(self) -> None:
        self.told = False

    def __call__(self, kernel_call: Callable[[], None], **options: Any) -> list[float]:
        if not self.told:
            print("vnpu: autotuned Triton kernels use their first configuration.", flush=True)
            self.told = True
        return [1.0] * len(options.get("quantiles") or (0.5,))


class VirtualDriver(DriverBase):  # type: ignore[misc]
    """Active with VNPU_TRITON=1. Opens no device before a launch: processes may still fork."""

    def __init__(self) -> None:
        super().__init__()
        self.launcher_cls = Launcher
        self.utils = SimpleNamespace(
            load_binary=load_binary,
            unload_module=lambda module: None,  # programs are never unloaded
            get_device_properties=device_properties,
        )
        self.benchmarker = FirstConfiguration()

    @staticmethod
    def is_active() -> bool:
        return os.environ.get(VNPU_TRITON) == "1" and os.environ.get(VNPU_ACTIVE) == "1"

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("vnpu executes kernels without C++ launchers.")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(NAME, ARCHITECTURE, 1)

    def get_current_device(self) -> int:
        import torch

        return int(torch.accelerator.current_device_index())

    def set_current_device(self, device: int) -> None:
        import torch

        torch.accelerator.set_device_index(device)

    def get_current_stream(self, device: int) -> int:
        import torch_npu

        return int(torch_npu._C._npu_getCurrentRawStream(device))

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device(NAME, self.get_current_device())

    def get_device_interface(self) -> Any:
        import torch

        return torch.get_device_module(NAME)

    def get_benchmarker(self) -> Any:
        return self.benchmarker

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1, device=NAME)

    def clear_cache(self, cache: Any) -> None:
        """Does nothing: there is no cache to empty."""


class AscendExtensionFinder(MetaPathFinder):
    """Finds Triton-Ascend's operations in `cann`, where Triton-Ascend is not installed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "triton.language.extra.cann":
            return None
        folder = Path(__file__).parent / "cann"
        return spec_from_file_location(
            fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


if VirtualDriver.is_active():
    sys.meta_path.append(AscendExtensionFinder())
