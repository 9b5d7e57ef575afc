"""MLA in a model: vLLM's attention block, and the layer that vLLM's runner sees."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    get_and_maybe_dequant_weights,
)
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from vllm_davinci.core.attention.head_sizes import mla_head_sizes, require_mla_decode
from vllm_davinci.core.attention.mla.adapters import StepAdapters, UpProjectionAdapters
from vllm_davinci.core.attention.mla.cache import MLACache
from vllm_davinci.core.attention.mla.context import CONTEXT_CHUNK_ROWS
from vllm_davinci.core.attention.mla.impl import NPUMLAImpl
from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadata
from vllm_davinci.core.attention.mla.preprocess import MLAPreprocess, Preprocessed
from vllm_davinci.core.attention.mla.sizes import check_sizes
from vllm_davinci.core.config.side_streams import attention_scheduler
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.layers.linear import prepare_weight
from vllm_davinci.core.layers.prefetch import WeightPrefetch, prefetch
from vllm_davinci.core.layers.quantized_activation import map_rows


class NPUMLAAttention(nn.Module, AttentionLayerBase):
    """One layer's MLA: its cache, and the two stages `preprocess` and `attend`.

    kv_cache:        None until the runner has allocated it, as in vLLM's profile run.
    weight_prefetch: what the block fetches before its sum over ranks; None without the option.
    All that a step changes is in the step's metadata and in the cache.
    """

    def __init__(
        self,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        modules: MLAModules,
        cache_config: CacheConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        check_sizes(num_heads, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim, prefix)
        self.layer_name = prefix
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.kv_cache: MLACache | None = None
        self.weight_prefetch: WeightPrefetch | None = None
        self._num_loads = 0  # of tensors into kv_b_proj that W_UK and W_UV follow from
        self.kv_cache_dtype = cache_config.cache_dtype if cache_config is not None else "auto"
        self._dtype = dtype = torch.get_default_dtype()  # that of the model while it is built
        vllm_config = get_current_vllm_config()
        most_requests = vllm_config.scheduler_config.max_num_seqs
        require_mla_decode(num_heads, kv_lora_rank, qk_rope_head_dim, dtype, most_requests)
        self._backend = get_attn_backend(
            kv_lora_rank + qk_rope_head_dim,
            dtype,
            self.kv_cache_dtype,
            use_mla=True,
            num_heads=num_heads,
        )
        self.impl: Any = NPUMLAImpl(
            num_heads,
            scale,
            qk_nope_head_dim,
            v_head_dim,
            modules.kv_a_layernorm,
            modules.kv_b_proj,
            mla_head_sizes(num_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, dtype),
        )
        self.preprocess = MLAPreprocess(
            self.impl, modules, q_lora_rank, qk_rope_head_dim, attention_scheduler(vllm_config)
        )
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"Two layers are named {prefix}.")
        layers[prefix] = self

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM calls it when those of all other layers are processed."""
        weight = get_and_maybe_dequant_weights(self.impl.kv_b_proj, out_dtype=act_dtype)
        self.impl.absorb_up_projection(weight.detach().as_subclass(torch.Tensor))
        self._num_loads = self._loads_of_up_projection()
        self.preprocess.process_weights_after_loading()

    def follow_weights(self) -> None:
        """Takes W_UK and W_UV again where kv_b_proj has been loaded since, by whomever."""
        if self._loads_of_up_projection() != self._num_loads:
            self.process_weights_after_loading(self._dtype)

    def _loads_of_up_projection(self) -> int:
        return getattr(self.impl.kv_b_proj, "num_loads", 0)

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
        """Metadata of the running step; None in a profile run and in an idle step."""
        metadata = get_forward_context().attn_metadata
        return metadata[self.layer_name] if isinstance(metadata, dict) else metadata

    @property
    def bound_cache(self) -> MLACache:
        """The cache, in a step that has attention metadata."""
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


class NPUMultiHeadLatentAttentionWrapper(MultiHeadLatentAttentionWrapper):
    """The attention block of vLLM's DeepSeek models: NPUMLAAttention and the output projection."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        mla_modules: MLAModules,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        skip_topk: bool = False,
        non_causal_multi_token_decode: bool = False,
        allow_short_prefill_indexer_scoring_skip: bool = False,
        fuse_qkv_rmsnorm: bool = False,  # a choice of launches, which are chosen here
    ) -> None:
        # vLLM's own constructor would make its attention layer, for other devices.
        nn.Module.__init__(self)
        rotary_emb = mla_modules.rotary_emb
        refused = {
            "sparse attention (index_topk)": mla_modules.is_sparse,
            "a gate on the attention's output (g_proj)": mla_modules.g_proj is not None,
            "non-causal decodes of several tokens": non_causal_multi_token_decode,
            "no rotary embedding": rotary_emb is None,
            "rotary embedding of halves (is_neox_style)": getattr(
                rotary_emb, "is_neox_style", False
            ),
        }
        if named := [what for what, is_asked in refused.items() if is_asked]:
            raise UnsupportedFeatureError(
                f"{prefix} needs {', '.join(named)}, which {RELEASE} cannot compute "
                "in MLA. Choose another model."
            )
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.prefix = prefix
        self.fused_qkv_a_proj = mla_modules.fused_qkv_a_proj
        if self.fused_qkv_a_proj is not None:
            prepare_weight(self.fused_qkv_a_proj)
        self.kv_a_proj_with_mqa = mla_modules.kv_a_proj_with_mqa
        self.q_a_layernorm = mla_modules.q_a_layernorm
        self.q_b_proj = mla_modules.q_b_proj
        self.q_proj = mla_modules.q_proj
        self.kv_a_layernorm = mla_modules.kv_a_layernorm
        self.kv_b_proj = mla_modules.kv_b_proj
        self.rotary_emb = rotary_emb
        self.o_proj = mla_modules.o_proj
        self.mla_attn = NPUMLAAttention(
            num_heads,
            scale,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            q_lora_rank,
            kv_lora_rank,
            mla_modules,
            cache_config,
            prefix=f"{prefix}.attn",
        )

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """positions: [num_tokens], int64; hidden_states: [num_tokens, hidden_size], also returned.

        Rows after the step's real tokens are padding. Runs on the current stream.
        """
        if llama_4_scaling is not None:
            raise UnsupportedFeatureError(
                f"{self.prefix} scales its queries by position (llama_4_scaling), which "
                f"{RELEASE} cannot compute. Choose another model."
            )
        metadata = self.mla_attn.step_metadata
        preprocess = self.mla_attn.preprocess
        if metadata is None:
            return self._without_batch(hidden_states, preprocess.project)
        num_tokens = metadata.num_actual_tokens
        tokens = _without_padding(hidden_states, num_tokens)
        cache = self.mla_attn.bound_cache
        stage = preprocess(positions[:num_tokens], tokens, cache, metadata)
        return self._output(stage, metadata, hidden_states.shape[0])

    def compress(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Both down-projections, W_DQ and W_DKV, which every rank has whole.

        hidden_states: [num_tokens, hidden_size]
        Returns [num_tokens, q_lora_rank + kv_lora_rank + qk_rope_head_dim].
        """
        return self.mla_attn.preprocess.compress(hidden_states)

    def forward_compressed(self, positions: torch.Tensor, compressed: torch.Tensor) -> torch.Tensor:
        """`forward` of hidden states that `compress` has reduced already, on any rank.

        positions: [num_tokens], int64; compressed: [num_tokens, q_lora_rank + kv_lora_rank +
        qk_rope_head_dim]. Returns [num_tokens, hidden_size].
        """
        metadata = self.mla_attn.step_metadata
        preprocess = self.mla_attn.preprocess
        if metadata is None:
            return self._without_batch(compressed, preprocess.decompress)
        num_tokens = metadata.num_actual_tokens
        q, kv = preprocess.decompress(compressed[:num_tokens])
        stage = preprocess.after_projections(
            positions[:num_tokens], q, kv, self.mla_attn.bound_cache, metadata
        )
        return self._output(stage, metadata, compressed.shape[0])

    def take_adapters(self, step: StepAdapters, up_projection: UpProjectionAdapters | None) -> None:
        """Computes with this block's projections from now on, which wrappers have replaced.

        step:          which adapters rows have
        up_projection: deltas of kv_b_proj, which no stage calls as a layer; None where it has none
        """
        preprocess = self.mla_attn.preprocess
        names = ("fused_qkv_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "q_proj")
        wrapped = {name: getattr(self, name) for name in names}
        preprocess.modules = replace(preprocess.modules, **wrapped)
        preprocess.adapters = step
        self.mla_attn.impl.adapters = up_projection

    def _output(self, stage: Preprocessed, metadata: NPUMLAMetadata, num_rows: int) -> torch.Tensor:
        """Attention and output projection of `num_rows` rows, the last of which may be padding."""
        out = self.mla_attn.attend(stage, metadata)
        ahead = self.mla_attn.weight_prefetch
        if ahead is not None:
            ahead.begin()
        elif self.mla_attn.preprocess.scheduler_of(metadata) is not None:
            prefetch(self.o_proj.weight)
        if num_padding := num_rows - metadata.num_actual_tokens:
            out = torch.cat([out, out.new_zeros(num_padding, out.shape[1])])
        return self.o_proj(out)[0]

    def _without_batch(
        self, rows: torch.Tensor, project: Callable[[torch.Tensor], Any]
    ) -> torch.Tensor:
        """The layer's output of a profile run or an idle step, which have no cache.

        rows:    what `project` takes, [num_tokens, ...]
        project: the stage before attention
        """
        num_tokens = rows.shape[0]
        # Not rows.new_zeros: the rows may be a QuantizedActivation.
        dtype, device = rows.dtype, rows.device
        if self.mla_attn.kv_cache is None:
            # vLLM measures how much memory a step takes: as much as the largest prefill needs.
            project(rows)
            elements = 2 * (self.qk_head_dim + self.v_head_dim) * self.num_heads
            num_rows = max(num_tokens, CONTEXT_CHUNK_ROWS)
            torch.empty(num_rows, elements, dtype=dtype, device=device)
        out_size = self.num_heads * self.v_head_dim
        return self.o_proj(torch.zeros(num_tokens, out_size, dtype=dtype, device=device))[0]


def _without_padding(rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return rows if rows.shape[0] == num_tokens else map_rows(rows, lambda each: each[:num_tokens])
