"""Checks that the dynamic loader finds CANN, and explains what to do if it does not."""

import ctypes
import os
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from vllm_davinci.meta.errors import DeviceLibraryError, MetaError, UnsupportedVersionError
from vllm_davinci.meta.supported_versions import TORCH, TORCH_NPU, installed_version, problem_with

# The runtime: every other CANN library, and torch_npu itself, needs it.
RUNTIME_LIBRARY = "libascendcl.so"
VNPU = "vllm-davinci-vnpu"


def loader_error(library: str = RUNTIME_LIBRARY) -> str | None:
    """Loads a shared library by name. Returns the loader's message on failure, else None.

    torch_npu loads the same library a moment later, so this has no further effect.
    """
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return None


# Set to 0: torch without its device, as its documentation says.
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def require() -> bool:
    """Raises or prints an explanation if torch_npu cannot be imported here.

    Scripts and servers end with the explanation as their last output, because torch would replace
    any exception by its advice to switch the device off. An interactive session gets the exception.

    Returns False if torch runs without its device and the importer only asks whether torch_npu is
    installed, as transformers does at import without catching exceptions.
    """
    problems = [problem for problem in map(problem_with, (TORCH_NPU, TORCH)) if problem]
    error: MetaError
    if problems:
        error = UnsupportedVersionError("\n".join(problems))
    elif (message := loader_error()) is not None:
        error = DeviceLibraryError(explanation(message))
    else:
        return True
    if os.environ.get(AUTOLOAD) == "0" and _is_question():
        return False
    if _is_interactive():
        raise error
    raise SystemExit(f"vllm-davinci: {error}")


def absent(name: str) -> NoReturn:
    """Raises DeviceLibraryError for any attribute: this torch_npu was imported without its code
    being run.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    raise DeviceLibraryError(explanation(loader_error() or ""))


def _is_question() -> bool:
    """True if torch_npu is imported only to ask whether it is available
    (`is_torch_npu_available`).
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith("<frozen importlib")
        or frame.f_globals.get("__name__") in (__name__, "vllm_davinci_import_hooks")
    ):
        frame = frame.f_back
    return frame.f_code.co_name.endswith("_available")


def explanation(message: str) -> str:
    """Explains a runtime library that does not load. message: the loader's"""
    command = _command()
    if not message.startswith(RUNTIME_LIBRARY):
        return (
            f"CANN's {RUNTIME_LIBRARY} was found and does not load: {message}.\n"
            "Its driver is incomplete or not on the loader path. Check that `npu-smi info` works, "
            "and that\nset_env.sh of the CANN installation and of the driver are both sourced."
        )
    install = "" if installed_version(VNPU) else f" (pip install {VNPU})"
    return (
        f"torch_npu cannot start because CANN's {RUNTIME_LIBRARY} is not on the loader path "
        f"({message}).\n"
        "With an NPU:    source /usr/local/Ascend/ascend-toolkit/set_env.sh "
        "(where CANN is installed), then run it again.\n"
        f"Without an NPU: vnpu run -- {command}{install}.\n"
        f"Without a device, for plain torch: {AUTOLOAD}=0 {command}\n"
        "What is missing here: vllm-davinci doctor"
    )


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


def _command() -> str:
    """The running command, as the user would type it."""
    arguments = sys.orig_argv
    script = Path(arguments[1]) if len(arguments) > 1 else None
    if script and script.parent == Path(sys.executable).parent and os.access(script, os.X_OK):
        words = [script.name, *arguments[2:]]
    else:
        words = ["python", *arguments[1:]]
    command = shlex.join(words)
    return command if len(command) <= 80 and "\n" not in command else "COMMAND"
