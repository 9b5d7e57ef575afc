"""Selects a model's attention backend: plain, MLA or sparse MLA."""

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_davinci.core.attention.backend import NPUAttentionBackend
from vllm_davinci.core.attention.mla.backend import NPUMLABackend, NPUSparseMLABackend
from vllm_davinci.core.errors import RELEASE, ConfigurationError, UnsupportedFeatureError


def select_backend(
    selected_backend: AttentionBackendEnum | None, attn_selector_config: AttentionSelectorConfig
) -> str:
    """Class path of the backend. Raises if another is requested or none supports the model."""
    backend = NPUAttentionBackend
    if attn_selector_config.use_mla:
        is_sparse = attn_selector_config.use_sparse
        backend = NPUSparseMLABackend if is_sparse else NPUMLABackend
    if selected_backend is not None and selected_backend.name != backend.get_name():
        raise ConfigurationError(
            f"--attention-backend {selected_backend.name} is for another device. Remove it: an NPU"
            " has one attention backend. If you did not give it, vLLM chose it for a model that "
            "is not supported here."
        )
    asked = attn_selector_config._asdict()
    asked.pop("block_size")  # set later, by update_block_size_for_backend
    reasons = backend.validate_configuration(block_size=None, device_capability=None, **asked)
    if reasons:
        raise UnsupportedFeatureError(
            f"This model's attention cannot run in {RELEASE}: {'; '.join(reasons)}. "
            f"Asked for: {attn_selector_config}."
        )
    return f"{backend.__module__}.{backend.__qualname__}"
