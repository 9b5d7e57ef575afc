"""Makes core importable for commands that need no device: its libraries, or the virtual NPU's."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from vllm_davinci.meta import device_library, supported_versions
from vllm_davinci.meta.errors import DeviceLibraryError

IMPORTS = (
    "vllm-davinci: vLLM and torch are imported, which takes some 10 s, and up to 2 minutes where "
    "files are read for the first time."
)


def prepare() -> None:
    """Lets core be imported; comes before its first import. Raises DeviceLibraryError.

    torch_npu, which vLLM imports with its platform, needs libraries to load; nothing here starts a
    device. vLLM's start-up messages go, because a command's output may be read by a program. A
    user who waits at a terminal is told why.
    """
    if sys.stderr.isatty():
        print(IMPORTS, file=sys.stderr, flush=True)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    message = device_library.loader_error()
    if message is None:
        return
    if supported_versions.installed_version("vllm-davinci-vnpu") is None:
        raise DeviceLibraryError(device_library.explanation(message))
    import_module("vllm_davinci.vnpu").activate()


def is_virtual() -> bool:
    """Whether core's device is the virtual NPU: active already, or in place of absent libraries."""
    return os.environ.get("VNPU_ACTIVE") == "1" or device_library.loader_error() is not None
