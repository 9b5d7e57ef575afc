"""MLA as vLLM's runner sees it: one attention layer."""

from typing import Any

import torch
from torch import nn
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mla import MLAModules
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    get_and_maybe_dequant_weights,
)
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from vllm_davinci.core.attention.head_sizes import mla_decode_heads, mla_head_sizes
from vllm_davinci.core.attention.mla.cache import MLACache
from vllm_davinci.core.attention.mla.context import CONTEXT_CHUNK_ROWS
from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadata
from vllm_davinci.core.attention.mla.preprocess import MLAPreprocess, Preprocessed
from vllm_davinci.core.attention.mla.sizes import check_sizes
from vllm_davinci.core.config.side_streams import ATTENTION, side_stream
from vllm_davinci.core.layers.prefetch import WeightPrefetch


class NPUMLAAttention(nn.Module, AttentionLayerBase):
    """One layer's MLA: its cache and the stages `preprocess` and `attend`.

    kv_cache:        None until the runner has allocated it, as in vLLM's profile run.
    weight_prefetch: weights to fetch before the block's all-reduce; None without the option.
    index_head_size: size of the indexer's cached keys; 0 without an indexer.
    Steps change only their metadata and the cache.
    """

    is_sparse = False
    index_head_size = 0

    def __init__(
        self,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        *,
        modules: MLAModules,
        cache_config: CacheConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        check_sizes(kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim, prefix)
        self.layer_name = prefix
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.kv_cache: MLACache | None = None
        self.weight_prefetch: WeightPrefetch | None = None
        self._num_loads = (
            0  # version counter of kv_b_proj's tensors when W_UK and W_UV were derived
        )
        self.kv_cache_dtype = cache_config.cache_dtype if cache_config is not None else "auto"
        self._dtype = dtype = torch.get_default_dtype()  # dtype of the model while it is built
        vllm_config = get_current_vllm_config()
        nope_and_value = qk_nope_head_dim, v_head_dim
        sizes = self._sizes_for_operators(num_heads, *nope_and_value, vllm_config)
        self._backend = get_attn_backend(
            kv_lora_rank + qk_rope_head_dim,
            dtype,
            self.kv_cache_dtype,
            use_mla=True,
            use_sparse=self.is_sparse,
            num_heads=num_heads,
        )
        self.impl: Any = self._backend.get_impl_cls()(
            num_heads,
            scale,
            qk_nope_head_dim,
            v_head_dim,
            modules.kv_a_layernorm,
            modules.kv_b_proj,
            *sizes,
        )
        self.preprocess = MLAPreprocess(
            self.impl,
            modules,
            q_lora_rank,
            qk_rope_head_dim,
            side_stream(vllm_config, ATTENTION),
        )
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"Two layers are named {prefix}.")
        layers[prefix] = self

    def _sizes_for_operators(
        self, num_heads: int, nope: int, value: int, vllm_config: VllmConfig
    ) -> tuple[int, tuple[int, int]]:
        """Raises UnsupportedFeatureError for sizes that the attention operators do not support.

        Returns the number of heads to call decodes with, and the head sizes of the part without
        position and of the values to call prefills with.
        """
        requests = vllm_config.scheduler_config.max_num_seqs
        rank, rope, dtype = self.kv_lora_rank, self.qk_rope_head_dim, self._dtype
        divided_among = vllm_config.parallel_config.decode_context_parallel_size
        heads = mla_decode_heads(num_heads * divided_among, rank, rope, dtype, requests)
        return heads, mla_head_sizes(num_heads, nope, rope, value, dtype)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Derives W_UK and W_UV. vLLM calls it after all other layers have been processed."""
        weight = get_and_maybe_dequant_weights(self.impl.kv_b_proj, out_dtype=act_dtype)
        self.impl.absorb_up_projection(weight.detach().as_subclass(torch.Tensor))
        self._num_loads = self._loads_of_up_projection()
        self.preprocess.process_weights_after_loading()

    def follow_weights(self) -> None:
        """Derives W_UK and W_UV again if kv_b_proj has been loaded since."""
        if self._loads_of_up_projection() != self._num_loads:
            self.process_weights_after_loading(self._dtype)

    def _loads_of_up_projection(self) -> int:
        return getattr(self.impl.kv_b_proj, "num_loads", 0)

    def project(self, hidden_states: torch.Tensor) -> None:
        """Computes all products of a step that has no cache."""
        self.preprocess.project(hidden_states)

    def elements_of_step(self, num_tokens: int) -> int:
        """Most elements, in the cache's dtype, of a step's tensors, except the results of
        `project`."""
        impl = self.impl
        size = impl.qk_nope_head_dim + self.qk_rope_head_dim + impl.v_head_dim
        return max(num_tokens, CONTEXT_CHUNK_ROWS) * impl.num_heads * 2 * size

    def attend(self, stage: Preprocessed, metadata: NPUMLAMetadata) -> torch.Tensor:
        """Attention of all tokens. Returns [num_actual_tokens, num_heads * v_head_dim]."""
        impl, cache = self.impl, self.bound_cache
        parts = []
        num_decode_tokens = metadata.num_decode_tokens
        if metadata.decode is not None:
            q_pe = stage.q_pe[:num_decode_tokens]
            host_lengths = metadata.host_lengths
            parts.append(impl.decode(stage.ql_nope, q_pe, cache, metadata.decode, host_lengths))
        if metadata.prefill is not None:
            q_pe = stage.q_pe[num_decode_tokens:]
            parts.append(
                impl.prefill(
                    stage.q_nope, q_pe, stage.kv_c_normed, stage.k_pe, cache, metadata.prefill
                )
            )
        out: torch.Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if impl.value_bias is None else out.add_(impl.value_bias)

    @property
    def step_metadata(self) -> NPUMLAMetadata | None:
        """Metadata of the running step; None in profile runs and idle steps."""
        metadata = get_forward_context().attn_metadata
        return metadata[self.layer_name] if isinstance(metadata, dict) else metadata

    @property
    def bound_cache(self) -> MLACache:
        """The cache; call it only in a step with attention metadata."""
        assert self.kv_cache is not None, f"The runner has bound no cache to {self.layer_name}."
        return self.kv_cache

    def bind_kv_cache(self, kv_cache: MLACache) -> None:
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
