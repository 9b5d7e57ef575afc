"""A pytest plugin that prepares a process as vllm-ascend's worker does before it launches kernels.

The conftest files that do so also import tools of end-to-end tests, so they are not loaded. A build
of the package would write the kind of chip; here it is that of an Atlas A2.
"""

import sys
from types import ModuleType

build = ModuleType("vllm_ascend._build_info")
build.__device_type__ = "A2"  # type: ignore[attr-defined]
sys.modules[build.__name__] = build

import triton.experimental.gluon.language  # noqa: E402, F401 - or the package puts an empty one there
from vllm_ascend.ops.triton.triton_utils import init_device_properties_triton  # noqa: E402

init_device_properties_triton()
