"""Products of floats and of integers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci.verify.operators.call import OperatorCall
from vllm_davinci.verify.operators.operands import (
    BFLOAT16,
    DTYPES,
    FLOAT32,
    int8,
    name_of,
    normal,
    scales,
    weight,
)
from vllm_davinci.verify.operators.shapes import ModelSizes

TOKENS = (1, 16, 200)
# Products of a layer are as wide as this at most here, so that the CPU's take no minutes.
MOST_COLUMNS = 4096
FRACTAL_NZ = 29
GROUP_SIZE = 128


def product(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() @ weight.float()).to(x.dtype)


def integer_sums(x: Tensor, weight: Tensor) -> Tensor:
    """Exact: below 2**53 for every depth of a model."""
    return x.double() @ weight.double()


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    columns = min(model.intermediate, MOST_COLUMNS)
    for tokens in TOKENS:
        for dtype in DTYPES:
            yield _linear(tokens, model.hidden, columns, dtype)
        yield from _integers(tokens, model.hidden, columns)
    yield _linear(16, model.hidden, model.all_experts or 128, FLOAT32)
    yield from _of_integer_weights(model.hidden, columns)
    yield _of_packed_weights(model.hidden, columns // 8 * 8)
    if model.latent:
        yield from _batched(model)


def _linear(tokens: int, depth: int, columns: int, dtype: torch.dtype) -> OperatorCall:
    def make(generator: Generator) -> dict[str, Any]:
        return {
            "x": normal(generator, tokens, depth, dtype=dtype),
            "weight": weight(generator, depth, columns, dtype=dtype),
        }

    said = f"{tokens} tokens, {name_of(dtype)}"
    return OperatorCall("mm", "Mm", said, make, lambda x, weight: x @ weight, product)


def _integers(tokens: int, depth: int, columns: int) -> Iterator[OperatorCall]:
    import torch_npu

    def make(generator: Generator) -> dict[str, Any]:
        return {"x": int8(generator, tokens, depth), "weight": int8(generator, depth, columns),
                "scale": scales(generator, columns)}  # fmt: skip

    def make_rows(generator: Generator) -> dict[str, Any]:
        return {**make(generator), "row_scale": scales(generator, tokens)}

    def sums(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return torch_npu.npu_quant_matmul(x, weight, scale, output_dtype=torch.int32)

    def in_tiles(x: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor) -> Tensor:
        tiles = torch_npu.npu_format_cast(weight, FRACTAL_NZ)
        return by_row(x, tiles, scale, row_scale)

    def by_row(x: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor) -> Tensor:
        return torch_npu.npu_quant_matmul(
            x, weight, scale, pertoken_scale=row_scale, output_dtype=BFLOAT16
        )

    def defined(x: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor) -> Tensor:
        return (integer_sums(x, weight) * scale * row_scale[:, None]).to(BFLOAT16)

    said, name = f"{tokens} tokens", "npu_quant_matmul"
    yield OperatorCall(
        name, "QuantMatmulV5", f"{said}, sums", make, sums,
        lambda x, weight, scale: integer_sums(x, weight).int(), exact=True,
    )  # fmt: skip
    yield OperatorCall(name, "QuantMatmulV5", f"{said}, scaled rows", make_rows, by_row, defined)
    yield OperatorCall(
        name, "QuantMatmulWeightNz", f"{said}, weight in tiles", make_rows, in_tiles, defined
    )


def _of_integer_weights(depth: int, columns: int) -> Iterator[OperatorCall]:
    """Floats by int8 weights (W8A16)."""
    import torch_npu

    for dtype in DTYPES:

        def make(generator: Generator, dtype: torch.dtype = dtype) -> dict[str, Any]:
            return {
                "x": normal(generator, 16, depth, dtype=dtype),
                "weight": int8(generator, depth, columns),
                "scale": scales(generator, columns).to(dtype),
            }

        def defined(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
            return (x.double() @ (weight.double() * scale.double())).to(x.dtype)

        yield OperatorCall(
            "npu_weight_quant_batchmatmul", "WeightQuantBatchMatmulV2",
            f"16 tokens, {name_of(dtype)}", make,
            lambda x, weight, scale: torch_npu.npu_weight_quant_batchmatmul(x, weight, scale),
            defined,
        )  # fmt: skip


def _of_packed_weights(depth: int, columns: int) -> OperatorCall:
    """Floats by 4-bit weights (W4A16), a scale for each group of 128 rows."""
    import torch_npu

    groups = depth // GROUP_SIZE

    def make(generator: Generator) -> dict[str, Any]:
        return {
            "x": normal(generator, 16, depth),
            "weight": torch.randint(-8, 8, (depth, columns), generator=generator,
                                    dtype=torch.int32),
            "scale": scales(generator, groups, columns).to(BFLOAT16),
        }  # fmt: skip

    def call(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        packed = torch_npu.npu_convert_weight_to_int4pack(weight)
        return torch_npu.npu_weight_quant_batchmatmul(
            x, packed, scale, antiquant_group_size=GROUP_SIZE
        )

    def defined(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        factors = scale.double().repeat_interleave(GROUP_SIZE, 0)
        return (x.double() @ (weight.double() * factors)).to(x.dtype)

    return OperatorCall(
        "npu_weight_quant_batchmatmul", "WeightQuantBatchMatmulV2",
        "16 tokens, bfloat16, 4-bit weights", make, call, defined,
    )  # fmt: skip


def _batched(model: ModelSizes) -> Iterator[OperatorCall]:
    """MLA's up projections, absorbed into queries and of values."""
    import torch_npu

    assert model.latent is not None
    latent, heads = model.latent, model.heads
    for tokens in (16, 200):

        def queries(generator: Generator, tokens: int = tokens) -> dict[str, Any]:
            return {
                "x": normal(generator, tokens, heads, latent.nope),
                "weight": weight(generator, heads, latent.nope, latent.rank),
            }

        def values(generator: Generator, tokens: int = tokens) -> dict[str, Any]:
            return {
                "x": normal(generator, heads, tokens, latent.rank),
                "weight": weight(generator, heads, latent.rank, latent.value),
            }

        def absorbed(x: Tensor, weight: Tensor) -> Tensor:
            return product(x.transpose(0, 1), weight).transpose(0, 1).contiguous()

        name, launches = "npu_transpose_batchmatmul", "TransposeBatchMatMul"
        yield OperatorCall(
            name, launches, f"{tokens} tokens, queries", queries,
            lambda x, weight: torch_npu.npu_transpose_batchmatmul(
                x, weight, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
            ),
            absorbed,
        )  # fmt: skip
        yield OperatorCall(
            name, launches, f"{tokens} tokens, values", values,
            lambda x, weight: torch_npu.npu_transpose_batchmatmul(
                x, weight, perm_x1=(0, 1, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
            ),
            lambda x, weight: product(x, weight).transpose(0, 1).contiguous(),
        )  # fmt: skip
