"""The functions that vLLM calls: cheap, repeatable, without device access."""

from vllm_davinci.meta import device_library
from vllm_davinci.meta.errors import UnsupportedVersionError
from vllm_davinci.meta.supported_versions import check_supported_versions

PLATFORM_CLASS = "vllm_davinci.core.platform.NPUPlatform"


def register_platform() -> str | None:
    """Returns the platform class's name, or None if this process has neither CANN nor vnpu.

    vLLM calls this twice in every process and swallows exceptions. An unsupported version therefore
    ends the process with an explanation; otherwise vLLM would continue on another platform.
    """
    if device_library.loader_error() is not None:
        return None
    try:
        check_supported_versions()
    except UnsupportedVersionError as error:
        raise SystemExit(f"vllm-davinci: {error}") from None
    return PLATFORM_CLASS


def register_components() -> None:
    """Register layers, models and quantization methods; raises UnsupportedVersionError.

    vLLM calls this once in every process, whichever platform won.
    """
    if device_library.loader_error() is not None:
        return
    check_supported_versions()
    from vllm_davinci.core import out_of_tree  # imports vLLM, which is importing its plugins

    out_of_tree.register()
