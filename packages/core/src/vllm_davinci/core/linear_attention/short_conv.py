"""A short convolution between two gates in a model (LFM2): vLLM's layer on torch operators."""

from typing import Any

import torch
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from vllm_davinci.core.linear_attention.chunk_plan import ChunkPlan
from vllm_davinci.core.linear_attention.layer import StatefulLayer


class NPUShortConv(StatefulLayer, ShortConv):
    """vLLM's layer with its projections and weights. Its state is the convolution's inputs."""

    activation = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conv1d, self.conv_kernel_size = self.conv, self.L_cache

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.conv_kernel_size - 1, self.conv1d.weight.shape[0]),)

    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """hidden_states: [num_tokens, hidden_size]; output: likewise, written. Current stream."""
        before, after, x = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        mixed = before * x
        convolved = self.run_step(mixed, mixed.new_zeros(len(mixed), 1)).squeeze(1)
        output[: len(mixed)] = self.out_proj(after * convolved.to(after.dtype))[0]

    def _decoded(self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(1)

    def _prefilled(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, plan: ChunkPlan
    ) -> torch.Tensor:
        return x.unsqueeze(1)
