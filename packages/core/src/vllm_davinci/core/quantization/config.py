"""`--quantization ascend`: what the checkpoint says about a layer -> how the layer computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.layers.linear import NPUUnquantizedLinearMethod
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.quantization import block_fp8
from vllm_davinci.core.quantization.description import (
    FILE_NAME,
    WEIGHT_ONLY,
    QuantDescription,
    QuantType,
    find_description,
    shortened,
)
from vllm_davinci.core.quantization.experts_method import EXPERT_METHODS
from vllm_davinci.core.quantization.floats_at_load import FloatsAtLoadLinearMethod
from vllm_davinci.core.quantization.linear import W8A8DynamicLinearMethod, W8A8LinearMethod
from vllm_davinci.core.quantization.weight_only import WeightOnlyLinearMethod

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.model_executor.models.utils import WeightsMapper

logger = init_logger(__name__)

NAME = "ascend"
# Formats whose tensors do not pass through weight loaders: nothing can be missed there.
LOAD_FORMATS_WITHOUT_LOADERS = frozenset({"dummy", "sharded_state", "tensorizer"})


def read_description(model: str, revision: str | None = None) -> QuantDescription | None:
    """The description of a model, a directory or a name on the hub, or None when it has none."""
    directory = Path(model)
    if directory.is_dir():
        path = find_description(directory)
        return None if path is None else QuantDescription.load(path)
    content = get_hf_file_to_dict(FILE_NAME, model, revision)
    return None if content is None else QuantDescription.parse(content, f"{model}/{FILE_NAME}")


def describe(
    model: str, revision: str | None, hf_config: PretrainedConfig | None
) -> QuantDescription | None:
    """The description of a model; of one with fp8 weights, the one that they are loaded by."""
    description = read_description(model, revision)
    named = getattr(hf_config, "quantization_config", None)
    if description is None and block_fp8.block_of(named) is not None:
        return block_fp8.described(block_fp8.tensor_names(model, revision), model)
    return description


class AscendQuantizationConfig(QuantizationConfig):
    """Quantized checkpoints in ModelSlim's format. vLLM makes one per engine."""

    def __init__(self, description: QuantDescription | None = None) -> None:
        super().__init__()
        self._description = description
        self._missing: dict[str, None] = {}  # layers without an entry, in order
        self._has_own_head = True  # not the embedding once more, which no file has an entry for

    # --- what vLLM asks ----------------------------------------------------------------------

    def get_name(self) -> Any:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.int8, torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # read by maybe_update_config, which knows the model and can say what is missing

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AscendQuantizationConfig:
        """config: what config.json holds as `quantization_config`. The description decides."""
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """This method's name where config.json names another one, left over from the source."""
        if user_quant == NAME:
            return NAME
        model = getattr(hf_config, "_name_or_path", None)
        if user_quant is None and model and Path(model).is_dir() and find_description(Path(model)):
            return NAME
        return None

    def maybe_update_config(
        self,
        model_name: str,
        hf_config: PretrainedConfig | None = None,
        revision: str | None = None,
    ) -> None:
        """Reads the model's description. Raises CheckpointError when there is none."""
        if self._description is None:
            self._description = describe(model_name, revision, hf_config)
        if self._description is None:
            raise CheckpointError(
                f"--quantization {NAME} needs {FILE_NAME} beside the weights of {model_name}, and "
                "there is none. Copy it from the export, leave the option out for a checkpoint "
                "that is not quantized, or make one: vllm-davinci quantize SOURCE DESTINATION."
            )
        self._description.refuse_unsupported_options()
        self._has_own_head = not getattr(hf_config, "tie_word_embeddings", False)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self._description = self.description.renamed(hf_to_vllm_mapper.apply_dict)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer, from the type of `<prefix>.weight` or of all its parts."""
        if isinstance(layer, LinearBase):
            return self._linear_method(prefix)
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            # Some models name no prefix, and a head that is the embedding has no tensor.
            is_stored = prefix and (self._has_own_head or not isinstance(layer, ParallelLMHead))
            kind = self.type_of(prefix) if is_stored else QuantType.FLOAT
            if kind is not QuantType.FLOAT:
                raise UnsupportedFeatureError(
                    f"{prefix}.weight has quantization type {kind.value}, and embeddings and LM "
                    f"heads are {QuantType.FLOAT.value} only. Export the model without it."
                )
            return UnquantizedEmbeddingMethod()
        return None

    # --- what our layers ask -----------------------------------------------------------------

    @property
    def description(self) -> QuantDescription:
        if self._description is None:
            raise CheckpointError(
                f"{FILE_NAME} has not been read: build this from a description, or let vLLM build "
                "it through its engine configuration."
            )
        return self._description

    @property
    def has_norm_biases(self) -> bool:
        """Whether norms may have a bias in the checkpoint: NPURMSNorm makes room for it."""
        return self.description.has_norm_biases

    def type_of(self, prefix: str) -> QuantType:
        """Type of a layer. Without an entry FLOAT, which `log_missing` mentions."""
        kind = self.description.of_layer(prefix, self.packed_modules_mapping)
        if kind is None:
            self._missing[prefix] = None
            return QuantType.FLOAT
        return kind

    def log_missing(self) -> None:
        """Says once which of the model's layers the description does not mention."""
        if self._missing:
            logger.warning(
                "%s has no entry for %s: loaded as %s.",
                self.description.source,
                shortened(self._missing, 8),
                QuantType.FLOAT.value,
            )
        self._missing.clear()

    def _linear_method(self, prefix: str) -> QuantizeMethodBase:
        kind = self.type_of(prefix)
        if kind is QuantType.FLOAT:
            return NPUUnquantizedLinearMethod()
        is_loaded, use_nz = load_settings()
        group_size = self.description.group_size
        if prefix.rpartition(".")[2] == "kv_b_proj":
            return FloatsAtLoadLinearMethod(kind, prefix, is_loaded, group_size)
        if kind in WEIGHT_ONLY:
            return WeightOnlyLinearMethod(kind, prefix, is_loaded, group_size)
        if kind is QuantType.W8A8:
            return W8A8LinearMethod(prefix, is_loaded, use_nz)
        return W8A8DynamicLinearMethod(prefix, is_loaded, use_nz)

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase | None:
        kind = self.description.of_experts(prefix)
        if kind is None:
            self._missing[prefix] = None
        if kind is None or kind is QuantType.FLOAT:
            return None  # vLLM takes the unquantized method
        return EXPERT_METHODS[kind](
            layer.moe_config, prefix, *load_settings(), group_size=self.description.group_size
        )


def load_settings() -> tuple[bool, bool]:
    """Of the engine being built: whether tensors pass through loaders, whether to use NZ."""
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return True, False
    is_loaded = vllm_config.load_config.load_format not in LOAD_FORMATS_WITHOUT_LOADERS
    return is_loaded, get_config(vllm_config).enable_weight_nz_layout
