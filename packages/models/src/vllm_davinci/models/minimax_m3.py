"""MiniMax-M3: attention to blocks that an index chooses, and experts with clipped SwiGLU-OAI.

vLLM's definitions use kernels of CUDA and ROCm. The tower for images is vLLM's own.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMulWithClamp
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, GateLinear
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    MinimaxM3QKVParallelLinearWithIndexer,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsEagle3, SupportsPP
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    extract_layer_index,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from vllm_davinci.core.attention.block_sparse.choice import BlockRule
from vllm_davinci.core.attention.block_sparse.layer import BlockSparseAttention
from vllm_davinci.models.mapped_weights import expert_mapping, load_mapped


@dataclass(frozen=True)
class LayerKinds:
    """Differences among layers, from a released configuration or one with transformers' names.

    blocks:      rule for choosing blocks
    is_sparse:   per layer, True if it chooses blocks
    has_experts: per layer, True if it has experts, False if it has a dense MLP
    """

    blocks: BlockRule
    is_sparse: list[bool]
    has_experts: list[bool]
    swiglu: dict[str, float]

    @classmethod
    def of(cls, config: Any) -> "LayerKinds":
        swiglu = {
            "swiglu_limit": config.swiglu_limit,
            "alpha": config.swiglu_alpha,
            "beta": getattr(config, "swiglu_beta", 1.0),
        }
        if (given := getattr(config, "sparse_attention_config", None)) is None:
            return cls(
                BlockRule.of_model(
                    config.index_block_size,
                    config.index_topk_blocks,
                    config.index_local_blocks,
                    config.index_head_dim,
                ),
                [kind == "minimax_m3_sparse" for kind in config.layer_types],
                [kind == "sparse" for kind in config.mlp_layer_types],
                swiglu,
            )
        return cls(
            BlockRule.of_model(
                given["sparse_block_size"],
                given["sparse_topk_blocks"],
                given["sparse_local_block"],
                given["sparse_index_dim"],
                given.get("sparse_init_block", 0),
            ),
            [each != 0 for each in given["sparse_attention_freq"]],
            [each != 0 for each in config.moe_layer_freq],
            swiglu,
        )


class MiniMaxM3MLP(nn.Module):
    """A gated MLP with clipped inputs of the activation, dense or of the shared experts."""

    def __init__(
        self, vllm_config: VllmConfig, inner: int, prefix: str, reduce_results: bool = True
    ) -> None:
        super().__init__()
        config, quant = vllm_config.model_config.hf_config, vllm_config.quant_config
        size = config.hidden_size
        self.gate_up_proj = MergedColumnParallelLinear(
            size, [inner, inner], bias=False, quant_config=quant, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            inner,
            size,
            bias=False,
            quant_config=quant,
            reduce_results=reduce_results,
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = SiluAndMulWithClamp(**LayerKinds.of(config).swiglu)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]
        return result


class MiniMaxM3MoE(nn.Module):
    """Routed and shared experts."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        num_experts, swiglu = config.num_local_experts, LayerKinds.of(config).swiglu
        bias = torch.zeros(num_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        self.gate = GateLinear(
            config.hidden_size,
            num_experts,
            bias=False,
            params_dtype=torch.float32,
            out_dtype=torch.float32,
            prefix=f"{prefix}.gate",
        )
        inner = config.shared_intermediate_size * getattr(config, "n_shared_experts", 1)
        self.shared_experts = MiniMaxM3MLP(
            vllm_config, inner, f"{prefix}.shared_experts", reduce_results=False
        )
        self.experts = FusedMoEFactory(
            shared_experts=self.shared_experts,
            gate=self.gate,
            num_experts=num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            renormalize=True,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.experts",
            scoring_func="sigmoid",
            routed_scaling_factor=config.routed_scaling_factor,
            e_score_correction_bias=self.e_score_correction_bias,
            activation="swigluoai_uninterleave",
            swiglu_limit=swiglu["swiglu_limit"],
            swiglu_alpha=swiglu["alpha"],
            swiglu_beta=swiglu["beta"],
            router_logits_dtype=torch.float32,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.experts(hidden_states=x, router_logits=x)
        return result.view_as(x)


class MiniMaxM3Attention(nn.Module):
    """Attention with norms of single heads. In sparse layers an index branch chooses blocks."""

    def __init__(self, vllm_config: VllmConfig, blocks: BlockRule | None, prefix: str) -> None:
        super().__init__()
        config, quant = vllm_config.model_config.hf_config, vllm_config.quant_config
        num_ranks, size = get_tensor_model_parallel_world_size(), config.head_dim
        heads = config.num_attention_heads, config.num_key_value_heads
        num_heads, num_kv_heads = heads[0] // num_ranks, max(1, heads[1] // num_ranks)
        sizes, kind = [config.hidden_size, size, *heads], QKVParallelLinear
        self._sizes = [num_heads * size, num_kv_heads * size, num_kv_heads * size]
        if blocks is not None:
            sizes, kind = [*sizes, heads[1], size], MinimaxM3QKVParallelLinearWithIndexer
            self._sizes += [num_kv_heads * size, size]
            self.index_q_norm, self.index_k_norm = (
                GemmaRMSNorm(size, config.rms_norm_eps) for _ in range(2)
            )
        self.qkv_proj = kind(*sizes, bias=False, quant_config=quant, prefix=f"{prefix}.qkv_proj")
        self.o_proj = RowParallelLinear(
            heads[0] * size,
            config.hidden_size,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm, self.k_norm = (GemmaRMSNorm(size, config.rms_norm_eps) for _ in range(2))
        rope = dict(getattr(config, "rope_parameters", None) or {})
        rope.setdefault("rope_theta", getattr(config, "rope_theta", None))
        rope["partial_rotary_factor"] = config.rotary_dim / size
        self.rotary_emb = get_rope(
            size, max_position=config.max_position_embeddings, rope_parameters=rope
        )
        self.attn: Any
        given = num_heads, size, size**-0.5, num_kv_heads
        rest = {"cache_config": vllm_config.cache_config, "quant_config": quant}
        if blocks is None:
            self.attn = Attention(*given, **rest, prefix=f"{prefix}.attn")
        else:
            self.attn = BlockSparseAttention(*given, blocks, **rest, prefix=f"{prefix}.attn")

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """positions: [num_tokens], int64; x: [num_tokens, hidden_size]. Returns a tensor like x."""
        query, key, value, *index = self.qkv_proj(x)[0].split(self._sizes, dim=-1)
        query, key = _normed(self.q_norm, query), _normed(self.k_norm, key)
        query, key = self.rotary_emb(positions, query, key)
        if index:
            normed = _normed(self.index_q_norm, index[0]), _normed(self.index_k_norm, index[1])
            index_q, index_k = self.rotary_emb(positions, *normed)
            out = self.attn.attend(positions, query, key, value, index_q, index_k)
        else:
            out = self.attn(query, key, value)
        result: torch.Tensor = self.o_proj(out)[0]
        return result


class MiniMaxM3DecoderLayer(nn.Module):
    """Attention, then experts or a dense MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        kinds, layer = LayerKinds.of(config), extract_layer_index(prefix)
        blocks = kinds.blocks if kinds.is_sparse[layer] else None
        self.self_attn = MiniMaxM3Attention(vllm_config, blocks, f"{prefix}.self_attn")
        self.mlp: MiniMaxM3MLP | None = None
        if kinds.has_experts[layer]:
            self.block_sparse_moe = MiniMaxM3MoE(vllm_config, f"{prefix}.block_sparse_moe")
        else:
            inner = config.dense_intermediate_size
            self.mlp = MiniMaxM3MLP(vllm_config, inner, f"{prefix}.mlp")
        self.input_layernorm, self.post_attention_layernorm = (
            GemmaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [num_tokens, hidden_size], whose sum is the input. Returns both anew."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(positions, x)
        x, residual = self.post_attention_layernorm(x, residual)
        return (self.block_sparse_moe if self.mlp is None else self.mlp)(x), residual


class MiniMaxM3Model(LlamaModel):
    """Embedding, layers and norm, as in Llama; also returns hidden states for EAGLE-3."""

    norm: nn.Module

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=MiniMaxM3DecoderLayer)
        if not isinstance(self.norm, PPMissingLayer):
            self.norm = GemmaRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_mapped(self, weights, self.config.num_local_experts)


class NPUMiniMaxM3ForCausalLM(nn.Module, SupportsPP, SupportsEagle3):
    """MiniMax-M3's text model under its released names."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_regex={re.compile(r"(^|\.)mtp\."): None},  # MTP is another model
        orig_to_new_stacked={
            ".q_proj.": (".qkv_proj.", "q"),
            ".k_proj.": (".qkv_proj.", "k"),
            ".v_proj.": (".qkv_proj.", "v"),
            ".index_q_proj.": (".qkv_proj.", "index_q"),
            ".index_k_proj.": (".qkv_proj.", "index_k"),
            ".gate_proj.": (".gate_up_proj.", 0),
            ".up_proj.": (".gate_up_proj.", 1),
        },
    )
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.model = MiniMaxM3Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head: nn.Module = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        make: Any = self.model.make_empty_intermediate_tensors
        tensors: IntermediateTensors = make(batch_size, dtype, device)
        return tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.embed_input_ids(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        """Returns hidden states, with earlier layers' for a drafter; or a stage's tensors."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    def get_expert_mapping(self) -> list[tuple[str, str, int, str]]:
        return expert_mapping(self.model, self.config.num_local_experts)


def _normed(norm: GemmaRMSNorm, heads: torch.Tensor) -> torch.Tensor:
    """Normalizes each head. heads: [num_tokens, num_heads * head_size]"""
    size: int = norm.weight.numel()
    normed: torch.Tensor = norm(heads.reshape(-1, size)).view(heads.shape)
    return normed
