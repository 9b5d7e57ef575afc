"""Assembly of the vllm-davinci packages: vLLM's entry points and the environment report."""

from vllm_davinci.meta.errors import MetaError, UnsupportedVersionError
from vllm_davinci.meta.registration import register_components, register_platform

__all__ = ["MetaError", "UnsupportedVersionError", "register_components", "register_platform"]
