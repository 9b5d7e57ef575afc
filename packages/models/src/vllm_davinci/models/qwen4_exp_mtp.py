"""Qwen3.8-Flash-Next's layer for multi-token prediction, of residual streams."""

import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.layers.residual_streams import StreamRule, head
from vllm_davinci.models.mtp_drafter import MTPDrafter, Predictor
from vllm_davinci.models.qwen4_exp import LAYER_NAMES, PACKED_MODULES, Qwen4ExpDecoderLayer


class Qwen4ExpPredictor(Predictor):
    """A decoder layer without n-grams that reads the next embedding and streams before it."""

    hf_to_vllm_mapper = LAYER_NAMES

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        config = vllm_config.model_config.hf_text_config
        super().__init__(config)
        if (count := getattr(config, "mtp_num_hidden_layers", 1)) != 1:
            raise UnsupportedFeatureError(
                f"config.json has {count} layers for multi-token prediction, and {RELEASE} "
                "supports one in Qwen3.8-Flash-Next. Start without --speculative-config."
            )
        self.rule = StreamRule.of_model(config, "qwen4_exp_text")
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = GemmaRMSNorm(size, eps)
        self.pre_fc_norm_hidden = GemmaRMSNorm(size * self.rule.num_streams, eps)
        self.fc_embedding, self.fc_hidden = (
            ReplicatedLinear(
                size,
                size,
                bias=False,
                quant_config=vllm_config.quant_config,
                prefix=f"{prefix}.{name}",
            )
            for name in ("fc_embedding", "fc_hidden")
        )
        layer = vllm_config, config, self.rule, config.num_hidden_layers, None
        self.layers = torch.nn.ModuleList([Qwen4ExpDecoderLayer(*layer, f"{prefix}.layers.0")])
        self.hyper_connection_mixer = head(self.rule)

    def in_order(self) -> list[Any]:
        return [self]

    def predict(
        self,
        positions: torch.Tensor,
        streams: torch.Tensor,
        embedded: torch.Tensor,
        input_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Streams of the next position, [num_tokens, num_streams * hidden_size].

        positions: token numbers, which are a text's rotary positions
        streams:   like the result, from the model or from the previous pass
        embedded:  [num_tokens, hidden_size], embeddings of the next tokens
        """
        positions = positions if positions.ndim == 1 else positions[0]
        known = self.fc_hidden(self.pre_fc_norm_hidden(streams).view(-1, embedded.shape[1]))[0]
        known = known.view(-1, self.rule.num_streams, embedded.shape[1])
        mixed = known + self.fc_embedding(self.pre_fc_norm_embedding(embedded))[0].unsqueeze(1)
        layer: Any = self.layers[0]
        predicted: torch.Tensor = layer(
            positions, mixed, None, layer.self_attn.rows.step(positions)
        )
        return predicted.flatten(1)

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        """Hidden states for the vocabulary. streams: as `predict` returns them"""
        shaped = streams.view(len(streams), self.rule.num_streams, -1)
        hidden: torch.Tensor = self.hyper_connection_mixer(shaped)
        return hidden

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class NPUQwen4ExpMTP(MTPDrafter):
    """The `mtp.*` tensors of a released checkpoint."""

    hf_to_vllm_mapper = WeightsMapper(
        # Copies of the model's vocabulary, and the model.
        orig_to_new_regex={re.compile(r"^(?!mtp\.)|\.(embed_tokens|shared_head)\."): None},
        orig_to_new_prefix={"mtp.": "model."},
    )
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES

    def make_layers(self, vllm_config: VllmConfig, prefix: str) -> Qwen4ExpPredictor:
        return Qwen4ExpPredictor(vllm_config, prefix)
