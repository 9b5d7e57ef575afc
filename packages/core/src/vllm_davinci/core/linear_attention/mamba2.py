"""Mamba2 in a model (Nemotron-H, Granite 4): vLLM's layer on torch operators."""

import torch
from torch.nn.functional import softplus
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from vllm_davinci.core.linear_attention.chunk_plan import ChunkPlan
from vllm_davinci.core.linear_attention.layer import StatefulLayer
from vllm_davinci.core.linear_attention.selective_scan import Scan, chunked_scan, recurrent_scan


class NPUMambaMixer2(StatefulLayer, MambaMixer2):
    """vLLM's layer; the stages between its projections are replaced.

    Its gates are the step sizes of all heads.
    """

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        kept = (self.conv_kernel_size - 1, self.tped_conv_size)
        return kept, (self.tped_dt_size, self.head_dim, self.ssm_state_size)

    def forward(
        self, hidden_states: torch.Tensor, mup_vector: torch.Tensor | None = None
    ) -> torch.Tensor:
        """hidden_states: [num_tokens, hidden_size]. Returns the same shape. On the current stream.

        mup_vector: [entries of the projection], factors of the projection; or None
        """
        projected, _ = self.in_proj(hidden_states)
        if mup_vector is not None:
            projected = projected * mup_vector
        z, mixed, step = projected.split(
            [self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        gates = softplus(step.float() + self.dt_bias.float())
        out = self.run_step(mixed, gates).to(hidden_states.dtype)
        return self.out_proj(self.norm(out.flatten(1), z))[0]

    def _decoded(self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        scan, skipped = self._scan(x, gates)
        return (recurrent_scan(scan, self._per_group(state)) + skipped).flatten(1, 2)

    def _prefilled(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, plan: ChunkPlan
    ) -> torch.Tensor:
        scan, skipped = self._scan(x, gates)
        return (chunked_scan(scan, self._per_group(state), plan) + skipped).flatten(1, 2)

    def _scan(self, x: torch.Tensor, gates: torch.Tensor) -> tuple[Scan, torch.Tensor]:
        """The scan's inputs, and the skip connection D x."""
        value, write, read = self.split_hidden_states_B_C_fn(x)
        value = self._per_group(value.unflatten(-1, (-1, self.head_dim)))
        steps = self._per_group(gates)
        of_heads = self._per_group(torch.stack([self.A.float(), self.D.float()]))
        rate, skip = of_heads.unbind(0)
        by_group = (-1, self.ssm_state_size)
        scan = Scan(
            value * steps.unsqueeze(-1),
            write.unflatten(-1, by_group),
            read.unflatten(-1, by_group),
            steps * rate,
        )
        return scan, value * skip.unsqueeze(-1)

    def _per_group(self, x: torch.Tensor) -> torch.Tensor:
        """Splits the dimension of heads, the second one, by groups."""
        groups = self.n_groups // self.tp_size
        return x.unflatten(1, (groups, -1))
