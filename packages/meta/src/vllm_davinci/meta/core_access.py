"""Makes core importable for commands without a device, by CANN's libraries or the virtual NPU's."""

import os
import sys
from importlib import import_module

from vllm_davinci.meta import device_library, supported_versions
from vllm_davinci.meta.errors import DeviceLibraryError

IMPORTS = (
    "vllm-davinci: importing vLLM and torch takes about 10 s, up to 2 minutes if files are read "
    "for the first time."
)


def prepare() -> None:
    """Prepares the import of core; call it before the first one. Raises DeviceLibraryError.

    torch_npu, which vLLM imports with its platform, needs libraries to load; no device is started.
    vLLM's start-up messages are silenced, because programs may read a command's output. On a
    terminal a line announces the import.
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
    """True if core's device is the virtual NPU: already active, or because CANN is missing."""
    return os.environ.get("VNPU_ACTIVE") == "1" or device_library.loader_error() is not None
