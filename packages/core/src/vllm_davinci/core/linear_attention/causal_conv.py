"""A short causal convolution over the tokens of each request, per channel."""

from typing import NamedTuple

import torch
from torch.nn.functional import silu

from vllm_davinci.core.linear_attention.chunk_plan import ChunkPlan


class Conv(NamedTuple):
    """A layer's convolution.

    weight: [width, channels], fp32, oldest token first
    bias:   [channels], fp32
    ends_in_silu: whether SiLU is applied to the result
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    ends_in_silu: bool = True

    def finished(self, sums: torch.Tensor) -> torch.Tensor:
        """Adds the bias to the sums over the taps and applies SiLU, in place if possible."""
        if self.bias is not None:
            sums += self.bias
        return silu(sums) if self.ends_in_silu else sums


def conv_of_decodes(
    x: torch.Tensor, kept: torch.Tensor, conv: Conv
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes one token of each of n requests.

    x:    [n, channels], in the model's dtype
    kept: [n, width - 1, channels], inputs of the previous tokens, oldest first, dtype of x
    Returns [n, channels] in fp32, and the inputs kept for the next token, like `kept`.
    """
    seen = torch.cat([kept, x.unsqueeze(1)], dim=1)
    return conv.finished((seen.float() * conv.weight).sum(dim=1)), seen[:, 1:]


def conv_of_prefills(
    x: torch.Tensor, kept: torch.Tensor, conv: Conv, plan: ChunkPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes all new tokens of a plan's requests.

    x:    [tokens, channels], in vLLM's order
    kept: [n, width - 1, channels] in the plan's order, zero for a request without a state
    Returns [slots in the chunks, channels] in fp32 (in padding: the result for zeros), and the new
    `kept`.
    """
    rows = torch.cat([kept.flatten(0, 1), x, x.new_zeros(1, x.shape[1])])
    sum_ = rows.index_select(0, plan.taps[0]).float() * conv.weight[0]
    for tap, of_tap in zip(plan.taps[1:], conv.weight[1:], strict=True):
        sum_.addcmul_(rows.index_select(0, tap).float(), of_tap)
    return conv.finished(sum_), rows.index_select(0, plan.kept).view_as(kept)
