"""Matrix products of floats and of integers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_davinci.operators.calls.call import OperatorCall, npu
from vllm_davinci.operators.calls.operands import (
    BFLOAT16,
    DTYPES,
    FLOAT32,
    int8,
    integers,
    name_of,
    normal,
    scales,
    weight,
)
from vllm_davinci.operators.calls.sizes import ModelSizes
from vllm_davinci.operators.products import product, quant_matmul

TOKENS = (1, 16, 200)
# Maximum columns of products in these calls, so that the CPU's products are fast.
MOST_COLUMNS = 4096
FRACTAL_NZ = 29
GROUP_SIZE = 128


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    columns = min(model.intermediate, MOST_COLUMNS)
    for tokens in TOKENS:
        for dtype in DTYPES:
            yield _linear(tokens, model.hidden, columns, dtype)
        yield from _integers(tokens, model.hidden, columns)
    yield _linear(16, model.hidden, model.all_experts or 128, FLOAT32)
    for dtype in DTYPES:
        yield _of_integer_weights(model.hidden, columns, dtype)
    yield _of_packed_weights(model.hidden, columns // 8 * 8)
    if model.latent:
        for tokens in (16, 200):
            yield from _batched(model, tokens)


def _linear(tokens: int, depth: int, columns: int, dtype: torch.dtype) -> OperatorCall:
    return OperatorCall(
        "mm", "Mm", f"{tokens} tokens, {name_of(dtype)}",
        {"x": normal(tokens, depth, dtype=dtype), "weight": weight(depth, columns, dtype=dtype)},
        lambda x, weight: x @ weight, product,
    )  # fmt: skip


def _integers(tokens: int, depth: int, columns: int) -> Iterator[OperatorCall]:
    operands = {
        "x": int8(tokens, depth), "weight": int8(depth, columns), "scale": scales(columns)
    }  # fmt: skip
    of_rows = {**operands, "row_scale": scales(tokens)}

    def by_row(x: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor) -> Tensor:
        result: Tensor = npu.npu_quant_matmul(
            x, weight, scale, pertoken_scale=row_scale, output_dtype=BFLOAT16
        )
        return result

    def defined(x: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor) -> Tensor:
        return quant_matmul(x, row_scale, weight, scale, None, BFLOAT16)

    said, name = f"{tokens} tokens", "npu_quant_matmul"
    yield OperatorCall(
        name, "QuantMatmulV5", f"{said}, sums", operands,
        lambda x, weight, scale: npu.npu_quant_matmul(x, weight, scale, output_dtype=torch.int32),
        lambda x, weight, scale: (x.double() @ weight.double()).int(), exact=True,
    )  # fmt: skip
    yield OperatorCall(name, "QuantMatmulV5", f"{said}, scaled rows", of_rows, by_row, defined)
    yield OperatorCall(
        name, "QuantMatmulWeightNz", f"{said}, weight in tiles", of_rows,
        lambda weight, **rest: by_row(weight=npu.npu_format_cast(weight, FRACTAL_NZ), **rest),
        defined,
    )  # fmt: skip


def _of_integer_weights(depth: int, columns: int, dtype: torch.dtype) -> OperatorCall:
    """Float inputs, int8 weights (W8A16)."""
    return OperatorCall(
        "npu_weight_quant_batchmatmul", "WeightQuantBatchMatmulV2", f"16 tokens, {name_of(dtype)}",
        {
            "x": normal(16, depth, dtype=dtype),
            "weight": int8(depth, columns),
            "scale": scales(columns, dtype=dtype),
        },
        lambda x, weight, scale: npu.npu_weight_quant_batchmatmul(x, weight, scale),
        lambda x, weight, scale: (x.double() @ (weight.double() * scale.double())).to(x.dtype),
    )  # fmt: skip


def _of_packed_weights(depth: int, columns: int) -> OperatorCall:
    """Float inputs, 4-bit weights (W4A16) with a scale per group of rows."""
    group = min(GROUP_SIZE, depth // 2)

    def defined(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        factors = scale.double().repeat_interleave(group, 0)
        return (x.double() @ (weight.double() * factors)).to(x.dtype)

    return OperatorCall(
        "npu_weight_quant_batchmatmul", "WeightQuantBatchMatmulV2",
        "16 tokens, bfloat16, 4-bit weights",
        {
            "x": normal(16, depth),
            "weight": integers(-8, 8, depth, columns, dtype=torch.int32),
            "scale": scales(depth // group, columns, dtype=BFLOAT16),
        },
        lambda x, weight, scale: npu.npu_weight_quant_batchmatmul(
            x, npu.npu_convert_weight_to_int4pack(weight), scale, antiquant_group_size=group
        ),
        defined,
    )  # fmt: skip


def _batched(model: ModelSizes, tokens: int) -> Iterator[OperatorCall]:
    """MLA's up-projections: absorbed into queries, and of values."""
    assert model.latent is not None
    latent, heads = model.latent, model.heads
    for kind, x, sizes, perm_x1 in (
        ("queries", (tokens, heads, latent.nope), (latent.nope, latent.rank), (1, 0, 2)),
        ("values", (heads, tokens, latent.rank), (latent.rank, latent.value), (0, 1, 2)),
    ):
        perms = {"perm_x1": perm_x1, "perm_x2": (0, 1, 2), "perm_y": (1, 0, 2)}
        yield OperatorCall(
            "npu_transpose_batchmatmul", "TransposeBatchMatMul", f"{tokens} tokens, {kind}",
            {"x": normal(*x), "weight": weight(heads, *sizes)},
            lambda x, weight, perms=perms: npu.npu_transpose_batchmatmul(x, weight, **perms),
            lambda x, weight, perm=perm_x1: (
                product(x.permute(perm), weight).transpose(0, 1).contiguous()
            ),
        )  # fmt: skip
