"""Loads a quantized layer's tensors, and names the tensor in errors."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_davinci.core.errors import RELEASE, CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.quantization.scheme import Scheme
from vllm_davinci.core.quantization.tensors import (
    TensorSpec,
    conversion,
    deq_scale_as_float,
    dtype_name,
)
from vllm_davinci.core.weight_files.layer_names import shortened

SCALES = frozenset({"weight_scale", "input_scale", "deq_scale", "weight_scale_inv", "scales"})
CHECK_COMMAND = "vllm-davinci check-model DIRECTORY lists all its problems"


class TensorLoader:
    """vLLM's weight loader of a layer, for one tensor. Subclasses record what was loaded.

    tensor:       its name, for messages
    spec:         what a checkpoint may hold for it
    params_dtype: the model's
    """

    def __init__(
        self, load: Callable[..., Any], tensor: str, spec: TensorSpec, params_dtype: torch.dtype
    ) -> None:
        self._load = load
        self._spec = spec
        self._convert = conversion(spec, params_dtype)
        self.tensor = tensor
        self.is_closed = False  # True once the layer has derived its operands from its tensors

    def _put(
        self, part: str, parameter: torch.Tensor, loaded: torch.Tensor, *place: Any, **options: Any
    ) -> Any:
        """Calls vLLM's loader. Raises CheckpointError if the tensor does not fit.

        part: part of the tensor, for the message
        """
        if self.is_closed:
            raise UnsupportedFeatureError(
                f"New weights are not supported in {RELEASE} for {self.tensor}, which is quantized"
                " and already prepared. Restart the engine with the new checkpoint, or update a "
                "model that is not quantized."
            )
        # A parameter would accept any dtype and round it to its own.
        if not self._spec.accepts(loaded.dtype):
            raise CheckpointError(
                f"{self.tensor}{part} holds {dtype_name(loaded.dtype)} in the checkpoint and must "
                f"hold {self._spec.accepted()}: its file does not match its entry in the "
                f"description. Export the model again: {CHECK_COMMAND}."
            )
        try:
            converted = loaded if self._convert is None else self._convert(loaded)
            return self._load(parameter, converted, *place, **options)
        except (AssertionError, RuntimeError, IndexError) as error:
            raise CheckpointError(
                f"{self.tensor}{part} has shape {list(loaded.shape)} in the checkpoint, which does"
                f" not fit its parameter of shape {list(parameter.shape)} on this rank ({error}). "
                f"The checkpoint does not match its config.json: {CHECK_COMMAND}."
            ) from error


class RecordingLoader(TensorLoader):
    """Records the loaded parts of a linear layer's tensor.

    Parts of a fused layer are loaded one by one, each with a shard id; None means all of it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shards: set[Any] = set()

    def __call__(self, parameter: Any, loaded: torch.Tensor, *shard: Any, **options: Any) -> None:
        part = f", part {shard[0]!r}" if shard and shard[0] is not None else ""
        self._put(part, parameter, loaded, *shard, **options)
        ids = shard[0] if shard and isinstance(shard[0], tuple) else shard or (None,)
        self.shards.update(ids)

    def missing(self, expected: Sequence[Any]) -> list[str]:
        """Names the `expected` parts that were not loaded, for a message."""
        if None in self.shards:
            return []
        if not self.shards:
            return [self.tensor]
        return [f"{self.tensor} (part {part!r})" for part in expected if part not in self.shards]


def require_loaded(prefix: str, scheme: Scheme, missing: Sequence[str]) -> None:
    """Raises CheckpointError if tensors of the layer are missing in the checkpoint."""
    if missing:
        raise CheckpointError(
            f"{prefix} is quantized as {scheme.name}, and the checkpoint lacks "
            f"{shortened(missing, 6)}. Copy the export again or export it again: {CHECK_COMMAND}."
        )


def require_symmetric(prefix: str, scheme: Scheme, offset: str, values: torch.Tensor) -> None:
    """Raises UnsupportedFeatureError if a weight's offsets are not zero.

    offset: name of the tensor that holds them
    """
    if bool(values.any()):
        raise UnsupportedFeatureError(
            f"{prefix}.{offset} is not zero: the weight is asymmetric, and {scheme.name} "
            "multiplies symmetric ones. Export the model with symmetric weights."
        )


def require_usable(name: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError for invalid values of a scale or an offset.

    A scale must be positive and finite, an input's offset an int8.
    """
    part = name.rpartition(".")[2]
    if part == "input_offset":
        values = tensor.float()
        is_good = (values == values.round()) & (values >= -128) & (values <= 127)
        must = "integers from -128 to 127"
    elif part in SCALES or part.endswith("_scale_inv"):
        values = deq_scale_as_float(tensor).float()
        low, high = (float(end) for end in values.aminmax())
        if low > 0 and math.isfinite(high):
            return
        is_good, must = values.isfinite() & (values > 0), "positive numbers"
    else:
        return
    if bad := int((~is_good).sum()):
        raise CheckpointError(
            f"{name} holds {float(values[~is_good][0])} ({bad} of {values.numel()} entries are "
            f"out of range) and must hold {must}. Copy the file again, or export the model again."
        )
