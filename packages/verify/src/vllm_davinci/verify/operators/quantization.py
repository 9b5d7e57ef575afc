"""Rows as int8, with scales of their own or a given one, and what is fused with that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci.verify.operators.call import OperatorCall
from vllm_davinci.verify.operators.norms import swiglu
from vllm_davinci.verify.operators.operands import DTYPES, name_of, normal, scales
from vllm_davinci.verify.operators.shapes import ModelSizes


def to_int8(x: Tensor) -> Tensor:
    """The nearest integers, halves to even."""
    return x.round().clamp(-128, 127).to(torch.int8)


def with_own_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """x is about integers * scales, fp32 [rows]."""
    wide = x.float()
    steps = wide.abs().amax(-1) / 127
    return to_int8(wide / steps.unsqueeze(-1)), steps


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    for dtype in DTYPES:
        for tokens in (1, 16, 200):
            yield from _of_rows(model, tokens, dtype)
    yield from _of_sums(model)


def _of_rows(model: ModelSizes, tokens: int, dtype: torch.dtype) -> Iterator[OperatorCall]:
    import torch_npu

    said = f"{tokens} tokens, {name_of(dtype)}"

    def rows(generator: Generator) -> dict[str, Any]:
        return {"x": normal(generator, tokens, model.hidden, dtype=dtype)}

    def given(generator: Generator) -> dict[str, Any]:
        return {
            **rows(generator),
            "scale": torch.tensor([0.03]),
            "offset": torch.tensor([7], dtype=torch.int32),
        }

    def quantized(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        return torch_npu.npu_quantize(x, scale, offset, torch.qint8, -1, True)

    def asymmetric(x: Tensor) -> Tensor:
        """Numbers, since integers and offsets may move together by one."""
        integers, steps, offsets = torch_npu.npu_dynamic_quant_asymmetric(x)
        numbers = (integers.float() - offsets[:, None]) * steps[:, None]
        return (numbers - x.float()).abs() <= 0.51 * steps[:, None]

    yield OperatorCall(
        "npu_dynamic_quant", "DynamicQuant", said, rows,
        lambda x: torch_npu.npu_dynamic_quant(x), with_own_scales,
    )  # fmt: skip
    yield OperatorCall(
        "npu_quantize", "Quantize", said, given, quantized,
        lambda x, scale, offset: to_int8(x.float() / scale + offset),
    )  # fmt: skip
    yield OperatorCall(
        "npu_dynamic_quant_asymmetric", "DynamicQuantV2", said, rows, asymmetric,
        lambda x: torch.ones_like(x, dtype=torch.bool), exact=True,
    )  # fmt: skip


def _of_sums(model: ModelSizes) -> Iterator[OperatorCall]:
    """An MLP's or experts' integer sums, activated and quantized in one launch."""
    import torch_npu

    columns = model.expert_intermediate or model.intermediate
    experts = model.experts
    for tokens in (16, 200):
        groups = [tokens // experts + (at < tokens % experts) for at in range(experts)]

        def make(
            generator: Generator, tokens: int = tokens, groups: list[int] = groups
        ) -> dict[str, Any]:
            sizes = (experts, 2 * columns) if experts else (2 * columns,)
            return {
                "sums": torch.randint(-(2**15), 2**15, (tokens, 2 * columns), generator=generator,
                                      dtype=torch.int32),
                "weight_scale": scales(generator, *sizes),
                "row_scale": scales(generator, tokens, least=0.01, most=0.1),
                "counts": torch.tensor(groups) if experts else None,
            }  # fmt: skip

        def call(sums: Tensor, weight_scale: Tensor, row_scale: Tensor, counts: Any) -> Any:
            return torch_npu.npu_dequant_swiglu_quant(
                sums, weight_scale=weight_scale, activation_scale=row_scale, group_index=counts,
                activate_left=True, quant_mode=1,
            )  # fmt: skip

        def defined(sums: Tensor, weight_scale: Tensor, row_scale: Tensor, counts: Any) -> Any:
            own = weight_scale if counts is None else weight_scale.repeat_interleave(counts, 0)
            return with_own_scales(swiglu(sums.float() * own * row_scale[:, None]))

        yield OperatorCall(
            "npu_dequant_swiglu_quant", "DequantSwigluQuantV2", f"{tokens} tokens", make, call,
            defined,
        )  # fmt: skip
