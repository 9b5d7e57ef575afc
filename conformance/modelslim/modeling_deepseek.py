"""DeepSeek-V3 as ModelSlim expects it; each checkpoint gets a copy of this file.

ModelSlim's adapter expects the code that DeepSeek ships with its weights: the router's bias is a
parameter, and a decoder layer computes its rotary embeddings itself.
"""

from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as base


class DeepseekV3DecoderLayer(base.DeepseekV3DecoderLayer):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        # A list hides the module's tensors from the layer.
        self._angles = [base.DeepseekV3RotaryEmbedding(config)]
        if (gate := getattr(self.mlp, "gate", None)) is not None:
            bias = gate.e_score_correction_bias
            del gate.e_score_correction_bias
            gate.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("position_embeddings") is None:
            (angles,) = self._angles
            positions = kwargs["position_ids"].to(hidden_states.device)
            angles = angles.to(hidden_states.device)
            kwargs["position_embeddings"] = angles(hidden_states, positions)
        return super().forward(hidden_states, *args, **kwargs)


class DeepseekV3Model(base.DeepseekV3Model):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            DeepseekV3DecoderLayer(config, number) for number in range(config.num_hidden_layers)
        )


class DeepseekV3ForCausalLM(base.DeepseekV3ForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = DeepseekV3Model(config)
