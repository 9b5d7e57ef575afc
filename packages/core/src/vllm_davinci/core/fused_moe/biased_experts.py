"""Experts with biases and a clipped SwiGLU (gpt-oss)."""

from dataclasses import dataclass

import torch
import torch_npu

from vllm_davinci.core.fused_moe.local_experts import Experts, grouped_matmul

# From vLLM's SwigluOAIAndMul, which does not read them from the model's configuration.
ALPHA, LIMIT = 1.702, 7.0


@dataclass(frozen=True, kw_only=True)
class BiasedExperts(Experts):
    """Unquantized experts of gate * sigmoid(1.702 gate) * (up + 1), both clipped at 7.

    gate_up:      [num_local, hidden_size, 2 * intermediate_size], gate at even, up at odd columns
    gate_up_bias: [num_local, 2 * intermediate_size]
    down:         [num_local, intermediate_size, hidden_size]
    down_bias:    [num_local, hidden_size], zeros on all but one of the ranks that share experts
    Biases are fp32 for weights in bf16, as the grouped product requires.
    """

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor

    def _compute(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        """See Experts.__call__. Three launches."""
        gate_up = grouped_matmul(rows, self.gate_up, tokens_per_expert, bias=[self.gate_up_bias])
        activated = torch_npu.npu_clipped_swiglu(
            gate_up, alpha=ALPHA, limit=LIMIT, bias=1.0, interleaved=True
        )
        return grouped_matmul(activated, self.down, tokens_per_expert, bias=[self.down_bias])


def bias_for_products(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A loaded bias in the dtype that the grouped product requires for weights of its dtype.

    The parameter becomes that tensor, so that biases are reloaded into it.
    """
    if parameter.dtype == torch.bfloat16:
        parameter.data = parameter.data.float()
    return parameter.data
