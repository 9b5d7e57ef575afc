"""The caches whose blocks can be transferred."""

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def require_served_blocks(kv_cache_config: "KVCacheConfig") -> None:
    """Raises UnsupportedFeatureError unless all layers hold a whole context in the same blocks."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        raise UnsupportedFeatureError(
            f"--kv-transfer-config (disaggregated prefill) is not supported in {RELEASE} for a "
            "model whose layers cache different parts of the context. Remove it."
        )
    if groups[0].kv_cache_spec.block_size != BLOCK_SIZE_TOKENS:
        raise UnsupportedFeatureError(
            f"--kv-transfer-config (disaggregated prefill) is not supported in {RELEASE} with "
            f"--block-size {groups[0].kv_cache_spec.block_size}. Use {BLOCK_SIZE_TOKENS}."
        )
