"""Loads quantized experts' tensors, and names the tensor in errors."""

from typing import Any

import torch

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.quantization.loading import TensorLoader
from vllm_davinci.core.quantization.tensors import Extent

# vLLM's names for an expert's parts within one tensor.
SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}


class ExpertTensorLoader(TensorLoader):
    """Records which parts of which experts were loaded."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # (expert number in the checkpoint, w1 | w2 | w3) -> the value, for tensors of one value
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
        # vLLM treats tensors with this attribute as one value per expert.
        is_one = self._spec.extent is Extent.ONE
        known_name = weight_name.replace(self._spec.name, "input_scale") if is_one else weight_name
        is_local: bool = self._put(
            f" of expert {expert_id}, part {shard_id},",
            param,
            loaded_weight,
            known_name,
            shard_id,
            expert_id,
            return_success=True,
        )
        if is_local:
            value = loaded_weight.item() if loaded_weight.numel() == 1 else None
            self.parts[expert_id, shard_id] = value
        return is_local if return_success else None

    def missing(self, num_local: int, shards: tuple[str, ...]) -> str | None:
        """The parts not loaded for this rank's experts, for a message; None if all were."""
        absent = num_local * len(shards) - len(self.parts)
        if not absent:
            return None
        return f"{self.tensor} ({absent} of {num_local * len(shards)} parts)"

    def require_agreement(self) -> None:
        """Raises CheckpointError if gate and up of an expert have different single values."""
        for (expert, shard), value in self.parts.items():
            other = self.parts.get((expert, "w3"), value) if shard == "w1" else value
            if value != other:
                raise CheckpointError(
                    f"{self.tensor} of expert {expert} is {value} for gate_proj and {other} for "
                    "up_proj, which form one product with one input. Export the model with one "
                    "input scale for both."
                )
