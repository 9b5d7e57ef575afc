"""Loading of quantized experts' tensors, so that a bad checkpoint names its tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.quantization.loading import CHECK_COMMAND

# What vLLM calls the parts of an expert that one of its tensors holds.
SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}


class ExpertTensorLoader:
    """vLLM's loader of expert weights, which remembers which parts of one tensor came."""

    def __init__(
        self,
        load: Any,
        tensor: str,
        convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._load = load
        self._convert = convert
        self.tensor = tensor
        # (expert's number in the checkpoint, w1 | w2 | w3) -> the value, of tensors of one
        self.parts: dict[tuple[int, str], float | None] = {}

    def __call__(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Raises CheckpointError when the tensor does not fit its place."""
        converted = loaded_weight if self._convert is None else self._convert(loaded_weight)
        # vLLM has a case for one value per expert, and knows it by this name.
        known_name = weight_name.replace("input_offset", "input_scale")
        try:
            is_local = self._load(
                param, converted, known_name, shard_id, expert_id, return_success=True
            )
        except (AssertionError, RuntimeError, IndexError) as error:
            raise CheckpointError(
                f"{self.tensor} of expert {expert_id}, part {shard_id}, has shape "
                f"{list(loaded_weight.shape)} in the checkpoint, which does not fit its place of "
                f"shape {list(param.shape)} on this rank ({error}). The checkpoint does not belong "
                f"to its config.json: {CHECK_COMMAND}."
            ) from error
        if is_local:
            value = loaded_weight.item() if loaded_weight.numel() == 1 else None
            self.parts[expert_id, shard_id] = value
        return is_local if return_success else None

    def missing(self, num_local: int, shards: tuple[str, ...]) -> str | None:
        """What did not come for the experts of this rank, or None."""
        absent = num_local * len(shards) - len(self.parts)
        if not absent:
            return None
        return f"{self.tensor} ({absent} of {num_local * len(shards)} parts)"

    def require_agreement(self) -> None:
        """Raises CheckpointError when gate and up of an expert have different values of one."""
        for (expert, shard), value in self.parts.items():
            other = self.parts.get((expert, "w3"), value) if shard == "w1" else value
            if value != other:
                raise CheckpointError(
                    f"{self.tensor} of expert {expert} is {value} for gate_proj and {other} for "
                    "up_proj, which are one product of one input. Export the model with one input "
                    "scale for both."
                )
