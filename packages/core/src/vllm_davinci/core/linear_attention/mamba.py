"""Mamba1 in a model (Falcon-Mamba, Jamba): vLLM's layer on torch operators."""

import torch
from torch.nn.functional import silu, softplus
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer

from vllm_davinci.core.linear_attention.channel_scan import Scan, recurrent_scan, stepwise_scan
from vllm_davinci.core.linear_attention.chunk_plan import ChunkPlan
from vllm_davinci.core.linear_attention.layer import StatefulLayer


class NPUMambaMixer(StatefulLayer, MambaMixer):
    """vLLM's layer; the stages between its projections are replaced.

    Step sizes are computed after the convolution, so gates are factors of 1, and 0 in padding.
    """

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        channels = self.conv1d.weight.shape[0]
        return (self.conv_kernel_size - 1, channels), (channels, self.ssm_state_size)

    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """hidden_states: [num_tokens, hidden_size]; output: likewise, written. Current stream."""
        mixed, gate = self.in_proj(hidden_states)[0].chunk(2, dim=-1)
        gates = mixed.new_ones(len(mixed), 1, dtype=torch.float32)
        out = self.run_step(mixed, gates).squeeze(1) * silu(gate.float())
        output[: len(mixed)] = self.out_proj(out.to(hidden_states.dtype))[0]

    def _decoded(self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self._with_skipped(recurrent_scan(self._scan(x, gates), state), x)

    def _prefilled(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, plan: ChunkPlan
    ) -> torch.Tensor:
        return self._with_skipped(stepwise_scan(self._scan(x, gates), state, plan), x)

    def _scan(self, x: torch.Tensor, gates: torch.Tensor) -> Scan:
        projected = self.x_proj(x.to(self.x_proj.weight.dtype))[0]
        step, write, read = projected.split(
            [self.time_step_rank, self.ssm_state_size, self.ssm_state_size], dim=-1
        )
        if self.use_rms_norm:
            step = self.dt_layernorm(step.contiguous())
            write = self.b_layernorm(write.contiguous())
            read = self.c_layernorm(read.contiguous())
        steps = softplus(self.dt_proj(step)[0].float() + self.dt_proj.bias.float()) * gates
        return Scan(x * steps, write.float(), read.float(), steps, self.A.detach().float())

    def _with_skipped(self, outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds the skip connection D x to the output."""
        return (outputs + x * self.D.float()).unsqueeze(1)
