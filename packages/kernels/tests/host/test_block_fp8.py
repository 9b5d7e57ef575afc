"""fp8 weights in host memory become floats or integers, bit-identical to torch's conversion."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci import operators

ops = torch.ops.vllm_davinci
BLOCK_ROWS, BLOCK_COLUMNS = 8, 24


def weight_and_scale(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws any finite fp8 values, with tiny to large scales."""
    torch.manual_seed(seed)
    stored = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    stored[(stored & 0x7F) == 0x7F] = 0
    blocks = -(-rows // BLOCK_ROWS), -(-columns // BLOCK_COLUMNS)
    return stored.view(torch.float8_e4m3fn), torch.exp(torch.randn(blocks) * 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(rows=st.integers(0, 70), columns=st.integers(1, 100), seed=st.integers(0, 99))
def test_floats_equal_those_of_the_definition(dtype, rows, columns, seed):
    sizes = BLOCK_ROWS, BLOCK_COLUMNS
    weight, scale = weight_and_scale(rows, columns, seed)
    made = ops.block_fp8_floats(weight, scale, *sizes, dtype, [])
    assert torch.equal(made, operators.block_fp8_floats(weight, scale, *sizes, dtype, []))


@given(rows=st.integers(1, 70), columns=st.integers(1, 100), seed=st.integers(0, 99))
def test_integers_equal_those_of_the_definition(rows: int, columns: int, seed: int) -> None:
    sizes = BLOCK_ROWS, BLOCK_COLUMNS
    weight, scale = weight_and_scale(rows, columns, seed)
    made = ops.block_fp8_integers(weight, scale, *sizes, [])
    for ours, defined in zip(
        made, operators.block_fp8_integers(weight, scale, *sizes, []), strict=True
    ):
        assert torch.equal(ours, defined)


def test_nan_stays_nan_and_zeros_have_a_scale() -> None:
    stored = torch.tensor([[0x7F, 0xFF, 0x01, 0x80], [0, 0, 0, 0]], dtype=torch.uint8)
    weight, scale = stored.view(torch.float8_e4m3fn), torch.tensor([[2.0]])
    for dtype in (torch.bfloat16, torch.float32):
        made = ops.block_fp8_floats(weight, scale, 8, 8, dtype, [])
        assert made[0].isnan().tolist() == [True, True, False, False]
        assert made[0, 2:].tolist() == [2.0**-8, 0.0]
    integers, row_scale = ops.block_fp8_integers(weight, scale, 8, 8, [])
    assert row_scale[0].isnan().all()
    assert row_scale[1].item() == 1.0
    assert not integers[1].any()


def test_memory_of_an_unused_spare_tensor_is_taken() -> None:
    weight, scale = weight_and_scale(40, 48, 0)
    plain = ops.block_fp8_floats(weight, scale, BLOCK_ROWS, BLOCK_COLUMNS, torch.bfloat16, [])
    small, held, free = (torch.zeros(40 * size * 48, dtype=torch.int8) for size in (1, 2, 3))
    view = held[:1]
    spares = [small, held, free]
    made = ops.block_fp8_floats(weight, scale, BLOCK_ROWS, BLOCK_COLUMNS, torch.bfloat16, spares)
    assert made.data_ptr() == free.data_ptr()
    assert torch.equal(made, plain)
    assert not view.any()
    integers, _ = ops.block_fp8_integers(weight, scale, BLOCK_ROWS, BLOCK_COLUMNS, spares)
    assert integers.data_ptr() == small.data_ptr()
    assert torch.equal(made, plain)
    other, _ = ops.block_fp8_integers(weight, scale, BLOCK_ROWS, BLOCK_COLUMNS, spares)
    assert other.data_ptr() not in {spare.data_ptr() for spare in spares}


def test_mismatched_arguments_are_refused() -> None:
    weight, scale = torch.zeros(16, 24).to(torch.float8_e4m3fn), torch.ones(2, 1)
    with pytest.raises(TypeError, match="give float8_e4m3fn and float32"):
        ops.block_fp8_integers(weight.float(), scale, 8, 24, [])
    with pytest.raises(TypeError, match="float32 and bfloat16 can be made"):
        ops.block_fp8_floats(weight, scale, 8, 24, torch.float16, [])
    with pytest.raises(ValueError, match=r"a scale for each block of 8 x 12"):
        ops.block_fp8_integers(weight, scale, 8, 12, [])
    with pytest.raises(ValueError, match=r"a scale for each block of 24 x 16"):
        ops.block_fp8_integers(weight.t(), scale, 24, 16, [])
    with pytest.raises(ValueError, match="blocks of 0 x 8"):
        ops.block_fp8_integers(weight, scale, 0, 8, [])
