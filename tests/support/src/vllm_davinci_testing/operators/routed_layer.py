"""A small layer of routed experts and a shared projection: weights and results.

Computed in plain torch on the CPU, to compare with the layer on ranks.
"""

import math

import torch

from vllm_davinci.operators.quantization import dynamic_quant_in_launch, to_int8

NUM_EXPERTS, TOP_K, INTERMEDIATE_SIZE = 8, 3, 64
# Fused launches support neither smaller sizes nor fp32.
HIDDEN_SIZE = 1024


def random(*shape: int, seed: int) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values / math.sqrt(shape[-1])


GATE = random(NUM_EXPERTS, INTERMEDIATE_SIZE, HIDDEN_SIZE, seed=1)
UP = random(NUM_EXPERTS, INTERMEDIATE_SIZE, HIDDEN_SIZE, seed=2)
DOWN = random(NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE, seed=3)
SHARED = random(HIDDEN_SIZE, HIDDEN_SIZE, seed=4)


class IntegerWeights:
    """One projection of all experts in int8, as in a W8A8_DYNAMIC checkpoint."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.scale = (weight.abs().amax(-1, keepdim=True) / 127).bfloat16()
        self.integers = to_int8(weight / self.scale.float())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by their names in the checkpoint."""
        return {
            "weight": self.integers,
            "weight_scale": self.scale,
            "weight_offset": torch.zeros_like(self.scale),
        }

    def product(self, expert: int, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in], integers; scale: [num_tokens, 1]. Returns [num_tokens, out]."""
        sums = (x.long() @ self.integers[expert].long().t()).float()
        return sums * self.scale[expert].float().t() * scale


GATE_UP_INT8, DOWN_INT8 = IntegerWeights(torch.cat((GATE, UP), 1)), IntegerWeights(DOWN)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns integers and scales of rows, rounded as in fused launches."""
    integers, scale = dynamic_quant_in_launch(x)
    return integers, scale[:, None]


def defined_in_integers(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Returns only the routed sum."""
    best, ids = logits.topk(TOP_K, -1)
    weights = best.softmax(-1).bfloat16().float()
    total = torch.zeros_like(x)
    rows = quantized(x)
    for choice in range(TOP_K):  # in the sum's order
        for expert in range(NUM_EXPERTS):
            gate, up = GATE_UP_INT8.product(expert, *rows).chunk(2, -1)
            hidden = quantized(torch.nn.functional.silu(gate) * up)
            result = DOWN_INT8.product(expert, *hidden).bfloat16().float()
            is_chosen = ids[:, choice, None] == expert
            total += torch.where(is_chosen, weights[:, choice, None] * result, 0)
    return total


def defined(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    weights, ids = logits.softmax(-1).topk(TOP_K, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    total = x @ SHARED.t()
    for expert in range(NUM_EXPERTS):
        hidden = torch.nn.functional.silu(x @ GATE[expert].t()) * (x @ UP[expert].t())
        share = (weights * (ids == expert)).sum(-1, keepdim=True)
        total += torch.where(share != 0, share * (hidden @ DOWN[expert].t()), 0)
    return total
