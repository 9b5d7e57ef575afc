"""Qwen3.8-Flash-Next: gated streams, embeddings of n-grams, gated delta rules, attention to chosen
groups of tokens, and routed experts."""

import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ForCausalLMBase,
    Qwen3_5Model,
    Qwen3_5MoeForConditionalGeneration,
)
from vllm.model_executor.models.qwen3_next import Qwen3NextSparseMoeBlock
from vllm.model_executor.models.qwen3_vl import Qwen3_VisionTransformer
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.models.qwen4_exp.amd.model import Qwen4ExpProcessingInfo
from vllm.sequence import IntermediateTensors
from vllm.tokenizers.registry import cached_tokenizer_from_config

from vllm_davinci.core.attention.compressed.step_tokens import StepTokens
from vllm_davinci.core.attention.compressed.token_rows import TokenRows
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.layers.residual_streams import StreamRule, connection, head
from vllm_davinci.models.qwen3_vl import NPUQwen3VLProcessingInfo, with_processor
from vllm_davinci.models.qwen4_exp_attention import Qwen4ExpAttention
from vllm_davinci.models.qwen4_exp_ngrams import NGramLayer, inside_texts

DELTA = "linear_attention"


class Qwen4ExpDecoderLayer(nn.Module):
    """Attention, then experts, each between reading and writing the residual streams.

    layer:   its number; one after the model's last has no table of n-grams
    history: as Qwen4ExpAttention takes it
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: Any,
        rule: StreamRule,
        layer: int,
        history: TokenRows | None,
        prefix: str,
    ) -> None:
        super().__init__()
        is_delta = config.layer_types[layer : layer + 1] == [DELTA]
        self.linear_attn = self.self_attn = None
        if is_delta:
            self.linear_attn = QwenGatedDeltaNetAttention(
                config, vllm_config, f"{prefix}.linear_attn", gqa_interleaved_layout=False
            )
        else:
            name = f"{prefix}.self_attn"
            self.self_attn = Qwen4ExpAttention(config, vllm_config, history, name)
        self.mlp = Qwen3NextSparseMoeBlock(vllm_config, f"{prefix}.mlp")
        self.attn_hyper_connection, self.mlp_hyper_connection = connection(rule), connection(rule)
        self.ple = None
        if layer + 1 in config.ple_layer_ids:
            table = config.ple_layer_ids.index(layer + 1)
            self.ple = NGramLayer(config, vllm_config, rule, table, f"{prefix}.ple")

    def forward(
        self,
        positions: torch.Tensor,
        streams: torch.Tensor,
        ids: torch.Tensor | None,
        step: StepTokens | None,
    ) -> torch.Tensor:
        """streams: [num_tokens, num_streams, hidden_size]. Returns a new tensor like it.

        ids: of n-grams, as NGramLayer takes them; step: None in a profile run
        """
        if self.ple is not None:
            assert ids is not None
            streams = self.ple(streams, ids, step)
        x, mixing = self.attn_hyper_connection.collapse(streams)
        if self.linear_attn is not None:
            x = self.linear_attn(x)
        else:
            assert self.self_attn is not None
            x = self.self_attn(positions, x, step)
        streams = self.attn_hyper_connection.expand(x, streams, mixing)
        x, mixing = self.mlp_hyper_connection.collapse(streams)
        return self.mlp_hyper_connection.expand(self.mlp(x), streams, mixing)


# Released names of a layer's tensors -> names of parameters.
LAYER_NAMES = Qwen3_5Model.hf_to_vllm_mapper | WeightsMapper(
    orig_to_new_regex={
        # A configuration's numbers, stored again.
        re.compile(r"\.ple_embedding\.(layer_multipliers|ngram_heads_\w+)$"): None,
        re.compile(r"\.ple_embedding\.ngram_embedding\."): ".table.",
        re.compile(r"hyper_connection_mixer\.block_inject_weight\."): None,
        re.compile(r"\.indexer\.k_layernorm\."): ".indexer.keys.norm.",
        re.compile(r"(hyper_connection(?:_mixer)?)\.input_mix_weight_up\."): r"\1.up.",
        re.compile(r"hyper_connection_mixer\.input_mix_weight_down\."): (
            "hyper_connection_mixer.down."
        ),
    },
    orig_to_new_stacked={
        "_hyper_connection.input_mix_weight_down.": ("_hyper_connection.down.", 0),
        "_hyper_connection.block_inject_weight.": ("_hyper_connection.down.", 1),
        ".ple.key_proj.": (".ple.kv_proj.", 0),
        ".ple.value_proj.": (".ple.kv_proj.", 1),
    },
)
PACKED_MODULES = {
    **Qwen3_5ForCausalLMBase.packed_modules_mapping,
    "kv_proj": ["key_proj", "value_proj"],
}


class Qwen4ExpModel(nn.Module):
    """Embedding, layers, and the gates that collapse the last streams."""

    hf_to_vllm_mapper = LAYER_NAMES

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        _refuse_other_kinds(config)
        # vLLM's delta rule knows no default; transformers' is the MLPs' activation.
        config.output_gate_type = config.output_gate_type or config.hidden_act
        self.config, self._rule = config, StreamRule.of_model(config, "qwen4_exp_text")
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        window = max(config.ngram_size, config.indexer_compress_ratio)
        # vLLM sorts caches by the number of a layer.
        self.tokens = TokenRows(window, f"{prefix}.layers.0.tokens")
        history = self.tokens if vllm_config.model_config.uses_mrope else None
        self.layers = nn.ModuleList(
            Qwen4ExpDecoderLayer(
                *(vllm_config, config, self._rule, layer, history), f"{prefix}.layers.{layer}"
            )
            for layer in range(config.num_hidden_layers)
        )
        self.hyper_connection_mixer = head(self._rule)
        # The last streams of each token, for the layer that predicts further ones.
        self.last_streams: torch.Tensor | None = None
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.method == "mtp":
            num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            width = self._rule.num_streams * config.hidden_size
            self.last_streams = torch.empty(num_tokens, width)
        ends = config.eos_token_id
        self._end = ends[0] if isinstance(ends, list) else ends

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
        step = self.tokens.step(positions)
        ids = self._ngrams(input_ids, positions, step)
        for layer in self.layers:
            streams = layer(positions, streams, ids, step)
        if self.last_streams is not None:
            self.last_streams[: len(streams)].copy_(streams.flatten(1))
        hidden: torch.Tensor = self.hyper_connection_mixer(streams)
        return hidden

    def _ngrams(
        self, input_ids: torch.Tensor, positions: torch.Tensor, step: StepTokens | None
    ) -> torch.Tensor:
        """The ids of each row and of those before it in its text: [num_tokens, ngram_size]."""
        size, num_rows = self.config.ngram_size, len(input_ids)
        if step is None:
            return input_ids.long().unsqueeze(1).repeat(1, size)
        self.tokens.write(input_ids, positions, step)
        ids = inside_texts(self.tokens.ids_until(step.all, size, self._end), self._end)
        return nn.functional.pad(ids, (0, 0, 0, num_rows - step.num_tokens))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def _refuse_other_kinds(config: Any) -> None:
    if config.indexer_n_heads is None:
        raise UnsupportedFeatureError(
            f"config.json has no indexer (indexer_n_heads), and {RELEASE} supports "
            "Qwen3.8-Flash-Next with one. Choose another checkpoint."
        )


class NPUQwen4ExpForCausalLM(Qwen3_5ForCausalLMBase):
    """The text model under its released names."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES
    requires_raw_input_tokens: ClassVar[bool] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.model = Qwen4ExpModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def get_mtp_target_hidden_states(self) -> torch.Tensor | None:
        """See DeepSeek-V4's."""
        return self.model.last_streams


class NPUQwen4ExpProcessingInfo(NPUQwen3VLProcessingInfo, Qwen4ExpProcessingInfo):
    """vLLM's class, with Qwen3-VL's processor that accepts video placeholders."""


@with_processor(info=NPUQwen4ExpProcessingInfo)
class NPUQwen4ExpForConditionalGeneration(Qwen3_5MoeForConditionalGeneration):
    """Qwen3-VL's encoder before the text model."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = (
        Qwen3_5MoeForConditionalGeneration.packed_modules_mapping | PACKED_MODULES
    )
    requires_raw_input_tokens: ClassVar[bool] = True
    indexes_multimodal_tokens: ClassVar[bool] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        nn.Module.__init__(self)
        model = vllm_config.model_config
        self.config, self.model_config = model.hf_config, model
        self.multimodal_config = model.get_multimodal_config()
        self.use_data_parallel = self.multimodal_config.mm_encoder_tp_mode == "data"
        self.use_deepstack = False
        self._init_video_pruning(self.multimodal_config)
        self._tokenizer = cached_tokenizer_from_config(model)
        with self._mark_tower_model(vllm_config, {"image", "video"}):
            self.visual = Qwen3_VisionTransformer(
                self.config.vision_config,
                norm_eps=self.config.text_config.rms_norm_eps,
                quant_config=vllm_config.quant_config,
                input_norm=build_mm_input_norm(model),
                prefix=maybe_prefix(prefix, "visual"),
            )
        with self._mark_language_model(vllm_config):
            self.language_model = NPUQwen4ExpForCausalLM(
                vllm_config=vllm_config, prefix=maybe_prefix(prefix, "language_model")
            )

    def get_mtp_target_hidden_states(self) -> torch.Tensor | None:
        return self.language_model.get_mtp_target_hidden_states()

    def set_moe_parameters(self) -> None:
        """Does nothing: no experts are balanced in models with recurrent states."""
