"""GLM-5.3-Flash's layers for multi-token prediction, which have one residual stream."""

import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.utils import WeightsMapper

from vllm_davinci.models.glm5_next import LAYER_NAMES, PACKED_MODULES, make_mlp
from vllm_davinci.models.glm5_next_attention import Glm5NextAttention
from vllm_davinci.models.mtp_drafter import MTPDrafter, Predictor


class Glm5NextMTPLayer(nn.Module):
    """A decoder layer that reads the next token's embedding and the hidden state before that
    token."""

    def __init__(self, vllm_config: VllmConfig, layer: int, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.eh_proj = ReplicatedLinear(
            2 * size,
            size,
            bias=False,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.eh_proj",
        )
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Glm5NextAttention(config, vllm_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = make_mlp(config, vllm_config, layer, f"{prefix}.mlp")
        self.norm = RMSNorm(size, eps)

    def predict(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        input_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states of the next position, after the last norm: like `hidden`.

        hidden:    [num_tokens, hidden_size], from the model or from the previous pass
        embedded:  [num_tokens, hidden_size], embeddings of the next tokens; ignored at position 0
        input_ids: unused; other models choose experts by them
        """
        embedded = embedded.masked_fill(positions.unsqueeze(1) == 0, 0)
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))[0]
        x = x + self.self_attn(self.input_layernorm(x), self.self_attn.rows.step(positions))
        x = x + self.mlp(self.post_attention_layernorm(x))
        out: torch.Tensor = self.norm(x)
        return out

    def collapse(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: as `predict` returns it, after the norm"""
        return hidden


class Glm5NextPredictor(Predictor):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        config = vllm_config.model_config.hf_text_config
        super().__init__(config)
        depth = config.num_hidden_layers
        self.layers = nn.ModuleDict(
            {
                str(layer): Glm5NextMTPLayer(vllm_config, layer, f"{prefix}.layers.{layer}")
                for layer in range(depth, depth + config.num_nextn_predict_layers)
            }
        )

    def in_order(self) -> list[Any]:
        return list(self.layers.values())


class NPUGlm5NextMTP(MTPDrafter):
    """The layers after a released checkpoint's last. They read the result of the model's last
    norm."""

    hf_to_vllm_mapper = LAYER_NAMES | WeightsMapper(
        # Not loaded: copies of embedding and head.
        orig_to_new_regex={re.compile(r"\.(embed_tokens|shared_head\.head)\."): None},
        orig_to_new_substr={".shared_head.norm.": ".norm."},
        orig_to_new_prefix={"model.language_model.": "model."},
    )
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES
    model: Glm5NextPredictor

    def make_layers(self, vllm_config: VllmConfig, prefix: str) -> Glm5NextPredictor:
        return Glm5NextPredictor(vllm_config, prefix)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        layers = re.compile(rf"\.layers\.({'|'.join(self.model.layers)})\.")
        return super().load_weights(each for each in weights if layers.search(each[0]))
