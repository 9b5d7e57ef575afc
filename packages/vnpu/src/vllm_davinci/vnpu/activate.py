"""Puts vnpu's libraries in place of CANN's, for this process and its children."""

import ctypes
import os
import pathlib
import sys
from collections.abc import MutableMapping

from vllm_davinci.vnpu import _C
from vllm_davinci.vnpu import environment_variables as env
from vllm_davinci.vnpu.config import VirtualDeviceConfig
from vllm_davinci.vnpu.errors import ActivationError

# In the order of their dependencies. libopapi.so is loaded at the device's first use: it needs
# libtorch_cpu.so, which torch loads.
_PRELOADED = (
    "libvnpu.so",
    "libmsprofiler.so",
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libhccl.so",
    "libmspti.so",
    "libascend_hal.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)

_active = False


def library_directory() -> pathlib.Path:
    """The directory of vnpu's shared libraries under CANN's names, with links resolved."""
    return (pathlib.Path(_C.__file__).parent / "cann" / "lib64").resolve()


def is_active() -> bool:
    """True if vnpu supplies this process's CANN libraries."""
    # Two processes may name one environment by different paths, one through a link.
    return _active or any(map(_is_own, _search_path(os.environ)))


def can_fork() -> bool:
    """True if a child forked from this process could use the devices like a new process.

    False once this process has opened them, and if races are detected or a trace is written: a
    forked child ends without its report.
    """
    return _C.can_fork()


def computes() -> bool:
    """True if operators compute; otherwise all values that the host reads are zero."""
    return _C.computes()


def limit_host_waits(seconds: float) -> None:
    """Sets VNPU_WAIT_LIMIT, if it is not set, for processes that open their devices later."""
    os.environ.setdefault(env.VNPU_WAIT_LIMIT, str(seconds))


def find_real_cann(environment: MutableMapping[str, str]) -> pathlib.Path | None:
    """The directory of the real libascendcl.so that this environment would load, or None."""
    home = environment.get(env.ASCEND_HOME_PATH)
    candidates = [pathlib.Path(home) / "lib64"] if home else []
    candidates += [pathlib.Path(entry) for entry in _search_path(environment)]
    for directory in candidates:
        if (directory / "libascendcl.so").exists() and not _is_own(directory):
            return directory
    return None


def prepare_environment(
    environment: MutableMapping[str, str],
    config: VirtualDeviceConfig | None = None,
    *,
    takeover: bool = False,
) -> None:
    """Changes `environment` so that processes started in it use virtual NPUs.

    Raises ActivationError if it would hide a real CANN and `takeover` is false.
    """
    real = find_real_cann(environment)
    if real is not None and not takeover:
        raise ActivationError(
            f"A real CANN is present ({real}): vnpu does not hide it by itself. Start the "
            "command without `vnpu run` to use the NPU, or use `vnpu run --takeover` "
            "(activate(takeover=True)) for virtual devices."
        )
    path = [entry for entry in _search_path(environment) if not _is_own(entry)]
    environment[env.LD_LIBRARY_PATH] = os.pathsep.join([str(library_directory()), *path])
    # Without these, torch_npu prints a warning to stdout, into the program's output.
    home = library_directory().parent
    environment[env.ASCEND_HOME_PATH] = str(home)
    environment[env.ASCEND_OPP_PATH] = str(home / "opp")
    # torch_npu.profiler looks for `msprof` there, which needs the interpreter that has vnpu.
    tools = str(home / "tools" / "profiler" / "bin")
    commands = environment.get(env.PATH, os.defpath).split(os.pathsep)
    environment[env.PATH] = os.pathsep.join([tools, *(c for c in commands if c != tools)])
    environment[env.VNPU_PYTHON] = sys.executable
    environment[env.VNPU_ACTIVE] = "1"
    environment.setdefault(env.TASK_QUEUE_ENABLE, "0")
    environment.setdefault(env.OMP_WAIT_POLICY, "passive")
    environment.setdefault(env.TORCH_NPU_WARNING_DISABLE, "1")
    environment.update((config or VirtualDeviceConfig()).environment())
    plan = environment.get(env.VNPU_FAULTS)
    if plan and _C.fault_plan_reaches_host(plan):
        environment[env.LD_PRELOAD] = _with_host_faults(environment.get(env.LD_PRELOAD, ""))


def activate(config: VirtualDeviceConfig | None = None, *, takeover: bool = False) -> None:
    """Makes this process, and the processes it starts, use virtual NPUs.

    Call it before `import torch` (which loads torch_npu). Calling it again changes nothing. Raises
    ActivationError when torch_npu is loaded already, or a real CANN is present and `takeover` is
    false.
    """
    global _active
    if is_active():
        _active = True
        return
    if "torch_npu" in sys.modules:
        raise ActivationError(
            "torch_npu is loaded already: call vllm_davinci.vnpu.activate() before `import torch`, "
            "or start the program with `vnpu run -- COMMAND`."
        )
    prepare_environment(os.environ, config, takeover=takeover)
    for name in _PRELOADED:
        # A library that is loaded under its SONAME satisfies every later request for that name.
        ctypes.CDLL(str(library_directory() / name), mode=ctypes.RTLD_GLOBAL)
    _active = True


def _with_host_faults(preloaded: str) -> str:
    """Adds the library of host faults to a value of LD_PRELOAD, which is split at spaces or
    colons.
    """
    own = str(library_directory() / "libvnpu_host_faults.so")
    others = [each for each in preloaded.replace(":", " ").split() if each != own]
    return ":".join([own, *others])


def _is_own(directory: str | pathlib.Path) -> bool:
    return pathlib.Path(directory).resolve() == library_directory()


def _search_path(environment: MutableMapping[str, str]) -> list[str]:
    return [e for e in environment.get(env.LD_LIBRARY_PATH, "").split(os.pathsep) if e]
