"""A pytest plugin that runs vLLM's tests of Triton kernels, written for CUDA, on the NPU.

torch_npu's `transfer_to_npu` redirects device "cuda" and `torch.cuda` to the NPU. When tests ask
vLLM's platform for CUDA and its capability, to skip themselves or to choose a device, they get an
Ampere GPU's answers (bfloat16, no 8-bit floats); vLLM itself gets the NPU's. A test's outcome names
the kernels that it launched.
"""

import gc
import sys
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.triton_utils  # noqa: F401 - counts Triton's active drivers
from triton import knobs
from triton.runtime import driver
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from vllm_davinci.core.device import torch_cuda_names
from vllm_davinci.core.runner.buffers import leave_out_uva

# like the runner
torch_cuda_names.install()
leave_out_uva()
driver.active.get_current_target()  # before CUDA appears to be available
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch_npu.contrib import transfer_to_npu

warnings.resetwarnings()  # the import shows every warning
for name in ("set_device_index", "current_stream", "synchronize"):
    function = getattr(torch.accelerator, name)
    setattr(torch.accelerator, name, transfer_to_npu._wrapper_cuda(function))
AMPERE = DeviceCapability(8, 0)
torch.cuda.get_device_capability = lambda device=None: (AMPERE.major, AMPERE.minor)
NPU: Any = type(current_platform)
launched: set[str] = set()


class Answers(NPU):
    """The platform's answers to tests."""

    is_cuda = is_cuda_alike = classmethod(lambda cls: True)
    get_device_capability = classmethod(lambda cls, device_id=0: AMPERE)


def _by_caller(name: str, tests: str) -> Callable[..., Any]:
    """Returns the platform's method of this name, with other answers to callers in `tests`."""
    of_platform, of_answers = getattr(NPU, name), getattr(Answers, name)

    def asked(cls: Any, *arguments: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(tests):
            return of_answers(*arguments, **options)
        return getattr(of_platform, "__func__", of_platform)(cls, *arguments, **options)

    return asked


def pytest_configure(config: pytest.Config) -> None:
    tests = str(Path(config.rootpath) / "tests")
    asked = ("get_device_capability", "has_device_capability", "is_device_capability")
    for name in ("is_cuda", "is_cuda_alike", *asked, "is_device_capability_family"):
        setattr(NPU, name, classmethod(_by_caller(name, tests)))
    knobs.runtime.launch_enter_hook.add(lambda launch: launched.add(launch.get()["name"]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    launched.clear()
    try:
        return (yield)
    finally:
        torch.npu.synchronize()  # raises a kernel's error in the test that launched it
        gc.collect()  # frees a failed test's tensors, which a cycle of frames holds
        item.user_properties.append(("launched", ", ".join(sorted(launched))))
