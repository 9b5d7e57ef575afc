"""GLM-5.3-Flash: residual streams, delta rules, MLA to chosen tokens, and routed experts."""

import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.glm4_1v import Glm4vDummyInputsBuilder
from vllm.model_executor.models.glm_ocr import GlmOcrVisionAttention
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.models.glm5next.common.model import (
    Glm5NextForCausalLM,
    Glm5NextForConditionalGeneration,
    Glm5NextMLP,
    Glm5NextMoE,
)
from vllm.models.glm5next.common.multimodal import (
    Glm5NextMultiModalProcessor,
    Glm5NextProcessingInfo,
    Glm5NextVisionAttention,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.layers.residual_streams import StreamConnection, StreamHead, StreamRule
from vllm_davinci.models.glm5_next_attention import Glm5NextAttention, Glm5NextDeltaAttention
from vllm_davinci.models.mapped_weights import expert_mapping, load_mapped
from vllm_davinci.models.qwen_vl import give_metadata

DELTA = "linear_attention"


def has_experts(config: Any, layer: int) -> bool:
    """True if a layer has routed experts; layers after the model's last are like it."""
    kinds = config.mlp_layer_types
    return bool(kinds[min(layer, len(kinds) - 1)] == "sparse")


def make_mlp(config: Any, vllm_config: VllmConfig, layer: int, prefix: str) -> nn.Module:
    quant = vllm_config.quant_config
    if has_experts(config, layer):
        return Glm5NextMoE(config, vllm_config.parallel_config, quant, prefix)
    return Glm5NextMLP(
        config.hidden_size,
        config.intermediate_size,
        config.hidden_act,
        quant,
        prefix=prefix,
        swiglu_limit=config.swiglu_limit,
    )


class Glm5NextDecoderLayer(nn.Module):
    """Attention, then an MLP, each between reading and writing the residual streams."""

    def __init__(
        self, vllm_config: VllmConfig, config: Any, rule: StreamRule, layer: int, prefix: str
    ) -> None:
        super().__init__()
        kind = Glm5NextDeltaAttention if config.layer_types[layer] == DELTA else Glm5NextAttention
        self.self_attn = kind(config, vllm_config, f"{prefix}.self_attn")
        self.mlp = make_mlp(config, vllm_config, layer, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_attn, self.hc_ffn = StreamConnection(rule), StreamConnection(rule)

    def forward(self, streams: torch.Tensor, step: Any) -> torch.Tensor:
        """streams: [num_tokens, num_streams, hidden_size]. Returns a new tensor like it.

        step: the step's tokens, for layers that read rows; None in a profile run
        """
        x, mixing = self.hc_attn.collapse(streams)
        x = self.input_layernorm(x)
        is_delta = isinstance(self.self_attn, Glm5NextDeltaAttention)
        x = self.self_attn(x) if is_delta else self.self_attn(x, step)
        streams = self.hc_attn.expand(x, streams, mixing)
        x, mixing = self.hc_ffn.collapse(streams)
        x = self.mlp(self.post_attention_layernorm(x))
        return self.hc_ffn.expand(x, streams, mixing)


class Glm5NextModel(nn.Module):
    """Embedding, layers, and the norm of the last streams' mean."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        _refuse_other_kinds(config)
        self.config, self._rule = config, StreamRule.of_model(config, "glm5_next_text")
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.layers = nn.ModuleList(
            Glm5NextDecoderLayer(vllm_config, config, self._rule, layer, f"{prefix}.layers.{layer}")
            for layer in range(config.num_hidden_layers)
        )
        self._first_rows = config.layer_types.index("indexed_attention")
        self.hc_head = StreamHead(self._rule)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

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
        reader: Any = self.layers[self._first_rows]
        step = reader.self_attn.rows.step(positions)
        for layer in self.layers:
            streams = layer(streams, step)
        hidden: torch.Tensor = self.norm(self.hc_head(streams))
        return hidden

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_mapped(self, weights, self.config.n_routed_experts)


def _refuse_other_kinds(config: Any) -> None:
    types = zip(config.layer_types, config.indexer_types, strict=True)
    if any(kind != DELTA and indexer != "full" for kind, indexer in types):
        raise UnsupportedFeatureError(
            f"Layers of config.json share another layer's choice (indexer_types), and {RELEASE} "
            "supports GLM-5.3 with an indexer in each layer. Choose another checkpoint."
        )
    if not config.index_kpool_always_select_tail or "indexed_attention" not in config.layer_types:
        raise UnsupportedFeatureError(
            "config.json has index_kpool_always_select_tail = false or no layer with an indexer, "
            f"and {RELEASE} supports neither in GLM-5.3. Choose another checkpoint."
        )


# Released names of a layer's tensors -> names of parameters.
LAYER_NAMES = WeightsMapper(
    orig_to_new_regex={
        re.compile(r"\.hc_(attn|ffn)_(fn|base|scale)$"): r".hc_\1.\2",
        re.compile(r"\.experts\.(\d+)\.gate_proj\."): r".experts.\1.w1.",
        re.compile(r"\.experts\.(\d+)\.down_proj\."): r".experts.\1.w2.",
        re.compile(r"\.experts\.(\d+)\.up_proj\."): r".experts.\1.w3.",
        re.compile(r"\.indexer\.index_kpool_compress_gate$"): ".indexer.index_kpool_gate.weight",
    },
    orig_to_new_substr={
        ".indexer.index_kpool_compress_ape": ".indexer.keys.ape",
        ".indexer.k_norm.": ".indexer.keys.norm.",
    },
    orig_to_new_stacked={
        ".gate_proj.": (".gate_up_proj.", 0),
        ".up_proj.": (".gate_up_proj.", 1),
        ".q_a_proj.": (".fused_qkv_a_proj.", 0),
        ".kv_a_proj_with_mqa.": (".fused_qkv_a_proj.", 1),
        ".indexer.wk.": (".indexer.keys.fused_wkv_wgate.", 0),
        ".indexer.index_kpool_gate.": (".indexer.keys.fused_wkv_wgate.", 1),
        ".q_proj.": (".in_proj_qkvgfab.", 0),
        ".k_proj.": (".in_proj_qkvgfab.", 1),
        ".v_proj.": (".in_proj_qkvgfab.", 2),
        ".b_proj.": (".in_proj_qkvgfab.", 3),
        ".f_a_proj.": (".in_proj_qkvgfab.", 4),
        ".q_conv1d.": (".conv1d.", 0),
        ".k_conv1d.": (".conv1d.", 1),
        ".v_conv1d.": (".conv1d.", 2),
    },
)
PACKED_MODULES = {
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "in_proj_qkvgfab": ["q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"],
}


class NPUGlm5NextForCausalLM(Glm5NextForCausalLM):
    """GLM-5.3-Flash's text model under its released names."""

    hf_to_vllm_mapper = LAYER_NAMES
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.model = Glm5NextModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        # Layers after the last are for multi-token prediction, which is another model.
        depth = self.config.num_hidden_layers
        own = (
            (name, tensor)
            for name, tensor in weights
            if (layer := re.match(r"model\.layers\.(\d+)\.", name)) is None or int(layer[1]) < depth
        )
        return AutoWeightsLoader(self).load_weights(own, mapper=self.hf_to_vllm_mapper)

    def get_expert_mapping(self) -> list[tuple[str, str, int, str]]:
        return expert_mapping(self.model, self.config.n_routed_experts)


class _VisionAttention(Glm5NextVisionAttention):
    """GLM-OCR's attention, which lacks the fused CUDA norm of queries and keys."""

    forward = GlmOcrVisionAttention.forward


@MULTIMODAL_REGISTRY.register_processor(
    Glm5NextMultiModalProcessor, info=Glm5NextProcessingInfo, dummy_inputs=Glm4vDummyInputsBuilder
)
class NPUGlm5NextForConditionalGeneration(Glm5NextForConditionalGeneration):
    """vLLM's model of images, videos and text, on this platform's text model."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Without images vLLM leaves a layer in place of the encoder.
        blocks: Any = getattr(self.visual, "blocks", ())
        for block in blocks:
            block.attn.__class__ = _VisionAttention
        if blocks:
            give_metadata(self.visual, self.visual.prepare_encoder_metadata)

    def set_moe_parameters(self) -> None:
        """Does nothing: vLLM calls it for expert balancing, which models with recurrent states
        exclude.
        """
