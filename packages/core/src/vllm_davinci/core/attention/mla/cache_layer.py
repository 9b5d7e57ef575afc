"""The layer that vLLM's runner sees: it names the backend and holds the latent cache."""

from typing import Any

import torch
from torch import nn
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    get_and_maybe_dequant_weights,
)
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from vllm_davinci.core.attention.mla.attention import LatentAttention
from vllm_davinci.core.attention.mla.cache import LatentCache
from vllm_davinci.core.attention.mla.sizes import check_sizes


class NPUMLAAttention(nn.Module, AttentionLayerBase):
    """One layer's MLA and its cache.

    kv_cache: None until the runner has allocated it, as in vLLM's profile run.
    """

    def __init__(
        self,
        num_heads: int,
        scale: float,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        kv_a_layernorm: nn.Module,
        kv_b_proj: nn.Module,
        cache_config: CacheConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        check_sizes(num_heads, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim, prefix)
        self.layer_name = prefix
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.kv_cache: LatentCache | None = None
        self.kv_cache_dtype = cache_config.cache_dtype if cache_config is not None else "auto"
        self._backend = get_attn_backend(
            kv_lora_rank + qk_rope_head_dim,
            torch.get_default_dtype(),
            self.kv_cache_dtype,
            use_mla=True,
            num_heads=num_heads,
        )
        self.impl: Any = LatentAttention(
            num_heads, scale, qk_nope_head_dim, v_head_dim, kv_a_layernorm, kv_b_proj
        )
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"Two layers are named {prefix}.")
        layers[prefix] = self

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        weight = get_and_maybe_dequant_weights(self.impl.kv_b_proj, out_dtype=act_dtype)
        self.impl.prepare(weight.detach().as_subclass(torch.Tensor))

    @property
    def bound_cache(self) -> LatentCache:
        """The cache, in a step that has attention metadata."""
        assert self.kv_cache is not None, f"The runner has bound no cache to {self.layer_name}."
        return self.kv_cache

    def bind_kv_cache(self, kv_cache: LatentCache) -> None:
        self.kv_cache = kv_cache

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.kv_lora_rank + self.qk_rope_head_dim,
            dtype=kv_cache_dtype_str_to_dtype(self.kv_cache_dtype, vllm_config.model_config),
            cache_dtype_str=self.kv_cache_dtype,
        )
