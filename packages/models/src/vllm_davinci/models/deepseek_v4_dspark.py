"""DeepSeek-V4's DSpark: layers that draft a block of tokens at once, from hidden states of the
model."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.qwen3_dspark import DSparkMarkovHead
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

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


class DSparkLayer(DeepseekV4DecoderLayer):
    """A decoder layer whose queries are a block of drafts.

    The first layer also has the projection of the model's layers, the last one the heads.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        number: int,
        num_layers: int,
        ropes: dict[bool, RopeTable],
        prefix: str,
    ) -> None:
        assert vllm_config.speculative_config is not None
        asked = vllm_config.speculative_config
        config = asked.draft_model_config.hf_config
        rule, layer = stream_rule(config), config.num_hidden_layers + number
        block = asked.num_speculative_tokens
        super().__init__(vllm_config, rule, layer, ropes, prefix, block)
        size, eps = config.hidden_size, config.rms_norm_eps
        if number == 0:
            self.main_proj = ReplicatedLinear(
                size * len(config.dspark_target_layer_ids),
                size,
                bias=False,
                quant_config=vllm_config.quant_config,
                prefix=f"{prefix}.main_proj",
            )
            self.main_norm = RMSNorm(size, eps)
        if number == num_layers - 1:
            self.norm = RMSNorm(size, eps)
            self.hc_head = StreamHead(rule)
            self.markov_head = DSparkMarkovHead(
                config.vocab_size,
                config.vocab_size,
                config.dspark_markov_rank,
                prefix=f"{prefix}.markov_head",
            )


class DSparkModel(nn.Module):
    """The layers. vLLM gives it the model's embedding, `embed_tokens`."""

    embed_tokens: Any

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        assert vllm_config.speculative_config is not None
        self.config = config = vllm_config.speculative_config.draft_model_config.hf_config
        self.num_streams = config.hc_mult
        ropes = rope_tables(config, vllm_config.model_config.max_model_len)
        count = getattr(config, "n_mtp_layers", None) or 3  # vLLM's default
        self.mtp = nn.ModuleList(
            DSparkLayer(vllm_config, number, count, ropes, f"{prefix}.{number}")
            for number in range(count)
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        streams = self.embed_tokens(input_ids).unsqueeze(1).repeat(1, self.num_streams, 1)
        first, last = self._ends
        step = first.attn.rows.step(positions)
        for layer in self.mtp:
            streams = layer(positions, streams, input_ids, step)
        hidden: torch.Tensor = last.hc_head(streams)
        return hidden

    @property
    def _ends(self) -> tuple[Any, Any]:
        return self.mtp[0], self.mtp[-1]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_mapped(self, weights, self.config.n_routed_experts)


class NPUDSparkDeepseekV4(nn.Module):
    """The `mtp.*` tensors of a released checkpoint with DSpark, with the methods of vLLM's drafter.

    vLLM gives it the model's `lm_head`. The confidence head, which only adaptive verification
    reads, is not loaded.
    """

    hf_to_vllm_mapper = LAYER_NAMES | WeightsMapper(
        # Not loaded: copies of embedding and head, the confidence head, and the model itself.
        orig_to_new_regex={re.compile(r"^mtp\.\d+\.(emb|head|confidence_head)\.|^(?!mtp\.)"): None},
        orig_to_new_prefix={"mtp.": "model.mtp."},
    )
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES
    draft_id_to_target_id = None
    lm_head: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.model = DSparkModel(vllm_config, maybe_prefix(prefix, "model.mtp"))
        self.logits_processor = LogitsProcessor(self.model.config.vocab_size)

    def combine_hidden_states(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Input of the first layer. aux_hidden_states: [num_tokens, layers * hidden_size]"""
        first: Any = self.model.mtp[0]
        combined: torch.Tensor = first.main_norm(first.main_proj(aux_hidden_states)[0])
        return combined

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        layers: Any = self.model.mtp
        return [layer.attn.rows.window.prefix for layer in layers]

    def precompute_and_store_context_kv(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Stores the rows of the model's tokens. slots: by layer; None in a profile run"""
        layers: Any = self.model.mtp
        for layer, of_layer in zip(layers, slots or (), strict=bool(slots)):
            layer.attn.write_context(states, positions, of_layer)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of the drafts before their norm, [num_tokens, hidden_size]."""
        hidden: torch.Tensor = self.model(input_ids, positions)
        return hidden

    def compute_draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.logits_processor(self.lm_head, self._last.norm(hidden_states))
        return logits

    def map_draft_to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids

    def markov_embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self._last.markov_head.embed(token_ids)
        return embedded

    def markov_bias(self, markov_embed: torch.Tensor) -> torch.Tensor:
        """Bias of a draft's logits, from the token before it."""
        bias: torch.Tensor = self._last.markov_head.bias(markov_embed, self.logits_processor)
        return bias

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    @property
    def _last(self) -> Any:
        return self.model.mtp[-1]
