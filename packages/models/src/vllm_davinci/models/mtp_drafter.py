"""Drafters of a released checkpoint's layers for multi-token prediction."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.utils import configure_quant_config
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_davinci.models.mapped_weights import load_mapped


class Predictor(nn.Module):
    """The layers. vLLM gives it the model's embedding, `embed_tokens`.

    A layer has `predict`, whose results are its next input, and `collapse`, which turns them into
    hidden states for the vocabulary.
    """

    embed_tokens: Any

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def in_order(self) -> Sequence[Any]:
        """The layers, in the order of the steps that they predict."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_mapped(self, weights, self.config.n_routed_experts)


class MTPDrafter(nn.Module):
    """Drafts with MTP layers and the model's `lm_head`; subclasses name tensors, make layers."""

    hf_to_vllm_mapper: WeightsMapper
    packed_modules_mapping: ClassVar[dict[str, list[str]]]
    lm_head: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        own = copy(vllm_config)
        own.quant_config = _own_quantization(vllm_config)
        if own.quant_config is not None:
            configure_quant_config(own.quant_config, type(self))
        self.config = vllm_config.model_config.hf_text_config
        self.model = self.make_layers(own, maybe_prefix(prefix, "model"))
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    @abstractmethod
    def make_layers(self, vllm_config: VllmConfig, prefix: str) -> Predictor:
        """vllm_config: with the checkpoint's own quantization"""

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
        """hidden_states: [num_tokens, size], which the layers read. Returns the same"""
        embedded = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        predicted: torch.Tensor = self._layer(spec_step_idx).predict(
            positions, hidden_states, embedded, input_ids
        )
        return predicted

    def compute_logits(
        self, hidden_states: torch.Tensor, spec_step_idx: int = 0
    ) -> torch.Tensor | None:
        hidden = self._layer(spec_step_idx).collapse(hidden_states)
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    def _layer(self, number: int) -> Any:
        layers = self.model.in_order()
        return layers[number % len(layers)]


def _own_quantization(vllm_config: VllmConfig) -> QuantizationConfig | None:
    """Returns the checkpoint's quantization; the model's own has the model's layer names."""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    assert speculative is not None
    if speculative.draft_model_config.model != model.model:
        model = speculative.draft_model_config
    if model.quantization is None:
        return None
    return VllmConfig.get_quantization_config(model, vllm_config.load_config)
