"""GLM-5.3-Flash's layers for multi-token prediction, which have one residual stream."""

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
from vllm.model_executor.model_loader.utils import configure_quant_config
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_davinci.models.deepseek_v4_mtp import own_quantization
from vllm_davinci.models.glm5_next import LAYER_NAMES, PACKED_MODULES, make_mlp
from vllm_davinci.models.glm5_next_attention import Glm5NextAttention
from vllm_davinci.models.mapped_weights import load_mapped


class Glm5NextMTPLayer(nn.Module):
    """A decoder layer of the next token's embedding and of the hidden state before it."""

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
        self, positions: torch.Tensor, hidden: torch.Tensor, embedded: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states after the last norm, of the model's next position: like `hidden`.

        hidden:   [num_tokens, hidden_size], of the model or of the pass before
        embedded: like it, the tokens after them; position 0 has none
        """
        embedded = embedded.masked_fill(positions.unsqueeze(1) == 0, 0)
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))[0]
        x = x + self.self_attn(self.input_layernorm(x), self.self_attn.rows.step(positions))
        x = x + self.mlp(self.post_attention_layernorm(x))
        out: torch.Tensor = self.norm(x)
        return out


class Glm5NextPredictor(nn.Module):
    """The layers. vLLM gives it the model's embedding, `embed_tokens`."""

    embed_tokens: Any

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_text_config
        depth = config.num_hidden_layers
        self.layers = nn.ModuleDict(
            {
                str(layer): Glm5NextMTPLayer(vllm_config, layer, f"{prefix}.layers.{layer}")
                for layer in range(depth, depth + config.num_nextn_predict_layers)
            }
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_mapped(self, weights, self.config.n_routed_experts)


class NPUGlm5NextMTP(nn.Module):
    """The layers after a released checkpoint's last. vLLM gives it the model's `lm_head`."""

    hf_to_vllm_mapper = LAYER_NAMES | WeightsMapper(
        # Copies of the model's vocabulary.
        orig_to_new_regex={re.compile(r"\.(embed_tokens|shared_head\.head)\."): None},
        orig_to_new_substr={".shared_head.norm.": ".norm."},
        orig_to_new_prefix={"model.language_model.": "model."},
    )
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES
    lm_head: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        own = copy(vllm_config)
        own.quant_config = own_quantization(vllm_config)
        if own.quant_config is not None:
            configure_quant_config(own.quant_config, type(self))
        self.config = vllm_config.model_config.hf_text_config
        self.model = Glm5NextPredictor(own, maybe_prefix(prefix, "model"))
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
        """hidden_states: [num_tokens, hidden_size], after the model's last norm"""
        embedded = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        layers: list[Any] = list(self.model.layers.values())
        hidden: torch.Tensor = layers[spec_step_idx % len(layers)].predict(
            positions, hidden_states, embedded
        )
        return hidden

    def compute_logits(
        self, hidden_states: torch.Tensor, spec_step_idx: int = 0
    ) -> torch.Tensor | None:
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        layers = re.compile(rf"\.layers\.({'|'.join(self.model.layers)})\.")
        own = ((name, tensor) for name, tensor in weights if layers.search(name))
        return AutoWeightsLoader(self).load_weights(own, mapper=self.hf_to_vllm_mapper)
