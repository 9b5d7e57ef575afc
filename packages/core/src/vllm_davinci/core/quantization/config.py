"""`--quantization ascend`: chooses each layer's computation from the checkpoint's description."""

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

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.registered_names import WITHOUT_FILES
from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.quantization.floats_at_load import FloatsAtLoadLinearMethod
from vllm_davinci.core.quantization.format import Checkpoint, Format, find_format
from vllm_davinci.core.quantization.scheme import FLOAT, LayerSettings, Scheme, find_scheme
from vllm_davinci.core.weight_files.layer_names import shortened

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.model_executor.models.utils import WeightsMapper

logger = init_logger(__name__)

NAME = "ascend"
DESCRIPTION = "quant_model_description.json"
# Earlier exports put the type into the file name.
DESCRIPTIONS = "quant_model_description*.json"


class NPUQuantizationConfigBase(QuantizationConfig):
    """A method for every device, described by config.json."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []


class AscendQuantizationConfig(NPUQuantizationConfigBase):
    """Selects layers by the checkpoint's format. vLLM makes one per engine.

    `maybe_update_config` reads the format's file, since it gets the model and can name what is
    missing.

    format: the checkpoint's description, with checkpoint names; None: read with the model's
            configuration
    """

    def __init__(self, format: Format | None = None) -> None:
        super().__init__()
        self.format = format
        self.named: dict[str, Any] = {}  # config.json's section about quantization
        self._renamed: Format | None = None  # `format` under the names of the model's modules
        self._missing: dict[str, None] = {}  # layers without an entry, in order
        self._has_own_head = True  # False for a tied head, for which no file has an entry

    # --- what vLLM asks ----------------------------------------------------------------------

    def get_name(self) -> Any:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.int8, torch.float16, torch.bfloat16]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AscendQuantizationConfig:
        """Ignores config.json's `quantization_config`: the format's file describes the layers."""
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Returns this method if config.json still names that of the export's source."""
        if user_quant == NAME:
            return NAME
        model = getattr(hf_config, "_name_or_path", None)
        if user_quant is None and model and Path(model).is_dir() and is_described(Path(model)):
            return NAME
        return None

    def maybe_update_config(
        self,
        model_name: str,
        hf_config: PretrainedConfig | None = None,
        revision: str | None = None,
    ) -> None:
        """Reads the model's description. Raises CheckpointError if there is none."""
        if self.format is None:
            named = self.named or getattr(hf_config, "quantization_config", None) or {}
            self.format = find_format(Checkpoint(model_name, revision, named), self.get_name())
        if self.format is None:
            raise CheckpointError(
                f"--quantization {NAME} needs {DESCRIPTION} next to the weights of {model_name}, "
                "and there is none. Copy it from the export, remove the option for a checkpoint "
                "that is not quantized, or make one: vllm-davinci quantize SOURCE DESTINATION."
            )
        self._has_own_head = not getattr(hf_config, "tie_word_embeddings", False)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self._renamed = self.description.renamed(hf_to_vllm_mapper.apply_dict)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer, by the type of `<prefix>.weight` or of all its parts."""
        if isinstance(layer, LinearBase):
            return self._linear_method(prefix)
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            # Some models pass no prefix, and a tied head has no tensor.
            is_stored = prefix and (self._has_own_head or not isinstance(layer, ParallelLMHead))
            kind = self.scheme_of(prefix).name if is_stored else FLOAT
            if kind != FLOAT:
                raise UnsupportedFeatureError(
                    f"{prefix}.weight has quantization type {kind}, and embeddings and LM heads "
                    f"are {FLOAT} only. Export the model without it."
                )
            return UnquantizedEmbeddingMethod()
        return None

    # --- what our layers ask -----------------------------------------------------------------

    @property
    def description(self) -> Format:
        """The checkpoint's description, under the names of the model's modules."""
        if self._renamed is not None:
            return self._renamed
        if self.format is None:
            raise CheckpointError(
                "The checkpoint's description has not been read: create this object from one, or "
                "let vLLM create it through its engine configuration."
            )
        return self.format

    def settle_for_decodes(self) -> bool:
        """Switches to the types of a decode engine (disaggregated prefill). True if any differ.

        Call it before layers are made.
        """
        given = self.format
        if given is not None:
            self.format = given.of_decodes()
        return self.format is not given

    @property
    def has_norm_biases(self) -> bool:
        """True if norms may have a bias in the checkpoint: NPURMSNorm then allocates it."""
        return self.description.has_norm_biases

    def scheme_of(self, prefix: str) -> Scheme:
        """The scheme of a layer; FLOAT without an entry, which `log_missing` reports."""
        scheme = self.description.of_layer(prefix, self.packed_modules_mapping)
        if scheme is None:
            self._missing[prefix] = None
            return find_scheme(FLOAT, prefix)
        return scheme

    def log_missing(self) -> None:
        """Logs once which of the model's layers have no entry in the description."""
        if self._missing:
            logger.warning(
                "%s has no entry for %s: loaded as %s.",
                self.description.source,
                shortened(self._missing, 8),
                FLOAT,
            )
        self._missing.clear()

    def _linear_method(self, prefix: str) -> QuantizeMethodBase:
        scheme, settings = self.scheme_of(prefix), self._settings()
        method: QuantizeMethodBase
        if prefix.rpartition(".")[2] == "kv_b_proj" and scheme.name != FLOAT:
            method = FloatsAtLoadLinearMethod(scheme, prefix, settings)
        else:
            method = scheme.linear(prefix, settings)
        return method

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase | None:
        scheme = self.description.of_experts(prefix)
        if scheme is None:
            self._missing[prefix] = None
            return None  # vLLM uses the unquantized method
        method: QuantizeMethodBase | None = scheme.experts(
            layer.moe_config, prefix, self._settings()
        )
        return method

    def _settings(self) -> LayerSettings:
        return load_settings()._replace(group_size=self.description.layout.group_size)


def is_described(directory: Path) -> bool:
    """True if a checkpoint has a description file, which overrides config.json."""
    return any(directory.glob(DESCRIPTIONS))


def load_settings() -> LayerSettings:
    """The settings of the engine that is being built."""
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return LayerSettings()
    is_loaded = vllm_config.load_config.load_format != WITHOUT_FILES
    return LayerSettings(is_loaded, get_config(vllm_config).enable_weight_nz_layout)
