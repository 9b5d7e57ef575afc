"""DeepSeek-V4: residual streams, compressed and sparse attention, experts by table or by logits."""

import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMulWithClamp
from vllm.model_executor.layers.fused_moe import (
    FusedMoEFactory,
    GateLinear,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3
from vllm.model_executor.models.utils import WeightsMapper
from vllm.sequence import IntermediateTensors

from vllm_davinci.core.attention.compressed.rope import RopeTable
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens
from vllm_davinci.core.layers.residual_streams import StreamConnection, StreamHead, StreamRule
from vllm_davinci.models.deepseek_v4_attention import DeepseekV4Attention, rope_tables
from vllm_davinci.models.mapped_causal_lm import MappedForCausalLM
from vllm_davinci.models.mapped_weights import load_mapped


class DeepseekV4MLP(nn.Module):
    """The shared experts: a gated MLP with an activation limit."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, quant = vllm_config.model_config.hf_config, vllm_config.quant_config
        inner = config.moe_intermediate_size * config.n_shared_experts
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [inner, inner],
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            inner,
            config.hidden_size,
            bias=False,
            quant_config=quant,
            reduce_results=False,
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = SiluAndMulWithClamp(config.swiglu_limit)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]
        return result


class DeepseekV4MoE(nn.Module):
    """Routed and shared experts. In the first layers a table gives each token's experts."""

    def __init__(self, vllm_config: VllmConfig, layer: int, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        num_experts, top_k = config.n_routed_experts, config.num_experts_per_tok
        self.gate = GateLinear(
            config.hidden_size,
            num_experts,
            bias=False,
            out_dtype=torch.float32,
            prefix=f"{prefix}.gate",
        )
        self.gate.tid2eid = self.gate.e_score_correction_bias = None
        if layer < num_hash_layers(config):
            table = torch.zeros(config.vocab_size, top_k, dtype=torch.int32)
            self.gate.tid2eid = nn.Parameter(table, requires_grad=False)
        else:
            bias = torch.zeros(num_experts, dtype=torch.float32)
            self.gate.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        self.shared_experts = DeepseekV4MLP(vllm_config, f"{prefix}.shared_experts")
        self.experts = FusedMoEFactory(
            shared_experts=self.shared_experts,
            gate=self.gate,
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.experts",
            scoring_func=config.scoring_func,
            routed_scaling_factor=config.routed_scaling_factor,
            e_score_correction_bias=self.gate.e_score_correction_bias,
            hash_indices_table=self.gate.tid2eid,
            swiglu_limit=config.swiglu_limit,
            router_logits_dtype=torch.float32,
        )
        # The table is the gate's parameter; this is another name for it.
        routed = self.experts.routed_experts
        object.__setattr__(routed, "hash_indices_table", self.gate.tid2eid)

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size]; input_ids: [num_tokens]. Returns a tensor like x."""
        result: torch.Tensor = self.experts(hidden_states=x, router_logits=x, input_ids=input_ids)
        return result.view_as(x)


class DeepseekV4DecoderLayer(nn.Module):
    """Attention, then experts, each between reading and writing the residual streams."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        rule: StreamRule,
        layer: int,
        ropes: dict[bool, RopeTable],
        prefix: str,
        block: int = 0,
    ) -> None:
        """block: as in `CompressedAttention`"""
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.attn = DeepseekV4Attention(vllm_config, layer, ropes, f"{prefix}.attn", block)
        self.ffn = DeepseekV4MoE(vllm_config, layer, f"{prefix}.ffn")
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_attn, self.hc_ffn = StreamConnection(rule), StreamConnection(rule)

    def forward(
        self,
        positions: torch.Tensor,
        streams: torch.Tensor,
        input_ids: torch.Tensor,
        step: StepTokens | None,
    ) -> torch.Tensor:
        """streams: [num_tokens, num_streams, hidden_size]. Returns a new tensor like it."""
        x, mixing = self.hc_attn.collapse(streams)
        x = self.attn(positions, self.attn_norm(x), step)
        streams = self.hc_attn.expand(x, streams, mixing)
        x, mixing = self.hc_ffn.collapse(streams)
        x = self.ffn(self.ffn_norm(x), input_ids)
        return self.hc_ffn.expand(x, streams, mixing)


class DeepseekV4Model(nn.Module, EagleModelMixin):
    """Embedding, layers, and the norm of the last streams' weighted sum.

    Also returns the means of streams after `aux_hidden_state_layers` layers, if a drafter asks.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config, self._rule = config, stream_rule(config)
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        ropes = rope_tables(config, vllm_config.model_config.max_model_len)
        self.layers = nn.ModuleList(
            DeepseekV4DecoderLayer(
                vllm_config, self._rule, layer, ropes, f"{prefix}.layers.{layer}"
            )
            for layer in range(config.num_hidden_layers)
        )
        self.hc_head = StreamHead(self._rule)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # The last streams of each token, for the multi-token prediction layer.
        self.last_streams: torch.Tensor | None = None
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.method == "mtp":
            num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            width = self._rule.num_streams * config.hidden_size
            self.last_streams = torch.empty(num_tokens, width)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        embedded = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        streams = embedded.unsqueeze(1).repeat(1, self._rule.num_streams, 1)
        first: Any = self.layers[0]
        rows = first.attn.rows
        step = rows.step(positions)
        held = rows.shared_memory(positions) if step is None else None
        means: list[torch.Tensor] = []
        asked: Any = self.aux_hidden_state_layers
        for number, layer in enumerate(self.layers, 1):
            streams = layer(positions, streams, input_ids, step)
            if number in asked:
                means.append(streams.mean(dim=1))
        if self.last_streams is not None:
            self.last_streams[: len(streams)].copy_(streams.flatten(1))
        del held  # the profile run's, as long as layers share indices
        hidden: torch.Tensor = self.norm(self.hc_head(streams))
        return (hidden, means) if means else hidden

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_mapped(self, weights, self.config.n_routed_experts)


def stream_rule(config: Any) -> StreamRule:
    """The stream rule of a model, or of its drafter's configuration, whose type vLLM changes."""
    return StreamRule.of_model(config, "deepseek_v4")


def num_hash_layers(config: Any) -> int:
    """Number of first layers that choose experts by a table."""
    kinds = getattr(config, "mlp_layer_types", None)
    return int(config.num_hash_layers) if kinds is None else kinds.count("hash_moe")


# Released names of a layer's tensors -> names of parameters.
LAYER_NAMES = WeightsMapper(
    orig_to_new_regex={re.compile(r"\.hc_(attn|ffn|head)_(fn|base|scale)$"): r".hc_\1.\2"},
    orig_to_new_substr={
        ".shared_experts.w2.": ".shared_experts.down_proj.",
        ".ffn.gate.bias": ".ffn.gate.e_score_correction_bias",
    },
    orig_to_new_stacked={
        ".shared_experts.w1.": (".shared_experts.gate_up_proj.", 0),
        ".shared_experts.w3.": (".shared_experts.gate_up_proj.", 1),
        ".attn.wq_a.": (".attn.fused_wqa_wkv.", 0),
        ".attn.wkv.": (".attn.fused_wqa_wkv.", 1),
        ".compressor.wkv.": (".compressor.fused_wkv_wgate.", 0),
        ".compressor.wgate.": (".compressor.fused_wkv_wgate.", 1),
    },
)
PACKED_MODULES = {
    "gate_up_proj": ["w1", "w3"],
    "fused_wqa_wkv": ["wq_a", "wkv"],
    "fused_wkv_wgate": ["wkv", "wgate"],
}


class NPUDeepseekV4ForCausalLM(MappedForCausalLM, SupportsEagle3):
    """DeepSeek-V4 under its released names."""

    hf_to_vllm_mapper = LAYER_NAMES | WeightsMapper(
        orig_to_new_regex={re.compile(r"^hc_head_(fn|base|scale)$"): r"model.hc_head.\1"},
        orig_to_new_prefix={
            "layers.": "model.layers.",
            "embed.": "model.embed_tokens.",
            "norm.": "model.norm.",
            "head.": "lm_head.",
            "mtp.": None,  # multi-token prediction layers, which are another model
        },
    )
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES
    model_class, num_experts = DeepseekV4Model, "n_routed_experts"

    def get_mtp_target_hidden_states(self) -> torch.Tensor | None:
        """The newest step's last streams, which vLLM gives the drafter in place of hidden states.

        [max_num_batched_tokens, num_streams * hidden_size]; None without such a drafter
        """
        return self.model.last_streams
