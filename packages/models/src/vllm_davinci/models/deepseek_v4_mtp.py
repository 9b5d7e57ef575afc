"""DeepSeek-V4's layers for multi-token prediction, which read and write residual streams."""

import re
from collections.abc import Iterable
from copy import copy
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.utils import configure_quant_config
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_davinci.core.attention.compressed.rope import RopeTable
from vllm_davinci.core.layers.residual_streams import StreamHead
from vllm_davinci.models.deepseek_v4 import (
    LAYER_NAMES,
    PACKED_MODULES,
    DeepseekV4DecoderLayer,
    stream_rule,
)
from vllm_davinci.models.deepseek_v4_attention import rope_tables
from vllm_davinci.models.mapped_weights import load_mapped


class DeepseekV4MTPLayer(DeepseekV4DecoderLayer):
    """A decoder layer of the next token's embedding and of the streams before it."""

    def __init__(
        self, vllm_config: VllmConfig, layer: int, ropes: dict[bool, RopeTable], prefix: str
    ) -> None:
        config, quant = vllm_config.model_config.hf_config, vllm_config.quant_config
        self.rule = stream_rule(config)
        super().__init__(vllm_config, self.rule, layer, ropes, prefix)
        size = config.hidden_size
        self.enorm, self.hnorm, self.norm = (RMSNorm(size, config.rms_norm_eps) for _ in range(3))
        self.e_proj, self.h_proj = (
            ReplicatedLinear(size, size, bias=False, quant_config=quant, prefix=f"{prefix}.{name}")
            for name in ("e_proj", "h_proj")
        )
        self.hc_head = StreamHead(self.rule)

    def predict(
        self,
        positions: torch.Tensor,
        streams: torch.Tensor,
        embedded: torch.Tensor,
        input_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Streams of the next position, [num_tokens, num_streams * hidden_size].

        streams:  like the result, of the model or of the pass before
        embedded: [num_tokens, hidden_size], the tokens after them; position 0 has none
        """
        embedded = embedded.masked_fill(positions.unsqueeze(1) == 0, 0)
        known = self.h_proj(self.hnorm(streams.view(-1, embedded.shape[1])))[0]
        known = known.view(-1, self.rule.num_streams, embedded.shape[1])
        mixed = known + self.e_proj(self.enorm(embedded))[0].unsqueeze(1)
        return self(positions, mixed, input_ids, self.attn.rows.step(positions)).flatten(1)

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        """Hidden states for the vocabulary. streams: as `predict` returns them"""
        shaped = streams.view(len(streams), self.rule.num_streams, -1)
        hidden: torch.Tensor = self.norm(self.hc_head(shaped))
        return hidden


class DeepseekV4Predictor(nn.Module):
    """The layers. vLLM gives it the model's embedding, `embed_tokens`."""

    embed_tokens: Any

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config, depth = config, config.num_hidden_layers
        ropes = rope_tables(config, vllm_config.model_config.max_model_len)
        self.mtp = nn.ModuleList(
            DeepseekV4MTPLayer(vllm_config, depth + number, ropes, f"{prefix}.{number}")
            for number in range(config.num_nextn_predict_layers)
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_mapped(self, weights, self.config.n_routed_experts)


class NPUDeepSeekV4MTP(nn.Module):
    """The `mtp.*` tensors of a released checkpoint. vLLM gives it the model's `lm_head`."""

    hf_to_vllm_mapper = LAYER_NAMES | WeightsMapper(
        # Copies of the model's vocabulary, and the model.
        orig_to_new_regex={re.compile(r"^mtp\.\d+\.(emb|head)\.|^(?!mtp\.)"): None},
        orig_to_new_prefix={"mtp.": "model.mtp."},
    )
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES
    lm_head: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        own = copy(vllm_config)
        own.quant_config = own_quantization(vllm_config)
        if own.quant_config is not None:
            configure_quant_config(own.quant_config, type(self))
        self.config = vllm_config.model_config.hf_config
        self.model = DeepseekV4Predictor(own, maybe_prefix(prefix, "model.mtp"))
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """hidden_states: the streams, [num_tokens, num_streams * hidden_size]"""
        embedded = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self._layer(spec_step_idx).predict(positions, hidden_states, embedded, input_ids)

    def compute_logits(
        self, hidden_states: torch.Tensor, spec_step_idx: int = 0
    ) -> torch.Tensor | None:
        hidden = self._layer(spec_step_idx).collapse(hidden_states)
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    def _layer(self, number: int) -> DeepseekV4MTPLayer:
        layer: Any = self.model.mtp[number % len(self.model.mtp)]
        return layer


def own_quantization(vllm_config: VllmConfig) -> QuantizationConfig | None:
    """The checkpoint's quantization. The model's object has the names of the model's layers."""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    assert speculative is not None
    if speculative.draft_model_config.model != model.model:
        model = speculative.draft_model_config
    if model.quantization is None:
        return None
    return VllmConfig.get_quantization_config(model, vllm_config.load_config)
