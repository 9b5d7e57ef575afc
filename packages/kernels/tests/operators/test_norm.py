"""Norms equal torch_npu's launches bit for bit, and their definitions."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci import operators
from vllm_davinci_testing.processes.forked import output_of

ops = torch.ops.vllm_davinci
EPSILON = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = st.tuples(st.integers(0, 9), st.sampled_from([1, 16, 33, 128]))


def rows(sizes: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator).to(dtype)


def near(npu: torch.Tensor, expected: torch.Tensor) -> None:
    # One unit in the last place of the output's dtype, for values up to about 8.
    limit = 16 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(npu.cpu(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@given(sizes=SIZES, seed=st.integers(0, 99))
def test_norm_with_and_without_residual(dtype, sizes, seed):
    x, residual = rows(sizes, dtype, seed), rows(sizes, dtype, seed + 1)
    weight = rows(sizes[1:], dtype, seed + 2)
    inputs = [t.npu() for t in (x, residual, weight)]
    alone = ops.rms_norm(inputs[0], inputs[2], EPSILON)
    assert torch.equal(alone, torch_npu.npu_rms_norm(inputs[0], inputs[2], EPSILON)[0])
    near(alone, operators.rms_norm(x, weight, EPSILON))
    normalized, total = ops.add_rms_norm(*inputs, EPSILON)
    expected, _, expected_total = torch_npu.npu_add_rms_norm(*inputs, EPSILON)
    assert torch.equal(normalized, expected) and torch.equal(total, expected_total)
    for ours, defined in zip(
        (normalized, total), operators.add_rms_norm(x, residual, weight, EPSILON), strict=True
    ):
        near(ours, defined)


def test_norm_of_strided_rows() -> None:
    wide = rows((5, 96), torch.float32, 1).npu()
    weight = rows((64,), torch.float32, 2).npu()
    strided = wide[:, 16:80]
    assert torch.equal(
        ops.rms_norm(strided, weight, EPSILON), ops.rms_norm(strided.contiguous(), weight, EPSILON)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(sizes=SIZES, seed=st.integers(0, 99))
def test_norm_quantized_row_by_row(dtype: torch.dtype, sizes: tuple[int, int], seed: int) -> None:
    inputs = [rows(s, dtype, seed + n).npu() for n, s in enumerate((sizes, sizes, sizes[1:]))]
    integers, scales, total = ops.add_rms_norm_dynamic_quant(*inputs, EPSILON)
    normalized, _, expected_total = torch_npu.npu_add_rms_norm(*inputs, EPSILON)
    expected, expected_scales = torch_npu.npu_dynamic_quant(normalized)
    assert torch.equal(integers, expected) and torch.equal(scales, expected_scales)
    assert torch.equal(total, expected_total)
    defined = operators.quantization.dynamic_quant(normalized.cpu())
    assert torch.equal(integers.cpu(), defined[0])
    torch.testing.assert_close(scales.cpu(), defined[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@given(sizes=SIZES, seed=st.integers(0, 99))
def test_norm_quantized_with_a_given_scale(dtype, has_bias, sizes, seed):
    host = [rows(s, dtype, seed + n) for n, s in enumerate((sizes, sizes, sizes[1:], sizes[1:]))]
    x, residual, weight, bias = (t.npu() for t in host)
    scale, offset = torch.tensor([0.021]), torch.tensor([seed - 50], dtype=torch.int32)
    integers, total = ops.add_rms_norm_quant(
        x, residual, weight, bias if has_bias else None, scale.npu(), offset.npu(), EPSILON
    )
    normalized, _, expected_total = torch_npu.npu_add_rms_norm(x, residual, weight, EPSILON)
    if has_bias:
        normalized.add_(bias)
    expected = torch_npu.npu_quantize(normalized, scale.npu(), offset.npu(), torch.qint8, -1, True)
    assert torch.equal(integers, expected) and torch.equal(total, expected_total)
    defined, defined_total = operators.add_rms_norm_quant(
        *host[:3], host[3] if has_bias else None, scale, offset, EPSILON
    )
    assert torch.equal(total.cpu(), defined_total)
    # The norm may differ in its last bit, for values up to about 8.
    steps = 1 + 16 * torch.finfo(dtype).eps * 8 / float(scale)
    assert sizes[0] == 0 or (integers.cpu().int() - defined.int()).abs().max() <= steps


NO_ROWS = """
import torch
import vllm_davinci.kernels

ops = torch.ops.vllm_davinci
x, weight = torch.ones(0, 64, dtype=torch.bfloat16).npu(), torch.ones(64).bfloat16().npu()
scale, offset = torch.ones(1).npu(), torch.zeros(1, dtype=torch.int32).npu()
for outputs in (
    (ops.rms_norm(x, weight, 1e-5),),
    ops.add_rms_norm(x, x, weight, 1e-5),
    ops.add_rms_norm_dynamic_quant(x, x, weight, 1e-5),
    ops.add_rms_norm_quant(x, x, weight, weight, scale, offset, 1e-5),
):
    print(*(f"{tuple(output.shape)} {output.dtype}" for output in outputs), sep="; ")
"""


@pytest.mark.parametrize("chip", ["Ascend910B3", "Ascend910_9391"])
def test_norms_of_no_rows_launch_nothing(chip: str) -> None:
    """aclnnAddRmsNorm refuses empty tensors."""
    rows, integers = "(0, 64) torch.bfloat16", "(0, 64) torch.int8"
    assert output_of(NO_ROWS, VNPU_SOC=chip) == [
        rows,
        f"{rows}; {rows}",
        f"{integers}; (0,) torch.float32; {rows}",
        f"{integers}; {rows}",
    ]


def test_mismatched_sizes_are_refused() -> None:
    x = torch.ones(3, 8).npu()
    with pytest.raises(ValueError, match=r"\[3, 8\].*\[7\].*one entry per entry"):
        ops.rms_norm(x, torch.ones(7).npu(), EPSILON)
    with pytest.raises(ValueError, match=r"residual of sizes \[2, 8\]"):
        ops.add_rms_norm(x, x[:2], torch.ones(8).npu(), EPSILON)
    scale, offset = torch.ones(1).npu(), torch.zeros(1, dtype=torch.int32).npu()
    with pytest.raises(ValueError, match=r"bias of sizes \[7\] beside a weight of sizes \[8\]"):
        ops.add_rms_norm_quant(x, x, x[0], torch.ones(7).npu(), scale, offset, EPSILON)
    with pytest.raises(ValueError, match=r"scale of sizes \[8\].*give \[1\] both"):
        ops.add_rms_norm_quant(x, x, x[0], None, x[0], offset, EPSILON)
    with pytest.raises(RuntimeError, match=r"tensor on cpu among tensors on the NPU.*\.npu\(\)"):
        ops.rms_norm(x, torch.ones(8), EPSILON)
