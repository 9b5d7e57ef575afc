"""Integer products with 4-bit weights, or with scales along the depth, equal their definitions."""

import ctypes

import pytest
import torch

from vllm_davinci.operators.quantization import pack_int4
from vllm_davinci.vnpu import library_directory
from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.aclnn import FourBit
from vllm_davinci_testing.operators.comparison import near
from vllm_davinci_testing.operators.strategies import values


def integers(shape: tuple[int, ...], bits: int, seed: int) -> torch.Tensor:
    return values(shape, torch.int8, seed, low=-(2 ** (bits - 1)), high=2 ** (bits - 1))


def packed_scales(scales: torch.Tensor) -> torch.Tensor:
    """Puts a float's bits into the low half of each 64-bit integer, as in TransQuantParamV2."""
    return scales.view(torch.int32).long() & 0xFFFFFFFF


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows_by_eights", [False, True])
def test_4_bit_integers_are_multiplied_however_they_are_described(transposed, rows_by_eights):
    x, weight = integers((5, 64), 4, 1), integers((64, 32), 4, 2)
    rows, scale = values((5,), torch.float32, 3, low=0.5, high=2), values((32,), torch.float32, 4)
    x1 = pack_int4(x).npu()
    x2 = FourBit(pack_int4(weight.t().contiguous() if transposed else weight).npu())
    out = torch.empty(5, 32, dtype=torch.bfloat16, device="npu")
    aclnn.call(
        "QuantMatmulV5", x1 if rows_by_eights else FourBit(x1), x2, rows.npu(), scale.npu(),
        None, None, None, None, None, False, transposed, 0, out,
    )  # fmt: skip
    near(out, (x.double() @ weight.double()) * scale.double() * rows[:, None].double())


def test_a_view_of_4_bit_integers_in_tiles_is_multiplied() -> None:
    # Rows of `weight` are columns of the product.
    x, weight = integers((5, 128), 4, 1), integers((32, 128), 4, 2)
    rows, scale = values((5,), torch.float32, 3, low=0.5, high=2), values((32,), torch.float32, 4)
    tiles = weight.unflatten(0, (2, 16)).unflatten(-1, (2, 64)).permute(2, 0, 1, 3).contiguous()
    x2 = FourBit(pack_int4(tiles).npu().view(32, 16), tuple(tiles.shape))
    out = torch.empty(5, 32, dtype=torch.bfloat16, device="npu")
    aclnn.call(
        "QuantMatmulWeightNz", FourBit(pack_int4(x).npu()), x2, rows.npu(), scale.npu(),
        None, None, None, None, None, False, True, 0, out,
    )  # fmt: skip
    near(out, (x.double() @ weight.t().double()) * scale.double() * rows[:, None].double())


def test_4_bit_integers_keep_the_sizes_that_they_were_described_with() -> None:
    packed = torch.zeros(3, 4, dtype=torch.int32).npu()
    library = ctypes.CDLL(str(library_directory() / "libopapi.so"))
    described = aclnn._converted(library, FourBit(packed))
    sizes, dims = ctypes.POINTER(ctypes.c_int64)(), ctypes.c_uint64()
    assert library.aclGetViewShape(described, ctypes.byref(sizes), ctypes.byref(dims)) == 0
    assert sizes[: dims.value] == [3, 32]


def test_4_bit_integers_that_do_not_fill_int32_are_refused() -> None:
    library = ctypes.CDLL(str(library_directory() / "libopapi.so"))
    library.aclCreateTensor.restype = ctypes.c_void_p
    four, sizes = 29, (ctypes.c_int64 * 2)(2, 12)  # aclDataType
    made = library.aclCreateTensor(
        sizes, ctypes.c_uint64(2), four, (ctypes.c_int64 * 2)(12, 1), ctypes.c_int64(0), 2,
        sizes, ctypes.c_uint64(2), ctypes.c_void_p(torch.zeros(8).npu().data_ptr()),
    )  # fmt: skip
    assert made is None


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 3])
def test_8_bit_rows_go_through_4_bit_weights_in_halves(out_dtype: torch.dtype, groups: int) -> None:
    """Like the kernel: `y_offset` has eight times the weight, which a row omits."""
    depth = 256 * groups
    x, weight = integers((3, depth), 8, 1), integers((depth, 32), 4, 2)
    scale = values((groups, 32), torch.float32, 3, low=2**-10, high=2**-8)
    rows = values((3, 1), torch.float32, 4, low=0.5, high=2)
    dense = weight.double() * scale.double().repeat_interleave(256, 0)
    y_offset = 8 * dense.sum(0)
    out = torch.empty(3, 32, dtype=out_dtype, device="npu")
    aclnn.call(
        "QuantMatmulV5", x.npu(), pack_int4(weight).npu(), rows.npu(), packed_scales(scale).npu(),
        None, None, None, y_offset.float().npu(), None, False, False, 256, out,
    )  # fmt: skip
    expected = (x.double() @ dense) * rows.double()
    # Group sums are stored in float16; sums of high halves count 16 times.
    largest = (x.double().abs() @ dense.abs()).max() * 2
    torch.testing.assert_close(
        out.cpu().double(), expected, rtol=2**-7, atol=float(largest) * 2**-10
    )
    without = torch.empty_like(out)
    aclnn.call(
        "QuantMatmulV5", x.npu(), pack_int4(weight).npu(), rows.npu(), packed_scales(scale).npu(),
        None, None, None, torch.zeros(32).npu(), None, False, False, 256, without,
    )  # fmt: skip
    left_out = (out.cpu().double() - without.cpu().double()) / rows.double()
    torch.testing.assert_close(
        left_out, y_offset.expand(3, -1), rtol=2**-6, atol=float(largest) * 2**-8
    )


def test_scales_in_blocks_belong_to_their_part_of_the_depth() -> None:
    x, weight = integers((5, 512), 8, 1), integers((256, 512), 8, 2)
    row_scale = values((5, 4), torch.float32, 3, low=1e-3, high=1e-2)
    scale = values((2, 4), torch.float32, 4, low=1e-3, high=1e-2)
    bias = values((256,), torch.float32, 5)
    out = torch.empty(5, 256, dtype=torch.bfloat16, device="npu")
    group_size = 1 << 32 | 128 << 16 | 128
    aclnn.call(
        "QuantMatmulV5", x.npu(), weight.npu(), row_scale.npu(), scale.npu(),
        None, None, None, None, bias.npu(), False, True, group_size, out,
    )  # fmt: skip
    wide = x.double() * row_scale.double().repeat_interleave(128, 1)
    dense = weight.double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    near(out, wide @ dense.t() + bias.double())


@pytest.mark.parametrize(
    ("sizes", "dtype", "elements"),
    [
        ((510, 510), torch.float16, 512 * 512),
        ((510, 270), torch.int8, 512 * 288),
        ((3, 16, 8), torch.bfloat16, 3 * 16 * 16),
    ],
)
def test_a_weight_in_tiles_has_whole_tiles(sizes, dtype, elements):
    library = ctypes.CDLL(str(library_directory() / "libopapi.so"))
    found = ctypes.c_uint64()
    shape = aclnn._converted(library, sizes)
    kind = {torch.float16: 1, torch.int8: 2, torch.bfloat16: 27}[dtype]  # aclDataType
    assert library.aclnnCalculateMatmulWeightSizeV2(shape, kind, ctypes.byref(found)) == 0
    assert found.value == elements
    empty = aclnn._converted(library, (0, 16))
    assert library.aclnnCalculateMatmulWeightSizeV2(empty, kind, ctypes.byref(found)) == 161002
