"""Routed experts: the choice, the sort, the products by groups, the weighted sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci.verify.operators.call import OperatorCall
from vllm_davinci.verify.operators.operands import (
    BFLOAT16,
    DTYPES,
    int8,
    name_of,
    normal,
    permuted,
    scales,
    weight,
)
from vllm_davinci.verify.operators.quantization import with_own_scales
from vllm_davinci.verify.operators.shapes import ModelSizes

TOKENS = (1, 16, 100)
# Experts of one rank that are computed here at most.
MOST_EXPERTS = 4
COUNTS = 1  # expert_tokens_num_type
ROWS_MAY_BE_ABSENT = 3  # drop_pad_mode, with an index by token


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    if not model.all_experts:
        return
    for tokens in TOKENS:
        yield _choice(model, tokens)
        for quantized in (False, True):
            yield _sort(model, tokens, quantized)
    for dtype in DTYPES:
        yield _sum(model, 16, dtype)
        yield _products(model, dtype)
    yield _integer_products(model)
    yield _rows_of_ranks(model)


def _choice(model: ModelSizes, tokens: int) -> OperatorCall:
    import torch_npu

    def make(generator: Generator) -> dict[str, Any]:
        logits = normal(generator, tokens, model.all_experts, dtype=torch.float32)
        if not model.is_sigmoid:
            return {"logits": logits}
        return {"logits": logits, "bias": normal(generator, model.all_experts, dtype=torch.float32,
                                                 scale=0.1)}  # fmt: skip

    def by_sigmoid(logits: Tensor, bias: Tensor) -> Any:
        weights, ids, _ = torch_npu.npu_moe_gating_top_k(
            logits, model.top_k, bias=bias, k_group=model.chosen_groups, group_count=model.groups,
            group_select_mode=1, norm_type=1, out_flag=False,
            routed_scaling_factor=model.scaling_factor,
        )  # fmt: skip
        return weights, ids

    def defined(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Source: DeepSeek-V3 technical report, section 2.1.2."""
        scores = logits.sigmoid()
        groups = (scores + bias).unflatten(1, (model.groups, -1))
        best = groups.topk(2, -1)[0].sum(-1).topk(model.chosen_groups, -1)[1]
        kept = torch.zeros(tokens, model.groups, dtype=torch.bool).scatter_(1, best, True)
        ids = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1).topk(model.top_k, -1)[1]
        picked = scores.gather(1, ids)
        return picked / picked.sum(-1, keepdim=True) * model.scaling_factor, ids.int()

    def by_softmax(logits: Tensor) -> Any:
        weights, ids, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(logits, k=model.top_k, renorm=1)
        return weights, ids

    def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = logits.topk(model.top_k, -1)
        return values.softmax(-1), ids.int()

    said = f"{tokens} tokens, float32"
    if model.is_sigmoid:
        name = "npu_moe_gating_top_k"
        return OperatorCall(name, "MoeGatingTopK", said, make, by_sigmoid, defined)
    name = "npu_moe_gating_top_k_softmax_v2"
    return OperatorCall(name, "MoeGatingTopKSoftmaxV2", said, make, by_softmax, softmax)


def _assigned(model: ModelSizes, generator: Generator, tokens: int) -> Tensor:
    """Different experts for each token: [tokens, top_k], int32."""
    scores = torch.rand(tokens, model.all_experts, generator=generator)
    return scores.topk(model.top_k, -1)[1].int()


def _sort(model: ModelSizes, tokens: int, quantized: bool) -> OperatorCall:
    """Rows of the experts of rank 1, in their order."""
    import torch_npu

    first, last = model.experts, 2 * model.experts

    def make(generator: Generator) -> dict[str, Any]:
        x = normal(generator, tokens, model.hidden)
        return {"x": x, "ids": _assigned(model, generator, tokens)}

    def call(x: Tensor, ids: Tensor) -> list[Tensor | None]:
        rows, place, counts, steps = torch_npu.npu_moe_init_routing_v2(
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
        if not quantized:
            return [rows, place, counts, None]
        integers, steps = with_own_scales(rows)
        return [integers, place, counts, steps]

    said = f"{tokens} tokens, {'int8' if quantized else 'bfloat16'}"
    return OperatorCall(
        "npu_moe_init_routing_v2", "MoeInitRoutingV3", said, make, call, defined,
        exact=not quantized,
    )  # fmt: skip


def _sum(model: ModelSizes, tokens: int, dtype: torch.dtype) -> OperatorCall:
    """The weighted sum of each token's rows; a choice of another rank has none."""
    import torch_npu

    count = tokens * model.top_k

    def make(generator: Generator) -> dict[str, Any]:
        place = permuted(generator, count).int()
        place[::3] = -1
        return {
            "rows": normal(generator, 1, count, model.hidden, dtype=dtype),
            "weights": torch.rand(tokens, model.top_k, generator=generator).to(dtype),
            "place": place,
        }

    def call(rows: Tensor, weights: Tensor, place: Tensor) -> Tensor:
        return torch_npu.npu_moe_finalize_routing(
            rows, None, None, None, weights, place, None, drop_pad_mode=ROWS_MAY_BE_ABSENT
        )

    def defined(rows: Tensor, weights: Tensor, place: Tensor) -> Tensor:
        table = place.view(tokens, model.top_k).long()
        parts = rows[0].float()[table].masked_fill((table < 0)[..., None], 0.0)
        return (parts * weights.float()[..., None]).sum(1).to(rows.dtype)

    said = f"{tokens} tokens, {name_of(dtype)}"
    return OperatorCall(
        "npu_moe_finalize_routing", "MoeFinalizeRoutingV2", said, make, call, defined
    )


def _groups(model: ModelSizes) -> tuple[int, list[int]]:
    """Experts, and rows of each: none, one, few and many."""
    experts = min(max(model.experts, 2), MOST_EXPERTS)
    return experts, [5, 0, 1, 40][:experts]


def _products(model: ModelSizes, dtype: torch.dtype) -> OperatorCall:
    import torch_npu

    experts, counts = _groups(model)

    def make(generator: Generator) -> dict[str, Any]:
        columns = 2 * model.expert_intermediate
        return {
            "rows": normal(generator, sum(counts), model.hidden, dtype=dtype),
            "weight": weight(generator, experts, model.hidden, columns, dtype=dtype),
            "counts": torch.tensor(counts),
        }

    def call(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return torch_npu.npu_grouped_matmul(
            [rows], [weight], group_list=counts, split_item=3, group_type=0, group_list_type=1
        )[0]

    def defined(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        parts = rows.float().split(counts.tolist())
        sums = [own @ each for own, each in zip(parts, weight.float(), strict=True)]
        return torch.cat(sums).to(rows.dtype)

    said = f"{experts} experts, {name_of(dtype)}"
    return OperatorCall("npu_grouped_matmul", "GroupedMatmulV5", said, make, call, defined)


def _integer_products(model: ModelSizes) -> OperatorCall:
    import torch_npu

    experts, counts = _groups(model)

    def make(generator: Generator) -> dict[str, Any]:
        columns = 2 * model.expert_intermediate
        return {
            "rows": int8(generator, sum(counts), model.hidden),
            "weight": int8(generator, experts, model.hidden, columns),
            "scale": scales(generator, experts, columns).to(BFLOAT16),
            "row_scale": scales(generator, sum(counts)),
            "counts": torch.tensor(counts),
        }

    def call(
        rows: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor, counts: Tensor
    ) -> Tensor:
        return torch_npu.npu_grouped_matmul(
            [rows], [weight], scale=[scale], per_token_scale=[row_scale], group_list=counts,
            split_item=3, group_type=0, group_list_type=1, output_dtype=BFLOAT16,
        )[0]  # fmt: skip

    def defined(
        rows: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor, counts: Tensor
    ) -> Tensor:
        parts = rows.double().split(counts.tolist())
        sums = [
            own @ each.double() * factors.double()
            for own, each, factors in zip(parts, weight, scale, strict=True)
        ]
        return (torch.cat(sums) * row_scale[:, None]).to(BFLOAT16)

    return OperatorCall(
        "npu_grouped_matmul", "GroupedMatmulV5", f"{experts} experts, int8", make, call, defined
    )


def _rows_of_ranks(model: ModelSizes) -> OperatorCall:
    """Rows that several ranks have sent, in the order of this rank's experts."""
    import torch_npu

    ranks = 4

    def make(generator: Generator) -> dict[str, Any]:
        counts = torch.randint(0, 4, (ranks, model.experts), generator=generator,
                               dtype=torch.int32)  # fmt: skip
        counts[0, 0] = 2
        total = int(counts.sum())
        return {
            "rows": normal(generator, total, model.hidden),
            "counts": counts,
            "steps": torch.rand(total, generator=generator),
        }

    def call(rows: Tensor, counts: Tensor, steps: Tensor) -> Any:
        return torch_npu.npu_moe_re_routing(
            rows, counts, per_token_scales=steps, expert_token_num_type=COUNTS
        )

    def defined(rows: Tensor, counts: Tensor, steps: Tensor) -> list[Tensor]:
        expert = torch.arange(model.experts).repeat(ranks).repeat_interleave(counts.flatten())
        order = expert.argsort(stable=True)
        return [rows[order], steps[order], order.int(), counts.sum(0, dtype=torch.int32)]

    return OperatorCall(
        "npu_moe_re_routing", "MoeReRouting", "4 ranks", make, call, defined, exact=True
    )
