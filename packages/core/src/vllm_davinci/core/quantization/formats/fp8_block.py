"""fp8 weights with a scale per block, per row or per tensor, as DeepSeek and Qwen publish them.

`X.weight` is float8_e4m3fn [out, in], `X.weight_scale_inv` the factors of its blocks: [ceil(out /
rows), ceil(in / columns)] for blocks, usually of 128 x 128, [out, 1] for rows, [1] for the tensor,
in any floating dtype. compressed-tensors calls it `X.weight_scale`, DeepSeek-V4 `X.scale`; routed
experts of DeepSeek-V4 may be MXFP4 (`quantization.fp8`). A layer's experts may be one
tensor with a leading expert dimension. A table of n-grams (Qwen3.8-Flash-Next) stays fp8, with one
scale `X.weight_scale` for its parts `X.shard_N.weight`. Loading converts other weights to floats
(vLLM's quantization `fp8`, `compressed-tensors`) or to W8A8_DYNAMIC (`ascend`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.layers.linear import NPUUnquantizedLinearMethod
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.quantization.config import NAME as ASCEND
from vllm_davinci.core.quantization.config import NPUQuantizationConfigBase
from vllm_davinci.core.quantization.format import FORMATS, Checkpoint, Format, Weights
from vllm_davinci.core.quantization.fp8 import (
    DTYPE,
    INPUT_SCALE,
    INTEGERS,
    SCALES,
    Block,
    as_floats,
    as_integers,
    blocks_of,
    expected,
    fits,
    has_scales,
    missing_scale,
    require_scale,
    scale_of,
    table_of,
    weight_of,
)
from vllm_davinci.core.quantization.scheme import FLOAT
from vllm_davinci.core.quantization.tensors import dtype_name
from vllm_davinci.core.weight_files.files import StoredTensor
from vllm_davinci.core.weight_files.issues import CheckReport
from vllm_davinci.core.weight_files.layer_names import EXPERT, FUSED_LAYERS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = init_logger(__name__)

NAME = "fp8"
# MLA splits kv_b_proj as floats, DeepSeek-V4 multiplies wo_a in groups.
_FLOAT_PRODUCTS = re.compile(r"\.(kv_b_proj|wo_a)\.")
COMPRESSED = "compressed-tensors"
OF_DEEPSEEK_V4 = "deepseek_v4_fp8"  # the method that vLLM puts into configurations of this model


@FORMATS.register
@dataclass(frozen=True)
class Fp8Weights(Format):
    """An fp8 checkpoint. blocks: size of the blocks that share a scale; None: per row or tensor"""

    blocks: Block | None = None
    method: str = NAME

    name = NAME
    quantizations = frozenset({NAME, COMPRESSED, ASCEND})

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Fp8Weights | None:
        """The format from config.json, or None for another format.

        config: `quantization_config`
        Raises UnsupportedFeatureError for invalid blocks.
        """
        given = config.get("quant_method")
        method = NAME if given == OF_DEEPSEEK_V4 else given
        if method == COMPRESSED:
            found = _blocks_of_groups(config)
        elif method == NAME:
            found = [config.get("weight_block_size")]
        else:
            return None
        if not found:
            return None
        size = found[0]
        is_pair = (
            isinstance(size, list | tuple)
            and len(size) == 2
            and all(isinstance(each, int) and each > 0 for each in size)
        )
        if any(each != size for each in found) or not (size is None or is_pair):
            raise UnsupportedFeatureError(
                f"config.json names fp8 weights in blocks of {found}; expected one size of two "
                "positive numbers. Use the model's float checkpoint, or vllm-davinci quantize on "
                "it."
            )
        blocks = None if size is None else Block(*size)
        return cls(types={}, source="config.json", blocks=blocks, method=method)

    @classmethod
    def find(cls, checkpoint: Checkpoint, quantization: str | None) -> Fp8Weights | None:
        """The format; with the layers that become integers if `ascend` serves it."""
        found = cls.of(checkpoint.quantization)
        if found is None or quantization != ASCEND:
            return found
        types = integer_types(checkpoint.tensor_names())
        return cls(types=types, source=checkpoint.model, blocks=found.blocks, method=found.method)

    @property
    def label(self) -> str:
        kind = NAME if self.method == NAME else f"{self.method} {NAME}"
        return f"{kind} (config.json)"

    def converted(self, weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """fp8 weights as floats, or as the tensors of W8A8_DYNAMIC, once their scales have arrived.

        Raises CheckpointError if a weight or its scales are missing.
        """
        waiting: dict[str, tuple[str, torch.Tensor]] = {}
        tables: dict[str, torch.Tensor] = {}
        # The reader holds one weight while the next is made, so two spares take turns.
        spares: deque[torch.Tensor] = deque(maxlen=2)
        for name, tensor in weights:
            if name.endswith(INPUT_SCALE):
                continue
            if tensor.dtype == DTYPE and (table := table_of(name)):
                tables[table] = torch.empty_like(tensor, device="meta")
                yield name, tensor
                continue
            key = weight_of(name) or name
            if key == name and not has_scales(name, tensor.dtype):
                yield name, tensor
                continue
            if key not in waiting:
                waiting[key] = name, tensor
                continue
            pair = dict([waiting.pop(key), (name, tensor)])
            weight = pair.pop(key)
            ((scale_name, scale),) = pair.items()
            require_scale(key, weight, scale_name, scale, self.blocks)
            if self.types.get(key) != INTEGERS:
                floats = as_floats(weight, scale, self.blocks, dtype, list(spares))
                _keep(spares, floats)
                yield key, floats
                continue
            made = as_integers(weight, scale, self.blocks, list(spares))
            _keep(spares, made["weight"])
            for part, values in made.items():
                yield f"{key.removesuffix('.weight')}.{part}", values
        for table, rows in tables.items():
            scale_name, of_table = waiting.pop(table, None) or (f"{table}{SCALES[1]}", None)
            require_scale(table, rows, scale_name, of_table, None)
            assert of_table is not None
            yield scale_name, of_table
        for key, (name, tensor) in waiting.items():
            if key == name:
                require_scale(key, tensor, f"{key}{SCALES[0]}", None, self.blocks)
            raise CheckpointError(
                f"{name} exists without the fp8 tensor {key}: the scales would be ignored. Copy "
                "the rest of the checkpoint."
            )

    def check(self, tensors: Mapping[str, StoredTensor], report: CheckReport) -> None:
        """Checks that every fp8 weight has its scales, and that no other scales exist."""
        weights = {
            name: tensor for name, tensor in tensors.items() if has_scales(name, tensor.dtype)
        }
        scaled = weights.keys() | {table_of(name) for name in weights}
        lacking: dict[str, str] = {}
        for name, tensor in tensors.items():
            key = weight_of(name)
            if key is not None:
                if key not in scaled:
                    report.problem(name, "belongs to no fp8 weight")
                continue
            if name not in weights:
                continue
            blocks = None if table_of(name) else blocks_of(tensor.dtype, self.blocks)
            scale = scale_of(name, tensors)
            if scale is None:
                lacking[missing_scale(name)] = "fp8" if tensor.dtype == DTYPE else "MXFP4"
            elif not tensors[scale].dtype.is_floating_point or not fits(
                tensor.shape, tensors[scale].shape, blocks
            ):
                found = tensors[scale]
                report.problem(
                    scale,
                    f"is {dtype_name(found.dtype)} {list(found.shape)} and must have a floating "
                    f"dtype and {expected(tensor.shape, blocks)}",
                )
        for name, kind in lacking.items():
            report.problem(name, f"is missing: the weight is {kind}")


def _blocks_of_groups(config: Mapping[str, Any]) -> list[Any]:
    """The block sizes of compressed-tensors' groups of fp8 weights; none for other groups."""
    found = []
    groups = config.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [one.get("weights") for one in schemes if isinstance(one, Mapping)]
    of_fp8 = [
        one
        for one in weights
        if isinstance(one, Mapping) and (one.get("type"), one.get("num_bits")) == ("float", 8)
    ]
    if of_fp8 and len(of_fp8) < len(schemes):
        raise UnsupportedFeatureError(
            f"config.json says {COMPRESSED} with fp8 weights and weights of another kind; only one"
            " kind is supported. Use the model's float checkpoint, or vllm-davinci quantize on "
            "it."
        )
    for one in of_fp8:
        strategy = one.get("strategy")
        if strategy not in ("tensor", "channel", "block") or not one.get("symmetric", True):
            raise UnsupportedFeatureError(
                f"config.json says {COMPRESSED} with fp8 weights and a scale per {strategy}; only "
                "symmetric scales per tensor, channel or block are supported. Use the model's "
                "float checkpoint, or vllm-davinci quantize on it."
            )
        found.append(one.get("block_structure") if strategy == "block" else None)
    return found


def _keep(spares: deque[torch.Tensor], made: torch.Tensor) -> None:
    """Keeps a tensor's memory as a spare, replacing the oldest, if the tensor owns it."""
    if all(made.data_ptr() != spare.data_ptr() for spare in spares):
        spares.append(made.data)  # not a view, which would hold its base tensor


def integer_types(names: Iterable[str]) -> dict[str, str]:
    """Types of an fp8 checkpoint with `--quantization ascend`: fp8 layers become int8.

    Excludes _FLOAT_PRODUCTS and products that are only partly fp8.
    names: of all tensors
    """
    listed = set(names)
    weights = [name for name in listed if name.endswith(".weight")]
    types = {
        name: INTEGERS if scale_of(name, listed) and not _FLOAT_PRODUCTS.search(name) else FLOAT
        for name in weights
    }
    experts = {name: match["experts"] for name in weights if (match := EXPERT.match(name))}
    scaled = {prefix for name, prefix in experts.items() if types[name] == INTEGERS}
    # One expert without scales is an error, which names them.
    types |= {name: INTEGERS for name, prefix in experts.items() if prefix in scaled}
    for parts in FUSED_LAYERS.values():
        for name in weights:
            if not name.endswith(f".{parts[0]}.weight"):
                continue
            prefix = name.removesuffix(f"{parts[0]}.weight")
            own = [f"{prefix}{part}.weight" for part in parts]
            if any(types.get(part) == FLOAT for part in own):
                types |= dict.fromkeys((part for part in own if part in types), FLOAT)
    return types


@register_quantization_config(OF_DEEPSEEK_V4)
@register_quantization_config(NAME)
class NPUFp8Config(NPUQuantizationConfigBase):
    """An fp8 checkpoint whose layers compute in floats: the loader converts its weights."""

    def __init__(self, format: Fp8Weights | None = None) -> None:
        super().__init__()
        self.format = format

    def get_name(self) -> Any:
        return NAME if self.format is None else self.format.method

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NPUFp8Config:
        return cls(Fp8Weights.of(config))

    def maybe_update_config(
        self,
        model_name: str,
        hf_config: PretrainedConfig | None = None,
        revision: str | None = None,
    ) -> None:
        """Raises UnsupportedFeatureError if the checkpoint is not fp8."""
        if self.format is None:
            raise UnsupportedFeatureError(
                f"--quantization {NAME} is for checkpoints that hold fp8 weights, and {model_name}"
                " holds others. Remove it, or make an int8 checkpoint: vllm-davinci quantize "
                "SOURCE DESTINATION."
            )
        logger.info_once(
            "%s holds fp8 weights, which become floats of twice their size while loading. "
            "--quantization ascend keeps them in 8 bits, as W8A8_DYNAMIC.",
            model_name,
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return NPUUnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
