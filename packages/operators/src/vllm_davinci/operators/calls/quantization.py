"""Quantization of rows to int8, dynamic or static, and operators fused with it."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from vllm_davinci.operators.calls.call import OperatorCall, npu
from vllm_davinci.operators.calls.operands import DTYPES, integers, name_of, normal, scales
from vllm_davinci.operators.calls.sizes import ModelSizes
from vllm_davinci.operators.norm import swiglu
from vllm_davinci.operators.quantization import dynamic_quant, static_quant


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    for dtype, tokens in product(DTYPES, (1, 16, 200)):
        yield from _of_rows(model, f"{tokens} tokens, {name_of(dtype)}", tokens, dtype)
    for tokens in (16, 200):
        yield _of_sums(model, tokens)


def _of_rows(
    model: ModelSizes, said: str, tokens: int, dtype: torch.dtype
) -> Iterator[OperatorCall]:
    rows = {"x": normal(tokens, model.hidden, dtype=dtype)}
    given = {"scale": torch.tensor([0.03]), "offset": torch.tensor([7], dtype=torch.int32)}

    def asymmetric(x: Tensor) -> Any:
        """Dequantized values, since integers and offsets may both differ by one."""
        integers, steps, offsets = npu.npu_dynamic_quant_asymmetric(x)
        numbers = (integers.float() - offsets[:, None]) * steps[:, None]
        return (numbers - x.float()).abs() <= 0.51 * steps[:, None]

    yield OperatorCall(
        "npu_dynamic_quant", "DynamicQuant", said, rows, lambda x: npu.npu_dynamic_quant(x),
        dynamic_quant,
    )  # fmt: skip
    yield OperatorCall(
        "npu_quantize", "Quantize", said, {**rows, **given},
        lambda x, scale, offset: npu.npu_quantize(x, scale, offset, torch.qint8, -1, True),
        static_quant,
    )  # fmt: skip
    yield OperatorCall(
        "npu_dynamic_quant_asymmetric", "DynamicQuantV2", said, rows, asymmetric,
        lambda x: torch.ones_like(x, dtype=torch.bool), exact=True,
    )  # fmt: skip


def _of_sums(model: ModelSizes, tokens: int) -> OperatorCall:
    """Integer sums of an MLP or experts, activated and quantized in one launch."""
    columns, experts = model.expert_intermediate or model.intermediate, model.experts
    groups = [tokens // experts + (at < tokens % experts) for at in range(experts)]
    sizes = (experts, 2 * columns) if experts else (2 * columns,)

    def call(sums: Tensor, weight_scale: Tensor, row_scale: Tensor, counts: Any) -> Any:
        return npu.npu_dequant_swiglu_quant(
            sums, weight_scale=weight_scale, activation_scale=row_scale, group_index=counts,
            activate_left=True, quant_mode=1,
        )  # fmt: skip

    def defined(sums: Tensor, weight_scale: Tensor, row_scale: Tensor, counts: Any) -> Any:
        own = weight_scale if counts is None else weight_scale.repeat_interleave(counts, 0)
        return dynamic_quant(swiglu(sums.float() * own * row_scale[:, None]))

    return OperatorCall(
        "npu_dequant_swiglu_quant", "DequantSwigluQuantV2", f"{tokens} tokens",
        {
            "sums": integers(-(2**15), 2**15, tokens, 2 * columns, dtype=torch.int32),
            "weight_scale": scales(*sizes),
            "row_scale": scales(tokens, least=0.01, most=0.1),
            "counts": torch.tensor(groups) if experts else None,
        },
        call, defined,
    )  # fmt: skip
