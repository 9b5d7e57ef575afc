"""Tries CANN's libraries, one operator and vLLM's platform, one JSON line per stage.

`python -m vllm_davinci.meta.device_probe STAGE` runs as a separate process because a failing stage
may end it; the doctor reads what it has printed.
"""

import ctypes
import json
import sys
from importlib.util import find_spec
from pathlib import Path

from vllm_davinci.meta.device_library import loader_error

# Libraries that torch_npu 2.13.0 loads, by the time of loading.
LIBRARIES_AT_IMPORT = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
LIBRARIES_AT_FIRST_OPERATOR = ("libopapi.so",)
LIBRARIES_AT_GRAPH_CAPTURE = ("libnnopbase.so",)
REQUIRED_LIBRARIES = LIBRARIES_AT_IMPORT + LIBRARIES_AT_FIRST_OPERATOR + LIBRARIES_AT_GRAPH_CAPTURE


def probe_libraries() -> dict[str, dict[str, str]]:
    """Prints for each library where the loader found it (`path`), or why not (`error`).

    libtorch_cpu is loaded first, as when torch_npu loads CANN's operators: the virtual NPU's
    operators call into it.
    """
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        ctypes.CDLL(str(Path(torch.origin).parent / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    found: dict[str, dict[str, str]] = {}
    for library in REQUIRED_LIBRARIES:
        error = loader_error(library)
        found[library] = {"path": _mapped_path(library)} if error is None else {"error": error}
    return found


def probe_device() -> dict[str, object]:
    """Prints number, name and memory of the devices, and whether a small computation is correct."""
    import torch  # the stage is about whether this works
    import torch_npu

    values = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    expected = torch.nn.functional.silu(values) @ values.T
    on_device = values.to("npu")
    computed = (torch.nn.functional.silu(on_device) @ on_device.T).cpu()
    free_bytes, total_bytes = torch_npu.npu.mem_get_info()
    return {
        "torch": torch.__version__,
        "torch_npu": torch_npu.__version__,
        "devices": torch_npu.npu.device_count(),
        "name": torch_npu.npu.get_device_name(0),
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
        "equal": bool(torch.allclose(computed, expected, rtol=1e-3, atol=1e-3)),
    }


def probe_platform() -> dict[str, object]:
    """Prints the platform class that vLLM chose, its device, and whether Triton is usable."""
    from vllm.platforms import current_platform  # the stage is about whether this works
    from vllm.triton_utils import HAS_TRITON

    chosen = type(current_platform)
    return {
        "class": f"{chosen.__module__}.{chosen.__qualname__}",
        "device": current_platform.device_type,
        "triton": bool(HAS_TRITON),
        "triton_backends": active_backends(),
    }


def active_backends() -> list[str]:
    """Names of Triton's backends that drive this device; vLLM requires exactly one."""
    if find_spec("triton") is None:
        return []
    from triton.backends import backends

    return sorted(name for name, backend in backends.items() if backend.driver.is_active())


STAGES = {"libraries": probe_libraries, "device": probe_device, "platform": probe_platform}


def _mapped_path(library: str) -> str:
    """Path of a loaded library in this process's memory map."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5]).name.startswith(library):
            return fields[5]
    return str(getattr(ctypes.CDLL(library), "_name", library))


def main() -> int:
    for stage in sys.argv[1:]:
        print(json.dumps({stage: STAGES[stage]()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
