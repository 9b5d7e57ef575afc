"""Routed experts: selection, sort, grouped products, weighted sum."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci.operators.calls.call import OperatorCall, npu
from vllm_davinci.operators.calls.operands import (
    BFLOAT16,
    DTYPES,
    FLOAT32,
    int8,
    name_of,
    normal,
    permuted,
    scales,
    weight,
)
from vllm_davinci.operators.calls.sizes import ModelSizes
from vllm_davinci.operators.experts import choose_experts
from vllm_davinci.operators.products import product as float_product
from vllm_davinci.operators.products import quant_matmul
from vllm_davinci.operators.quantization import dynamic_quant

TOKENS = (1, 16, 100)
# Maximum experts of one rank in these calls.
MOST_EXPERTS = 4
COUNTS = 1  # expert_tokens_num_type
ROWS_MAY_BE_ABSENT = 3  # drop_pad_mode, with an index by token
RANKS = 4


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    if not model.all_experts:
        return
    for tokens in TOKENS:
        yield _choice(model, tokens)
    for tokens, quantized in product(TOKENS, (False, True)):
        yield _sort(model, tokens, quantized)
    for dtype in DTYPES:
        yield _sum(model, 16, dtype)
        yield _products(model, dtype)
    yield _integer_products(model)
    yield _rows_of_ranks(model)


def _choice(model: ModelSizes, tokens: int) -> OperatorCall:
    rule = model.top_k, model.groups, model.chosen_groups, model.is_sigmoid, model.scaling_factor
    logits = normal(tokens, model.all_experts, dtype=FLOAT32)
    said = f"{tokens} tokens, float32"
    if not model.is_sigmoid:
        return OperatorCall(
            "npu_moe_gating_top_k_softmax_v2", "MoeGatingTopKSoftmaxV2", said, {"logits": logits},
            lambda logits: npu.npu_moe_gating_top_k_softmax_v2(logits, k=model.top_k, renorm=1)[:2],
            lambda logits: choose_experts(logits, None, *rule),
        )  # fmt: skip
    return OperatorCall(
        "npu_moe_gating_top_k", "MoeGatingTopK", said,
        {"logits": logits, "bias": normal(model.all_experts, dtype=FLOAT32, scale=0.1)},
        lambda logits, bias: npu.npu_moe_gating_top_k(
            logits, model.top_k, bias=bias, k_group=model.chosen_groups, group_count=model.groups,
            group_select_mode=1, norm_type=1, out_flag=False,
            routed_scaling_factor=model.scaling_factor,
        )[:2],
        lambda logits, bias: choose_experts(logits, bias, *rule),
    )  # fmt: skip


def _sort(model: ModelSizes, tokens: int, quantized: bool) -> OperatorCall:
    """Sorts the rows of rank 1's experts."""
    first, last = model.experts, 2 * model.experts

    def assigned(generator: Generator) -> Tensor:
        """Distinct experts for each token: [tokens, top_k], int32."""
        scores = torch.rand(tokens, model.all_experts, generator=generator)
        return scores.topk(model.top_k, -1)[1].int()

    def call(x: Tensor, ids: Tensor) -> list[Tensor | None]:
        rows, place, counts, steps = npu.npu_moe_init_routing_v2(
            x, ids, active_num=ids.numel(), expert_num=model.all_experts,
            expert_tokens_num_type=COUNTS, expert_tokens_num_flag=True,
            active_expert_range=[first, last], quant_mode=1 if quantized else -1,
        )  # fmt: skip
        used = int(counts.sum())
        return [rows[:used], place, counts, steps[:used] if quantized else None]

    def defined(x: Tensor, ids: Tensor) -> list[Tensor | None]:
        flat = ids.flatten().long()
        own = (flat >= first) & (flat < last)
        order = flat.masked_fill(~own, model.all_experts).argsort(stable=True)[: int(own.sum())]
        place = torch.full((flat.numel(),), -1, dtype=torch.int32)
        place[order] = torch.arange(len(order), dtype=torch.int32)
        counts = flat[own].bincount(minlength=last)[first:]
        rows = x[order // model.top_k]
        integers, steps = dynamic_quant(rows) if quantized else (rows, None)
        return [integers, place, counts, steps]

    said = f"{tokens} tokens, {'int8' if quantized else 'bfloat16'}"
    return OperatorCall(
        "npu_moe_init_routing_v2", "MoeInitRoutingV3", said,
        {"x": normal(tokens, model.hidden), "ids": assigned}, call, defined, exact=not quantized,
    )  # fmt: skip


def _sum(model: ModelSizes, tokens: int, dtype: torch.dtype) -> OperatorCall:
    """The weighted sum of each token's rows, without experts of other ranks."""
    count = tokens * model.top_k

    def some(generator: Generator) -> Tensor:
        place = permuted(count)(generator)
        place[::3] = -1
        return place

    def call(rows: Tensor, weights: Tensor, place: Tensor) -> Any:
        return npu.npu_moe_finalize_routing(
            rows, None, None, None, weights, place, None, drop_pad_mode=ROWS_MAY_BE_ABSENT
        )

    def defined(rows: Tensor, weights: Tensor, place: Tensor) -> Tensor:
        table = place.view(tokens, model.top_k).long()
        parts = rows[0].float()[table].masked_fill((table < 0)[..., None], 0.0)
        return (parts * weights.float()[..., None]).sum(1).to(rows.dtype)

    return OperatorCall(
        "npu_moe_finalize_routing", "MoeFinalizeRoutingV2", f"{tokens} tokens, {name_of(dtype)}",
        {
            "rows": normal(1, count, model.hidden, dtype=dtype),
            "weights": scales(tokens, model.top_k, least=0.0, most=1.0, dtype=dtype),
            "place": some,
        },
        call, defined,
    )  # fmt: skip


def _groups(model: ModelSizes) -> tuple[int, list[int]]:
    """Numbers of rows per expert: some experts have none, one, few and many."""
    experts = min(max(model.experts, 2), MOST_EXPERTS)
    return experts, [5, 0, 1, 40][:experts]


def _products(model: ModelSizes, dtype: torch.dtype) -> OperatorCall:
    experts, counts = _groups(model)

    def defined(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        parts = zip(rows.split(counts.tolist()), weight, strict=True)
        return torch.cat([float_product(own, each) for own, each in parts])

    return OperatorCall(
        "npu_grouped_matmul", "GroupedMatmulV5", f"{experts} experts, {name_of(dtype)}",
        {
            "rows": normal(sum(counts), model.hidden, dtype=dtype),
            "weight": weight(experts, model.hidden, 2 * model.expert_intermediate, dtype=dtype),
            "counts": torch.tensor(counts),
        },
        lambda rows, weight, counts: npu.npu_grouped_matmul(
            [rows], [weight], group_list=counts, split_item=3, group_type=0, group_list_type=1
        )[0],
        defined,
    )  # fmt: skip


def _integer_products(model: ModelSizes) -> OperatorCall:
    experts, counts = _groups(model)
    columns = 2 * model.expert_intermediate

    def call(rows: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor, counts: Tensor) -> Any:
        return npu.npu_grouped_matmul(
            [rows], [weight], scale=[scale], per_token_scale=[row_scale], group_list=counts,
            split_item=3, group_type=0, group_list_type=1, output_dtype=BFLOAT16,
        )[0]  # fmt: skip

    def defined(
        rows: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor, counts: Tensor
    ) -> Tensor:
        each = (rows.split(counts.tolist()), row_scale.split(counts.tolist()), weight, scale)
        return torch.cat(
            [quant_matmul(x, own, w, s, None, BFLOAT16) for x, own, w, s in zip(*each, strict=True)]
        )

    return OperatorCall(
        "npu_grouped_matmul", "GroupedMatmulV5", f"{experts} experts, int8",
        {
            "rows": int8(sum(counts), model.hidden),
            "weight": int8(experts, model.hidden, columns),
            "scale": scales(experts, columns, dtype=BFLOAT16),
            "row_scale": scales(sum(counts)),
            "counts": torch.tensor(counts),
        },
        call, defined,
    )  # fmt: skip


def _rows_of_ranks(model: ModelSizes) -> OperatorCall:
    """Sorts rows received from several ranks by this rank's experts."""
    generator = Generator().manual_seed(3)
    sent = torch.randint(0, 4, (RANKS, model.experts), generator=generator, dtype=torch.int32)
    sent[0, 0] = 2
    total = int(sent.sum())

    def defined(rows: Tensor, counts: Tensor, steps: Tensor) -> list[Tensor]:
        expert = torch.arange(model.experts).repeat(RANKS).repeat_interleave(counts.flatten())
        order = expert.argsort(stable=True)
        return [rows[order], steps[order], order.int(), counts.sum(0, dtype=torch.int32)]

    return OperatorCall(
        "npu_moe_re_routing", "MoeReRouting", f"{RANKS} ranks",
        {"rows": normal(total, model.hidden), "counts": sent, "steps": scales(total)},
        lambda rows, counts, steps: npu.npu_moe_re_routing(
            rows, counts, per_token_scales=steps, expert_token_num_type=COUNTS
        ),
        defined, exact=True,
    )  # fmt: skip
