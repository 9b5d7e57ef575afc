"""DeepSeek-V4's layers for multi-token prediction, which read and write residual streams."""

import re
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.utils import WeightsMapper

from vllm_davinci.core.attention.compressed.rope import RopeTable
from vllm_davinci.core.layers.residual_streams import StreamHead
from vllm_davinci.models.deepseek_v4 import (
    LAYER_NAMES,
    PACKED_MODULES,
    DeepseekV4DecoderLayer,
    stream_rule,
)
from vllm_davinci.models.deepseek_v4_attention import rope_tables
from vllm_davinci.models.mtp_drafter import MTPDrafter, Predictor


class DeepseekV4MTPLayer(DeepseekV4DecoderLayer):
    """A decoder layer that reads the next token's embedding and the streams before that token."""

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

        streams:  like the result, from the model or from the previous pass
        embedded: [num_tokens, hidden_size], embeddings of the next tokens; ignored at position 0
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


class DeepseekV4Predictor(Predictor):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        config = vllm_config.model_config.hf_config
        super().__init__(config)
        ropes = rope_tables(config, vllm_config.model_config.max_model_len)
        self.mtp = nn.ModuleList(
            DeepseekV4MTPLayer(
                vllm_config, config.num_hidden_layers + number, ropes, f"{prefix}.mtp.{number}"
            )
            for number in range(config.num_nextn_predict_layers)
        )

    def in_order(self) -> list[Any]:
        return list(self.mtp)


class NPUDeepSeekV4MTP(MTPDrafter):
    """The `mtp.*` tensors of a released checkpoint. Layers read and write the streams."""

    hf_to_vllm_mapper = LAYER_NAMES | WeightsMapper(
        # Not loaded: copies of embedding and head, and the model itself.
        orig_to_new_regex={re.compile(r"^mtp\.\d+\.(emb|head)\.|^(?!mtp\.)"): None},
        orig_to_new_prefix={"mtp.": "model.mtp."},
    )
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES

    def make_layers(self, vllm_config: VllmConfig, prefix: str) -> DeepseekV4Predictor:
        return DeepseekV4Predictor(vllm_config, prefix)
