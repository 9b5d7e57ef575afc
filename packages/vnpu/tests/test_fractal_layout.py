"""FRACTAL_NZ, over the C interface: torch_npu asks for it only of a newer CANN than is reported."""

import ctypes
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from strategies import values

from vllm_davinci.vnpu import library_directory

ND, FRACTAL_NZ = 2, 29
DATA_TYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.bfloat16: 27}


@pytest.fixture(scope="module")
def opapi() -> ctypes.CDLL:
    torch.npu.set_device(0)
    library = ctypes.CDLL(str(library_directory() / "libopapi.so"))
    library.aclCreateTensor.restype = ctypes.c_void_p
    library.aclCreateScalar.restype = ctypes.c_void_p
    return library


def integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def handle(
    opapi: ctypes.CDLL,
    tensor: torch.Tensor,
    *,
    sizes: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    offset: int = 0,
) -> ctypes.c_void_p:
    """An aclTensor over a device tensor; with `sizes`, `tensor` holds the tiles of that matrix."""
    shape = tuple(tensor.shape) if sizes is None else tuple(sizes)
    if strides is None:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return ctypes.c_void_p(
        opapi.aclCreateTensor(
            integers(shape),
            ctypes.c_uint64(len(shape)),
            DATA_TYPES[tensor.dtype],
            integers(strides),
            ctypes.c_int64(offset),
            ND if sizes is None else FRACTAL_NZ,
            integers(tuple(tensor.shape)),
            ctypes.c_uint64(tensor.dim()),
            ctypes.c_void_p(tensor.data_ptr()),
        )
    )


def launch(opapi: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Both phases of an operator on the current stream, and what it wrote is there."""
    workspace, executor = ctypes.c_uint64(), ctypes.c_void_p()
    prepare: Callable[..., int] = getattr(opapi, f"{name}GetWorkspaceSize")
    assert prepare(*arguments, ctypes.byref(workspace), ctypes.byref(executor)) == 0
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    assert getattr(opapi, name)(None, workspace, executor, stream) == 0
    torch.npu.synchronize()


def tiles_of(opapi: ctypes.CDLL, matrix: torch.Tensor) -> torch.Tensor:
    """The matrix's tiles, allocated as the library says and filled by it."""
    sizes, dims, actual = (
        ctypes.POINTER(ctypes.c_int64)(),
        ctypes.c_uint64(),
        ctypes.c_int(),
    )
    source = handle(opapi, matrix)
    status = opapi.aclnnNpuFormatCastCalculateSizeAndFormat(
        source,
        FRACTAL_NZ,
        DATA_TYPES[matrix.dtype],
        ctypes.byref(sizes),
        ctypes.byref(dims),
        ctypes.byref(actual),
    )
    assert status == 0
    assert actual.value == FRACTAL_NZ
    tiles = torch.full(tuple(sizes[: dims.value]), 7, dtype=matrix.dtype).npu()
    launch(opapi, "aclnnNpuFormatCast", source, handle(opapi, tiles, sizes=matrix.shape))
    return tiles


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(32, 64), (17, 35), (1, 1), (3, 20, 40)])
def test_cast_to_tiles_and_back_keeps_the_matrix(
    opapi: ctypes.CDLL, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    matrix = values(shape, dtype, 1)
    tiles = tiles_of(opapi, matrix.npu())
    columns = 32 if dtype == torch.int8 else 16
    *batch, m, n = shape
    assert tiles.shape == (*batch, -(-n // columns), -(-m // 16), 16, columns)
    back = torch.zeros(shape, dtype=dtype).npu()
    launch(opapi, "aclnnNpuFormatCast", handle(opapi, tiles, sizes=shape), handle(opapi, back))
    assert torch.equal(back.cpu(), matrix)


def test_tiles_lie_where_the_layout_says() -> None:
    opapi = ctypes.CDLL(str(library_directory() / "libopapi.so"))
    opapi.aclCreateTensor.restype = ctypes.c_void_p
    matrix = torch.arange(20 * 40, dtype=torch.float16).reshape(20, 40)
    tiles = tiles_of(opapi, matrix.npu()).cpu()
    for row, column in ((0, 0), (19, 39), (16, 15), (5, 33)):
        place = tiles[column // 16, row // 16, row % 16, column % 16]
        assert place == matrix[row, column]
    assert tiles[2, 1, 4:].abs().sum() == 0  # rows 20 to 31 are padding


@pytest.mark.parametrize("transposed", [False, True])
def test_matmul_reads_a_tiled_weight(opapi: ctypes.CDLL, transposed: bool) -> None:
    x, weight = values((5, 35), torch.bfloat16, 1), values((35, 50), torch.bfloat16, 2)
    stored = weight.t().contiguous() if transposed else weight
    tiles = tiles_of(opapi, stored.npu())
    out = torch.zeros(5, 50, dtype=torch.bfloat16).npu()
    operand = handle(opapi, tiles, sizes=(35, 50), strides=(1, 35) if transposed else (50, 1))
    npu_x = x.npu()
    launch(
        opapi, "aclnnMatmulWeightNz", handle(opapi, npu_x), operand, handle(opapi, out),
        ctypes.c_int8(0),
    )  # fmt: skip
    torch.testing.assert_close(out.cpu(), x @ weight)


def test_matmul_reads_one_of_a_batch_of_tiled_weights(opapi: ctypes.CDLL) -> None:
    x, weights = values((5, 32), torch.float16, 1), values((3, 32, 48), torch.float16, 2)
    tiles, npu_x = tiles_of(opapi, weights.npu()), x.npu()
    out = torch.zeros(5, 48, dtype=torch.float16).npu()
    second = handle(opapi, tiles, sizes=(32, 48), offset=32 * 48)
    launch(
        opapi, "aclnnMatmulWeightNz", handle(opapi, npu_x), second, handle(opapi, out),
        ctypes.c_int8(0),
    )  # fmt: skip
    torch.testing.assert_close(out.cpu(), x @ weights[1], rtol=1e-2, atol=2e-2)


def test_batched_and_added_products_read_tiled_weights(opapi: ctypes.CDLL) -> None:
    x, weights = values((3, 5, 20), torch.bfloat16, 1), values((3, 20, 40), torch.bfloat16, 2)
    npu_x, tiles = x.npu(), tiles_of(opapi, weights.npu())
    out = torch.zeros(3, 5, 40, dtype=torch.bfloat16).npu()
    launch(
        opapi, "aclnnBatchMatMulWeightNz", handle(opapi, npu_x),
        handle(opapi, tiles, sizes=(3, 20, 40)), handle(opapi, out), ctypes.c_int8(0),
    )  # fmt: skip
    torch.testing.assert_close(out.cpu(), x @ weights)

    bias = values((40,), torch.bfloat16, 3)
    npu_bias, first, tiles = bias.npu(), x[0].npu(), tiles_of(opapi, weights[0].npu())
    out = torch.zeros(5, 40, dtype=torch.bfloat16).npu()
    one = ctypes.c_void_p(opapi.aclCreateScalar(ctypes.byref(ctypes.c_double(1)), 11))
    launch(
        opapi, "aclnnAddmmWeightNz", handle(opapi, npu_bias), handle(opapi, first),
        handle(opapi, tiles, sizes=(20, 40)), one, one, handle(opapi, out), ctypes.c_int8(0),
    )  # fmt: skip
    torch.testing.assert_close(out.cpu(), torch.addmm(bias, x[0], weights[0]))
