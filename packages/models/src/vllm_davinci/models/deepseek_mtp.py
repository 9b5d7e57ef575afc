"""DeepSeek's and GLM's multi-token prediction, for models whose export is rotated."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
from vllm.sequence import IntermediateTensors

from vllm_davinci.core.quantization.rotation import ROTATION, has_rotation


class NPUDeepSeekMTP(DeepSeekMTP):
    """vLLM's class; applies the export's rotation to hidden states first, if it has one.

    rot: without a bias, [hidden_size, hidden_size]; None for exports without it
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.rot: nn.Linear | None = None
        if has_rotation(self.quant_config):
            self.rot = nn.Linear(self.config.hidden_size, self.config.hidden_size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """hidden_states: [num_tokens, hidden_size], after the last norm, or from the previous pass.

        Both lack their norm's weight; exports have one matrix for both.
        """
        if self.rot is not None:
            hidden_states = self.rot(hidden_states)
        out: torch.Tensor = super().forward(
            input_ids, positions, hidden_states, intermediate_tensors, inputs_embeds, spec_step_idx
        )
        return out

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded: set[str] = super().load_weights(self._after_rotation(weights))
        return loaded if self.rot is None else loaded | {ROTATION}

    def _after_rotation(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Loads the rotation while passing the weights through; its name has no layer number."""
        for name, tensor in weights:
            if self.rot is not None and name == ROTATION:
                self.rot.weight.data.copy_(tensor)
            else:
                yield name, tensor
