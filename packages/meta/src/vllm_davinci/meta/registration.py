"""The functions vLLM calls. They are cheap, may be called any number of times, touch no device."""

from __future__ import annotations

# False at run time and true for type checkers: this module is imported at interpreter start-up.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from vllm_davinci.meta.errors import MetaError

PLATFORM_CLASS = "vllm_davinci.core.platform.NPUPlatform"


def register_platform() -> str | None:
    """Name of the platform class, or None when this process has neither CANN nor vnpu.

    vLLM calls this twice in every process and swallows exceptions; a version that cannot work
    therefore ends the process with the explanation instead of continuing on another platform.
    """
    from vllm_davinci.meta import device_library  # not at the top: start-up must not pay for it
    from vllm_davinci.meta.supported_versions import check_supported_versions

    if device_library.loader_error() is not None:
        return None
    from vllm_davinci.meta.errors import UnsupportedVersionError

    try:
        check_supported_versions()
    except UnsupportedVersionError as error:
        _leave(error)
    return PLATFORM_CLASS


def register_components() -> None:
    """Register layers, models and quantization methods; raises UnsupportedVersionError.

    vLLM calls this once in every process, whichever platform won.
    """
    from vllm_davinci.meta import device_library

    if device_library.loader_error() is not None:
        return
    from vllm_davinci.meta.supported_versions import check_supported_versions

    check_supported_versions()
    from vllm_davinci.core import registration  # imports vLLM, which is importing its plugins

    registration.register()


def _leave(error: MetaError) -> None:
    raise SystemExit(f"vllm-davinci: {error}")
