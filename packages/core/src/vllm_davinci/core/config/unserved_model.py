"""Stand-in, in vLLM's registry, for models whose definitions cannot be imported here."""

from typing import Any

import torch
from torch import nn

from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError


class UnservedModel(nn.Module):
    """Has a text model's methods, so that start-up reaches the check that refuses its name."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        names = ", ".join(vllm_config.model_config.architectures)
        raise UnsupportedFeatureError(f"not available in {RELEASE}: {names}. Choose another model.")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError
