"""HY-V4: residual streams, MLA to chosen tokens with sinks and gates, and routed experts."""

import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mla import MLAModules
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import make_attention_sink
from vllm.model_executor.models.deepseek_v2 import Indexer
from vllm.model_executor.models.utils import WeightsMapper
from vllm.models.hy_v4.nvidia.model import _normalize_hyv4_config
from vllm.models.hy_v4.nvidia.moe import HYV4FeedForward, HYV4MoEFused
from vllm.sequence import IntermediateTensors

from vllm_davinci.core.attention.mla.block import NPUMultiHeadLatentAttentionWrapper
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.layers.residual_streams import StreamConnection, StreamHead, StreamRule
from vllm_davinci.models.mapped_causal_lm import MappedForCausalLM
from vllm_davinci.models.mapped_weights import load_mapped


class HYV4Attention(NPUMultiHeadLatentAttentionWrapper):
    """MLA to chosen tokens; each head has a sink, and each of its outputs a gate."""

    linear_gate: ColumnParallelLinear
    learnable_sink_param: nn.Parameter

    def gated(self, out: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        gate: torch.Tensor = self.linear_gate(hidden_states)[0]
        return out * gate.sigmoid()


def make_attention(vllm_config: VllmConfig, config: Any, layer: int, prefix: str) -> HYV4Attention:
    """Makes the attention of one layer."""
    heads = config.num_attention_heads
    own_heads = heads // get_tensor_model_parallel_world_size()
    modules = _modules(vllm_config, config, layer, prefix)
    attention = HYV4Attention(
        config.hidden_size,
        own_heads,
        (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.q_lora_rank,
        config.kv_lora_rank,
        modules,
        vllm_config.cache_config,
        vllm_config.quant_config,
        prefix,
    )
    attention.indexer = modules.indexer
    attention.linear_gate = ColumnParallelLinear(
        config.hidden_size,
        heads * config.v_head_dim,
        bias=False,
        quant_config=vllm_config.quant_config,
        prefix=f"{prefix}.linear_gate",
    )
    attention.learnable_sink_param = make_attention_sink(own_heads, torch.float32)
    attention.mla_attn.sinks = (attention.learnable_sink_param,)
    return attention


def _modules(vllm_config: VllmConfig, config: Any, layer: int, prefix: str) -> MLAModules:
    """The layers of one attention, but for its gate and sinks."""
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    quant = vllm_config.quant_config

    def columns(inputs: int, outputs: int, name: str) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            inputs, outputs, bias=False, quant_config=quant, prefix=f"{prefix}.{name}"
        )

    # Released files have the entries of pairs next to each other.
    rotary = get_rope(
        rope,
        max_position=config.max_position_embeddings,
        rope_parameters=config.rope_parameters,
        is_neox_style=False,
    )
    return MLAModules(
        kv_a_layernorm=RMSNorm(rank, config.rms_norm_eps),
        kv_b_proj=columns(rank, heads * (nope + value), "kv_b_proj"),
        rotary_emb=rotary,
        o_proj=RowParallelLinear(
            heads * value, hidden, bias=False, quant_config=quant, prefix=f"{prefix}.o_proj"
        ),
        fused_qkv_a_proj=MergedColumnParallelLinear(
            hidden,
            [config.q_lora_rank, rank + rope],
            bias=False,
            quant_config=quant,
            disable_tp=True,
            prefix=f"{prefix}.fused_qkv_a_proj",
        ),
        kv_a_proj_with_mqa=None,
        q_a_layernorm=RMSNorm(config.q_lora_rank, config.rms_norm_eps),
        q_b_proj=columns(config.q_lora_rank, heads * (nope + rope), "q_b_proj"),
        q_proj=None,
        indexer=_indexer(vllm_config, config, layer, prefix),
        is_sparse=True,
        topk_indices_buffer=None,
        indexer_rotary_emb=rotary,
    )


def _indexer(vllm_config: VllmConfig, config: Any, layer: int, prefix: str) -> Indexer | None:
    """The layer's indexer, or None if it uses an earlier layer's choice."""
    if config.indexer_types[layer] != "full":
        return None
    indexer = Indexer(
        vllm_config,
        config,
        config.hidden_size,
        config.q_lora_rank,
        vllm_config.quant_config,
        vllm_config.cache_config,
        None,
        f"{prefix}.indexer",
    )
    indexer.rotates_last = True
    return indexer


class HYV4DecoderLayer(nn.Module):
    """Attention, then an MLP, each between reading and writing the residual streams."""

    def __init__(
        self, vllm_config: VllmConfig, config: Any, rule: StreamRule, layer: int, prefix: str
    ) -> None:
        super().__init__()
        quant = vllm_config.quant_config
        self.self_attn = make_attention(vllm_config, config, layer, f"{prefix}.self_attn")
        self.mlp = (
            HYV4MoEFused(config, quant, f"{prefix}.mlp")
            if config.mlp_layer_types[layer] == "sparse"
            else HYV4FeedForward(
                config.hidden_size,
                config.intermediate_size,
                config.hidden_act,
                quant,
                prefix=f"{prefix}.mlp",
            )
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_attn, self.hc_mlp = StreamConnection(rule), StreamConnection(rule)

    def forward(self, positions: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """streams: [num_tokens, num_streams, hidden_size]. Returns a new tensor like it."""
        x, mixing = self.hc_attn.collapse(streams)
        x = self.self_attn(positions, self.input_layernorm(x))
        streams = self.hc_attn.expand(x, streams, mixing)
        x, mixing = self.hc_mlp.collapse(streams)
        x = self.mlp(self.post_attention_layernorm(x))
        return self.hc_mlp.expand(x, streams, mixing)


class HYV4Model(nn.Module):
    """Embedding, layers, and the norm of the collapsed streams."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = _normalize_hyv4_config(vllm_config.model_config.hf_config)
        _refuse_other_kinds(config)
        self.config, self._rule = config, StreamRule.of_model(config, "hy_v4")
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.layers = nn.ModuleList(
            HYV4DecoderLayer(vllm_config, config, self._rule, layer, f"{prefix}.layers.{layer}")
            for layer in range(config.num_hidden_layers)
        )
        self.hc_head = StreamHead(self._rule)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        embedded = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        streams = embedded.unsqueeze(1).repeat(1, self._rule.num_streams, 1)
        for layer in self.layers:
            streams = layer(positions, streams)
        hidden: torch.Tensor = self.norm(self.hc_head(streams))
        return hidden

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_mapped(self, weights, self.config.num_experts)


def _refuse_other_kinds(config: Any) -> None:
    asked = {
        "layers without an indexer's choice (layer_types)": any(
            "sparse" not in kind and "indexed" not in kind for kind in config.layer_types
        ),
        "one residual stream (enable_ihc)": not getattr(config, "enable_ihc", True),
        "attention without gates or sinks (gated_mla, gating_type, learnable_sink)": not (
            getattr(config, "gated_mla", True)
            and getattr(config, "gating_type", "elementwise") == "elementwise"
            and getattr(config, "learnable_sink", True)
        ),
        "a limit of logits (soft_logits_capping)": getattr(config, "soft_logits_capping", False),
        "tied embeddings (tie_word_embeddings)": config.tie_word_embeddings,
    }
    if named := [what for what, is_asked in asked.items() if is_asked]:
        raise UnsupportedFeatureError(
            f"config.json asks for {', '.join(named)}, which {RELEASE} does not support in HY-V4. "
            "Choose another checkpoint."
        )


# Released names of a layer's tensors -> names of parameters.
LAYER_NAMES = WeightsMapper(
    orig_to_new_regex={
        re.compile(r"\.hc_(attn|mlp)_layer\.hc_pre\.hc_(fn|base|scale)$"): r".hc_\1.\2",
        re.compile(r"\.hc_head\.hc_head_(fn|base|scale)$"): r".hc_head.\1",
        re.compile(r"\.experts\.(\d+)\.gate_proj\."): r".experts.\1.w1.",
        re.compile(r"\.experts\.(\d+)\.down_proj\."): r".experts.\1.w2.",
        re.compile(r"\.experts\.(\d+)\.up_proj\."): r".experts.\1.w3.",
        re.compile(r"\.gate\.e_score_correction_bias$"): ".expert_bias",
        re.compile(r"\.router\.gate\."): ".gate.",
    },
    orig_to_new_stacked={
        ".gate_proj.": (".gate_up_proj.", 0),
        ".up_proj.": (".gate_up_proj.", 1),
        ".q_a_proj.": (".fused_qkv_a_proj.", 0),
        ".kv_a_proj_with_mqa.": (".fused_qkv_a_proj.", 1),
        ".indexer.wk.": (".indexer.wk_weights_proj.", 0),
        ".indexer.weights_proj.": (".indexer.wk_weights_proj.", 1),
    },
)


class NPUHYV4ForCausalLM(MappedForCausalLM):
    """The text model under its released names."""

    hf_to_vllm_mapper = LAYER_NAMES
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "gate_up_proj": ["gate_proj", "up_proj"],
        "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
        "wk_weights_proj": ["wk", "weights_proj"],
    }
    model_class, num_experts = HYV4Model, "num_experts"

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own = (
            each
            for name, tensor in weights
            if _is_of_model(name, self.config.num_hidden_layers)
            for each in _single_experts(name, tensor)
        )
        return super().load_weights(own)


def _is_of_model(name: str, num_layers: int) -> bool:
    """False for tensors of multi-token prediction, which is another model."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return not name.startswith("model.mtp_layers.") and (
        layer is None or int(layer[1]) < num_layers
    )


def _single_experts(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors of single experts; files may have those of a layer in one."""
    prefix, _, part = name.rpartition(".experts.")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(part)
    if not prefix or parts is None:
        yield name, tensor
        return
    for expert, joint in enumerate(tensor):
        for each, weight in zip(parts, joint.chunk(len(parts)), strict=True):
            yield f"{prefix}.experts.{expert}.{each}.weight", weight
