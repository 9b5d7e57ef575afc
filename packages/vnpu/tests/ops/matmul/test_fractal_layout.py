"""FRACTAL_NZ through the C interface, because torch_npu uses it only with a newer CANN."""

import ctypes
import math
from collections.abc import Sequence

import pytest
import torch

from vllm_davinci.vnpu import library_directory
from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.strategies import values

ND, FRACTAL_NZ = 2, 29
DATA_TYPES = {torch.float16: 1, torch.int8: 2, torch.bfloat16: 27}
KEEP_DTYPE = ctypes.c_int8(0)


def library() -> ctypes.CDLL:
    """Returns the operators' library that torch_npu has loaded."""
    torch.npu.set_device(0)
    opapi = ctypes.CDLL(str(library_directory() / "libopapi.so"))
    opapi.aclCreateTensor.restype = ctypes.c_void_p
    return opapi


def integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Makes a C array of int64."""
    return (ctypes.c_int64 * len(values))(*values)


def handle(
    memory: torch.Tensor,
    sizes: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    offset: int = 0,
    layout: int = FRACTAL_NZ,
) -> ctypes.c_void_p:
    """Makes an aclTensor of a matrix whose tiles are in `memory`."""
    if strides is None:
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return ctypes.c_void_p(
        library().aclCreateTensor(
            integers(sizes),
            ctypes.c_uint64(len(sizes)),
            DATA_TYPES[memory.dtype],
            integers(strides),
            ctypes.c_int64(offset),
            layout,
            integers(tuple(memory.shape)),
            ctypes.c_uint64(memory.dim()),
            ctypes.c_void_p(memory.data_ptr()),
        )
    )


def sizes_in(layout: int, matrix: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the tile sizes that the library computes for a device matrix; None if it refuses the
    layout.
    """
    sizes, dims, actual = ctypes.POINTER(ctypes.c_int64)(), ctypes.c_uint64(), ctypes.c_int()
    status = library().aclnnNpuFormatCastCalculateSizeAndFormat(
        handle(matrix, matrix.shape, layout=ND),
        layout,
        DATA_TYPES[matrix.dtype],
        ctypes.byref(sizes),
        ctypes.byref(dims),
        ctypes.byref(actual),
    )
    if status != 0:
        return None
    assert actual.value == layout
    return tuple(sizes[: dims.value])


def tiles_of(matrix: torch.Tensor) -> torch.Tensor:
    """Returns a device matrix's tiles; the test allocates them and the library fills them."""
    sizes = sizes_in(FRACTAL_NZ, matrix)
    assert sizes is not None
    tiles = torch.full(sizes, 7, dtype=matrix.dtype).npu()
    aclnn.call("NpuFormatCast", matrix, handle(tiles, matrix.shape))
    return tiles


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(32, 64), (17, 35), (1, 1), (3, 20, 40)])
def test_cast_to_tiles_and_back_keeps_the_matrix(dtype, shape):
    matrix = values(shape, dtype, 1)
    tiles = tiles_of(matrix.npu())
    columns = 32 if dtype == torch.int8 else 16
    *batch, m, n = shape
    assert tiles.shape == (*batch, -(-n // columns), -(-m // 16), 16, columns)
    back = torch.zeros(shape, dtype=dtype).npu()
    aclnn.call("NpuFormatCast", handle(tiles, shape), back)
    assert torch.equal(back.cpu(), matrix)


def test_tiles_lie_where_the_layout_says() -> None:
    matrix = torch.arange(20 * 40, dtype=torch.float16).reshape(20, 40)
    tiles = tiles_of(matrix.npu()).cpu()
    for row, column in ((0, 0), (19, 39), (16, 15), (5, 33)):
        assert tiles[column // 16, row // 16, row % 16, column % 16] == matrix[row, column]
    assert tiles[2, 1, 4:].abs().sum() == 0  # rows 20 to 31 are padding


@pytest.mark.parametrize("transposed", [False, True])
def test_matmul_reads_a_tiled_weight(transposed: bool) -> None:
    x, weight = values((5, 35), torch.bfloat16, 1), values((35, 50), torch.bfloat16, 2)
    tiles = tiles_of((weight.t().contiguous() if transposed else weight).npu())
    out = torch.zeros(5, 50, dtype=torch.bfloat16).npu()
    strides = (1, 35) if transposed else (50, 1)
    operand = handle(tiles, (35, 50), strides=strides)
    aclnn.call("MatmulWeightNz", x.npu(), operand, out, KEEP_DTYPE)
    torch.testing.assert_close(out.cpu(), x @ weight)


def test_matmul_reads_one_of_a_batch_of_tiled_weights() -> None:
    x, weights = values((5, 32), torch.float16, 1), values((3, 32, 48), torch.float16, 2)
    tiles = tiles_of(weights.npu())
    out = torch.zeros(5, 48, dtype=torch.float16).npu()
    second = handle(tiles, (32, 48), offset=32 * 48)
    aclnn.call("MatmulWeightNz", x.npu(), second, out, KEEP_DTYPE)
    torch.testing.assert_close(out.cpu(), x @ weights[1], rtol=1e-2, atol=2e-2)


def test_batched_and_added_products_read_tiled_weights() -> None:
    x, weights = values((3, 5, 20), torch.bfloat16, 1), values((3, 20, 40), torch.bfloat16, 2)
    tiles = tiles_of(weights.npu())
    out = torch.zeros(3, 5, 40, dtype=torch.bfloat16).npu()
    operand = handle(tiles, (3, 20, 40))
    aclnn.call("BatchMatMulWeightNz", x.npu(), operand, out, KEEP_DTYPE)
    torch.testing.assert_close(out.cpu(), x @ weights)

    bias, tiles = values((40,), torch.bfloat16, 3), tiles_of(weights[0].npu())
    out = torch.zeros(5, 40, dtype=torch.bfloat16).npu()
    operand, one = handle(tiles, (20, 40)), aclnn.Number(1)
    aclnn.call("AddmmWeightNz", bias.npu(), x[0].npu(), operand, one, one, out, KEEP_DTYPE)
    torch.testing.assert_close(out.cpu(), torch.addmm(bias, x[0], weights[0]))


def test_other_formats_are_refused() -> None:
    matrix = torch.ones(2, 2, dtype=torch.float16).npu()
    assert sizes_in(ND, matrix) == (2, 2)
    assert sizes_in(3, matrix) is None
    assert sizes_in(FRACTAL_NZ, matrix[0].contiguous()) is None


def test_a_matrix_may_be_described_by_its_tiles() -> None:
    torch.npu.set_device(0)
    x, weight = values((5, 32), torch.float16, 1), values((32, 48), torch.float16, 2)
    tiles = weight.view(2, 16, 3, 16).permute(2, 0, 1, 3).contiguous()  # [n / 16, k / 16, 16, 16]
    out = torch.zeros(5, 48, dtype=torch.float16).npu()
    aclnn.call("MatmulWeightNz", x.npu(), aclnn.Tiles(tiles.npu()), out, KEEP_DTYPE)
    torch.testing.assert_close(out.cpu(), x @ weight, rtol=2e-3, atol=2e-3)
