"""Norms and gated activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci.verify.operators.call import OperatorCall
from vllm_davinci.verify.operators.operands import DTYPES, gains, name_of, normal
from vllm_davinci.verify.operators.shapes import ModelSizes

TOKENS = (1, 16, 200)


def normalized(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Source: Zhang and Sennrich 2019, eq. 4; accumulates in fp32."""
    wide = x.float()
    root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * root * weight.float()).to(x.dtype)


def swiglu(x: Tensor) -> Tensor:
    """silu of the first half times the second one. Source: Shazeer 2020."""
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    for dtype in DTYPES:
        for tokens in TOKENS:
            yield from _of(model, tokens, dtype)


def _of(model: ModelSizes, tokens: int, dtype: torch.dtype) -> Iterator[OperatorCall]:
    import torch_npu

    said = f"{tokens} tokens, {name_of(dtype)}"

    def make(generator: Generator) -> dict[str, Any]:
        return {
            "x": normal(generator, tokens, model.hidden, dtype=dtype),
            "weight": gains(generator, model.hidden, dtype),
            "epsilon": model.epsilon,
        }

    def make_pair(generator: Generator) -> dict[str, Any]:
        residual = normal(generator, tokens, model.hidden, dtype=dtype)
        return {**make(generator), "residual": residual}

    def add_normalized(
        x: Tensor, weight: Tensor, epsilon: float, residual: Tensor
    ) -> list[Tensor | None]:
        total = (x.float() + residual.float()).to(x.dtype)
        return [normalized(total, weight, epsilon), None, total]

    def added(x: Tensor, weight: Tensor, epsilon: float, residual: Tensor) -> Any:
        return torch_npu.npu_add_rms_norm(x, residual, weight, epsilon)

    def gated(generator: Generator) -> dict[str, Any]:
        columns = 2 * (model.expert_intermediate or model.intermediate)
        return {"x": normal(generator, tokens, columns, dtype=dtype)}

    yield OperatorCall(
        "npu_rms_norm", "RmsNorm", said, make,
        lambda x, weight, epsilon: torch_npu.npu_rms_norm(x, weight, epsilon)[0], normalized,
    )  # fmt: skip
    yield OperatorCall("npu_add_rms_norm", "AddRmsNorm", said, make_pair, added, add_normalized)
    yield OperatorCall(
        "npu_swiglu", "SwiGlu", said, gated, lambda x: torch_npu.npu_swiglu(x), swiglu
    )
