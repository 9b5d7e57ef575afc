"""fp8 weights with a scale per block, as DeepSeek publishes them; no NPU here multiplies fp8.

`X.weight` is float8_e4m3fn [out, in], `X.weight_scale_inv` fp32 [ceil(out / rows), ceil(in /
columns)] what each block is to be multiplied by; a block is usually 128 x 128. While it is loaded
such a checkpoint becomes floats (vLLM's quantization `fp8`), or W8A8_DYNAMIC (`ascend`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_davinci.core.components.fused_ops import fused_op
from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.layers.linear import NPUUnquantizedLinearMethod
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.quantization.description import (
    FUSED_LAYERS,
    QuantDescription,
    QuantType,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = init_logger(__name__)

NAME = "fp8"
SCALE = "weight_scale_inv"
DTYPE = torch.float8_e4m3fn
_NAN = 0x7F  # and with the sign
_SIGN_AND_NUMBER = 0x87F0 - 0x10000  # of a bf16 number's 16 bits


class Block(NamedTuple):
    """The size of the blocks that have one scale each."""

    rows: int
    columns: int

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """That of the scales of a weight [out, in]."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)


def block_of(quantization_config: Mapping[str, Any] | None) -> Block | None:
    """The blocks of an fp8 checkpoint, from its config.json, or None for one of another format.

    Raises UnsupportedFeatureError for fp8 without blocks.
    """
    if not quantization_config or quantization_config.get("quant_method") != NAME:
        return None
    size = quantization_config.get("weight_block_size")
    if not isinstance(size, list | tuple) or len(size) != 2:
        raise UnsupportedFeatureError(
            "config.json names fp8 weights without weight_block_size, and only those with a scale "
            "per block (weight_scale_inv) are read. Use the model's float checkpoint, or vllm-"
            "davinci quantize on it."
        )
    return Block(*size)


def dequantized(
    weight: torch.Tensor, scale: torch.Tensor, block: Block
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows of some blocks after those of others, as fp32 [rows, in]: little memory at a time.

    weight: [out, in] fp8; scale: [out blocks, in blocks]
    """
    columns = weight.shape[1]
    for number in range(scale.shape[0]):
        rows = slice(number * block.rows, (number + 1) * block.rows)
        wide = scale[number].float().repeat_interleave(block.columns)[:columns]
        yield rows, _exact(weight[rows]).float().mul_(wide)


def as_floats(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: Block,
    dtype: torch.dtype,
    spares: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """[out, in] in the model's dtype, each value rounded once.

    spares: whose memory the result may take, of one that no other tensor has
    """
    if dtype in (torch.bfloat16, torch.float32) and (convert := fused_op("block_fp8_floats")):
        return convert(weight, scale, block.rows, block.columns, dtype, spares)
    result = torch.empty(weight.shape, dtype=dtype)
    for part, values in dequantized(weight, scale, block):
        result[part] = values
    return result


def _exact(weight: torch.Tensor) -> torch.Tensor:
    """fp8 as bf16, which holds all of its values.

    By its bits, a tenth of the time of torch's conversion: sign and seven bits of exponent and
    mantissa are those of a bf16 number whose exponent counts from 127 in place of 7.
    """
    stored = weight.view(torch.int8)
    if bool(((stored == _NAN) | (stored == _NAN - 128)).any()):
        return weight.to(torch.bfloat16)
    wide = stored.to(torch.int16)
    wide.bitwise_left_shift_(4).bitwise_and_(_SIGN_AND_NUMBER)
    return wide.view(torch.bfloat16).mul_(2.0**120)


def require_scale(
    name: str, weight: torch.Tensor, scale: torch.Tensor | None, block: Block
) -> None:
    """Raises CheckpointError for an fp8 weight whose scales are absent or of another shape.

    name: of the weight
    """
    expected = block.scale_shape(tuple(weight.shape)) if weight.dim() == 2 else None
    if scale is None:
        raise CheckpointError(
            f"{name} holds fp8, and {name}_scale_inv is in no file: without its scales the weight "
            "has no values. Copy the rest of the checkpoint."
        )
    if expected is None or tuple(scale.shape) != expected:
        raise CheckpointError(
            f"{name}_scale_inv has shape {list(scale.shape)}, and the weight {list(weight.shape)} "
            f"in blocks of {block.rows} x {block.columns} needs {expected}. Copy the file again."
        )


def described(names: Iterable[str], source: str) -> QuantDescription:
    """How an fp8 checkpoint loads with `--quantization ascend`: what is fp8 becomes int8.

    But for kv_b_proj, of which MLA needs the floats, and products of which a part is not fp8.
    names: of all tensors
    """
    listed = set(names)
    weights = [name for name in listed if name.endswith(".weight")]
    types = {
        name: (
            QuantType.W8A8_DYNAMIC
            if f"{name}_scale_inv" in listed and "kv_b_proj." not in name
            else QuantType.FLOAT
        ).value
        for name in weights
    }
    for parts in FUSED_LAYERS.values():
        for name in weights:
            if not name.endswith(f".{parts[0]}.weight"):
                continue
            prefix = name.removesuffix(f"{parts[0]}.weight")
            own = [f"{prefix}{part}.weight" for part in parts]
            if any(types.get(part) == QuantType.FLOAT.value for part in own):
                types |= dict.fromkeys((part for part in own if part in types), "FLOAT")
    return QuantDescription(types, {}, source)


def tensor_names(model: str, revision: str | None) -> list[str]:
    """The tensors of a checkpoint, by its headers, or on the hub by its index."""
    directory = Path(model)
    if directory.is_dir():
        names: list[str] = []
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                names += file.keys()
        return names
    index = get_hf_file_to_dict("model.safetensors.index.json", model, revision)
    if index is None:
        raise CheckpointError(
            f"{model} has no model.safetensors.index.json, by which to find its fp8 weights. "
            "Download it and name the directory."
        )
    return list(index["weight_map"])


class NPUFp8Config(QuantizationConfig):
    """An fp8 checkpoint whose layers compute in floats: the loader turns its weights into them."""

    def __init__(self, block: Block | None = None) -> None:
        super().__init__()
        self._block = block

    def get_name(self) -> Any:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NPUFp8Config:
        return cls(block_of(config))

    def maybe_update_config(
        self,
        model_name: str,
        hf_config: PretrainedConfig | None = None,
        revision: str | None = None,
    ) -> None:
        """Raises UnsupportedFeatureError where the checkpoint is not of fp8."""
        if self._block is None:
            raise UnsupportedFeatureError(
                f"--quantization {NAME} is for checkpoints that hold fp8 weights, and {model_name} "
                "holds others. Leave it out, or make an int8 checkpoint: vllm-davinci quantize "
                "SOURCE DESTINATION."
            )
        logger.info_once(
            "%s holds fp8 weights, which become floats of twice their size while loading. "
            "--quantization ascend keeps them in 8 bits, as W8A8_DYNAMIC.",
            model_name,
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return NPUUnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
