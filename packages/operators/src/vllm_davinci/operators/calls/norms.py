"""Norms and gated activations."""

from collections.abc import Iterator
from itertools import product

from torch import Tensor

from vllm_davinci.operators.calls.call import OperatorCall, npu
from vllm_davinci.operators.calls.operands import DTYPES, gains, name_of, normal
from vllm_davinci.operators.calls.sizes import ModelSizes
from vllm_davinci.operators.norm import add_rms_norm, clipped_swiglu, rms_norm, swiglu

TOKENS = (1, 16, 200)
ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss


def _added(**given: Tensor) -> list[Tensor | None]:
    normed, total = add_rms_norm(**given)  # type: ignore[arg-type]
    return [normed, None, total]


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    for dtype, tokens in product(DTYPES, TOKENS):
        said = f"{tokens} tokens, {name_of(dtype)}"
        x = normal(tokens, model.hidden, dtype=dtype)
        operands = {"x": x, "weight": gains(model.hidden, dtype), "epsilon": model.epsilon}
        wide = 2 * (model.expert_intermediate or model.intermediate)
        gated = {"x": normal(tokens, wide, dtype=dtype)}
        yield OperatorCall(
            "npu_rms_norm", "RmsNorm", said, operands,
            lambda x, weight, epsilon: npu.npu_rms_norm(x, weight, epsilon)[0], rms_norm,
        )  # fmt: skip
        yield OperatorCall(
            "npu_add_rms_norm", "AddRmsNorm", said, operands | {"residual": x},
            lambda x, residual, weight, epsilon: npu.npu_add_rms_norm(
                x, residual, weight, epsilon
            ),
            _added,
        )  # fmt: skip
        yield OperatorCall("npu_swiglu", "SwiGlu", said, gated, lambda x: npu.npu_swiglu(x), swiglu)
    if model.has_common:  # once, with sizes of gpt-oss
        yield OperatorCall(
            "npu_clipped_swiglu", "ClippedSwiglu", "16 tokens, bfloat16",
            {"x": normal(16, 5760, scale=5.0)},
            lambda x: npu.npu_clipped_swiglu(
                x, alpha=ALPHA, limit=LIMIT, bias=1.0, interleaved=True
            ),
            lambda x: clipped_swiglu(x, ALPHA, LIMIT),
        )  # fmt: skip
