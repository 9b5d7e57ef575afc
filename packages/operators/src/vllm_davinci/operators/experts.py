"""Routed experts."""

import torch
from torch import Tensor

from vllm_davinci.operators.products import product
from vllm_davinci.operators.quantization import dynamic_quant


def experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    first_expert: int,
    num_experts: int,
) -> Tensor:
    """The weighted sum over each token's experts on this rank.

    x:            [num_tokens, hidden_size]
    topk_weights: [num_tokens, top_k]
    topk_ids:     [num_tokens, top_k], int32, numbers over all ranks
    gate_up:      [num_local, hidden_size, 2 * intermediate_size], gate before up
    down:         [num_local, intermediate_size, hidden_size]
    first_expert: this rank holds the experts [first_expert, first_expert + num_local) of
                  num_experts
    Returns a tensor like x: zeros for a token without experts here.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for local in range(gate_up.shape[0]):
        token, choice = (topk_ids == first_expert + local).nonzero(as_tuple=True)
        gate, up = product(x[token], gate_up[local]).float().chunk(2, dim=-1)
        hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        weights = topk_weights[token, choice].float().unsqueeze(-1)
        out.index_add_(0, token, product(hidden, down[local]).float() * weights)
    return out.to(x.dtype)


def experts_w8a8(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    first_expert: int,
    num_experts: int,
) -> Tensor:
    """`experts` with int8 weights and a dynamic scale per row.

    gate_up, down: as in `experts`, int8
    gate_up_scale: [num_local, 2 * intermediate_size], fp32
    down_scale:    [num_local, hidden_size], fp32, or bf16 for a bf16 x
    Sums of products are exact integers; a row is quantized before each of the two products.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for local in range(gate_up.shape[0]):
        token, choice = (topk_ids == first_expert + local).nonzero(as_tuple=True)
        rows, scales = dynamic_quant(x[token])
        sums = rows.double() @ gate_up[local].double()
        gate, up = (sums.float() * gate_up_scale[local] * scales.unsqueeze(-1)).chunk(2, dim=-1)
        rows, scales = dynamic_quant(torch.nn.functional.silu(gate) * up)
        sums = rows.double() @ down[local].double()
        result = sums.float() * down_scale[local].float() * scales.unsqueeze(-1)
        weights = topk_weights[token, choice].float().unsqueeze(-1)
        out.index_add_(0, token, result.to(x.dtype).float() * weights)
    return out.to(x.dtype)


def routed_experts(
    x: Tensor,
    router_logits: Tensor,
    correction_bias: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    num_groups: int,
    num_chosen_groups: int,
    is_sigmoid: bool,
    scaling_factor: float,
    first_expert: int,
    num_experts: int,
) -> Tensor:
    """Selects each token's experts, then computes `experts`.

    router_logits:   [num_tokens, num_experts], fp32 or 16 bits
    correction_bias: [num_experts], added to the scores for the selection only, or None; logits are
                     converted to its dtype
    num_groups, num_chosen_groups: experts are selected from the best groups; a group's score is the
                     sum of its two best with a correction bias, its best without; 1, 1 for no
                     groups
    is_sigmoid:      True: sigmoid scores, the selected ones scaled to sum to one; False: softmax,
                     scaled so only without groups, bias and factor
    scaling_factor:  multiplies the weights
    Source: DeepSeek-V3 technical report, section 2.1.2.
    """
    topk_weights, topk_ids = choose_experts(
        router_logits,
        correction_bias,
        top_k,
        num_groups,
        num_chosen_groups,
        is_sigmoid,
        scaling_factor,
    )
    return experts(x, topk_weights.to(x.dtype), topk_ids, gate_up, down, first_expert, num_experts)


def routed_experts_w8a8(
    x: Tensor,
    router_logits: Tensor,
    correction_bias: Tensor | None,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    top_k: int,
    num_groups: int,
    num_chosen_groups: int,
    is_sigmoid: bool,
    scaling_factor: float,
    first_expert: int,
    num_experts: int,
) -> Tensor:
    """Selects each token's experts as in `routed_experts`, then computes `experts_w8a8`."""
    topk_weights, topk_ids = choose_experts(
        router_logits,
        correction_bias,
        top_k,
        num_groups,
        num_chosen_groups,
        is_sigmoid,
        scaling_factor,
    )
    return experts_w8a8(
        x,
        topk_weights.to(x.dtype),
        topk_ids,
        gate_up,
        gate_up_scale,
        down,
        down_scale,
        first_expert,
        num_experts,
    )


def choose_experts(
    router_logits: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    num_groups: int,
    num_chosen_groups: int,
    is_sigmoid: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Weights (fp32) and ids (int32) of the selected experts: [num_tokens, top_k] each; see
    `routed_experts`.
    """
    logits = router_logits.float()
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    choice = scores if correction_bias is None else scores + correction_bias.float()
    groups = choice.view(choice.shape[0], num_groups, -1)
    best = groups.amax(-1) if correction_bias is None else groups.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(num_chosen_groups, dim=-1).indices, True)
    choice = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    topk_ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, topk_ids)
    is_plain = num_groups == 1 and correction_bias is None and scaling_factor == 1.0
    if is_sigmoid or is_plain:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scaling_factor, topk_ids.to(torch.int32)
