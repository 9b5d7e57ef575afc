"""A pytest plugin that prepares a process for kernels like vllm-ascend's worker.

vllm-ascend's conftest files do this, but are not loaded, because they also import tools of
end-to-end tests. A build of the package would write the kind of chip; here it is an Atlas A2.
"""

import sys
from types import ModuleType

build = ModuleType("vllm_ascend._build_info")
build.__device_type__ = "A2"  # type: ignore[attr-defined]
sys.modules[build.__name__] = build

import triton.experimental.gluon.language  # noqa: E402, F401 - or the package puts an empty one there
from vllm_ascend.ops.triton.triton_utils import init_device_properties_triton  # noqa: E402

init_device_properties_triton()
