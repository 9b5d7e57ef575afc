"""torch's functions on FRACTAL_NZ tensors, for which torch_npu uses the older interface."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import values
from vllm_davinci_testing.processes.programs import output_of

NZ = 29
Function = Callable[..., Any]


def tiled(tensor: torch.Tensor) -> torch.Tensor:
    there = torch_npu.npu_format_cast(tensor.npu(), NZ)
    assert int(torch_npu.get_npu_format(there)) == NZ
    return there


def matrix(seed: int, *sizes: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Makes a matrix with partial last tiles in both dimensions."""
    return values(sizes or (35, 50), dtype, seed, low=0.25)


def same(f: Function, *operands: torch.Tensor, rtol: float = 0.0) -> None:
    compare(f(*map(tiled, operands)), f(*operands), rtol=rtol)


UNARY: dict[str, Function] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("abs", "neg", "isfinite", "logical_not", "clone", "zeros_like", "ones_like"),
        )
    },
    "full_like": lambda x: torch.full_like(x, 2.5),
    "to float32": lambda x: x.float(),
    "to int32": lambda x: x.int(),
    "to bool": lambda x: x.bool(),
    "plus a number": lambda x: x + 1.5,
    "minus a number": lambda x: x - 1.5,
    "times a number": lambda x: x * 1.5,
    "divided by a number": lambda x: x / 1.5,
    "equal to a number": lambda x: x == 1.5,
    "greater than a number": lambda x: x > 1.5,
    "less than a number": lambda x: x < 1.5,
    "in place": lambda x: x.add_(1.5).mul_(2).sub_(1).div_(4).fill_(3).add_(x),
    "zero_": lambda x: x.zero_(),
    "a slice plus one": lambda x: x[3:20] + 1,
    "a view plus one": lambda x: x.view(50, 35) + 1,
    "transposed": lambda x: x.t().contiguous(),
    "repeated": lambda x: x.repeat(2, 3),
    "second half": lambda x: x.chunk(2, -1)[1].contiguous(),
    "largest": lambda x: x.max(),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(0),
    "any": lambda x: x.bool().any(-1),
    "all": lambda x: x.bool().all(-1),
}


@pytest.mark.parametrize("name", UNARY)
def test_a_function_of_one_matrix(name: str) -> None:
    same(UNARY[name], matrix(0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("f", [torch.add, torch.sub, torch.mul, torch.eq, torch.gt, torch.neg])
def test_other_dtypes(f: Function, dtype: torch.dtype) -> None:
    operands = [matrix(seed, dtype=dtype) for seed in range(1 if f is torch.neg else 2)]
    same(f, *operands)


BINARY = ("add", "sub", "mul", "div", "eq", "ne", "gt", "ge", "lt", "le", "logical_and")


@pytest.mark.parametrize("name", BINARY)
def test_a_function_of_two_matrices(name: str) -> None:
    """Either both operands are tiled, or only one."""
    f = getattr(torch, name)
    x, y = matrix(0), matrix(1)
    same(f, x, y, rtol=1e-6)
    compare(f(tiled(x), y.npu()), f(x, y), rtol=1e-6)
    compare(f(x.npu(), tiled(y)), f(x, y), rtol=1e-6)


@pytest.mark.parametrize("f", [torch.add, torch.sub])
def test_a_scaled_operand_is_rounded_with_the_sum(f: Function) -> None:
    x, y = matrix(0, dtype=torch.float32), matrix(1, dtype=torch.float32)
    same(lambda x, y: f(x, y, alpha=2), x, y)


@pytest.mark.parametrize("dim", [None, 0, -1])
@pytest.mark.parametrize("f", [torch.sum, torch.mean])
def test_sums_are_rounded_once(f: Function, dim: int | None) -> None:
    x = matrix(0)
    npu = f(tiled(x)) if dim is None else f(tiled(x), dim)
    exact = f(x.double()) if dim is None else f(x.double(), dim)
    compare(npu, exact.half(), rtol=1e-3)


def test_matrices_are_joined_and_broadcast() -> None:
    x, y = matrix(0), matrix(1)
    same(lambda x, y: torch.cat([x, y]), x, y)
    same(lambda x, y: torch.cat([x, y], -1), x, y)
    same(lambda x, y: torch.stack([x, y]), x, y)
    same(lambda x: x.expand(35, 50).contiguous(), matrix(2, 1, 50))
    same(lambda x: x.permute(2, 0, 1).contiguous(), matrix(3, 4, 35, 50))


def test_matrices_are_compared_as_wholes() -> None:
    x = matrix(0)
    assert torch.equal(tiled(x), tiled(x))
    assert not torch.equal(tiled(x), tiled(x + 1))
    assert torch.allclose(tiled(x), tiled(x))


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.float() @ y.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_with_tiled_weights(dtype: torch.dtype) -> None:
    x, weight = matrix(0, 7, 50, dtype=dtype), matrix(1, 50, 67, dtype=dtype)
    bias = matrix(2, 67, dtype=dtype)
    compare(x.npu() @ tiled(weight), product(x, weight))
    compare(tiled(x) @ tiled(weight), product(x, weight))
    compare(tiled(x) @ weight.npu(), product(x, weight))
    compare(F.linear(x.npu(), tiled(weight.t().contiguous())), product(x, weight))
    compare(F.linear(tiled(x), tiled(weight.t().contiguous())), product(x, weight))
    with_bias = (x.float() @ weight.float() + bias.float()).to(dtype)
    compare(F.linear(x.npu(), tiled(weight.t().contiguous()), bias.npu()), with_bias)
    compare(torch.addmm(bias.npu(), tiled(x), tiled(weight)), with_bias)
    compare(torch_npu.npu_linear(x.npu(), tiled(weight.t().contiguous())), product(x, weight))


def test_products_of_batches() -> None:
    x, y = matrix(0, 3, 7, 50), matrix(1, 3, 50, 67)
    compare(torch.bmm(tiled(x), tiled(y)), product(x, y))
    compare(torch.bmm(x.npu(), tiled(y)), product(x, y))
    compare(torch.matmul(tiled(x), tiled(y[0])), product(x, y[0]))
    compare(
        torch.bmm(tiled(x), tiled(y.transpose(1, 2).contiguous()).transpose(1, 2)), product(x, y)
    )


@pytest.mark.refused_calls
def test_an_operator_that_is_missing_is_named() -> None:
    with pytest.raises(RuntimeError, match="operator 'NonZero'"):
        tiled(matrix(0)).nonzero()


def test_a_legacy_product_has_the_cost_of_a_current_one() -> None:
    (line,) = output_of(
        """
        import torch, torch_npu
        torch.npu.config.allow_internal_format = True
        x = torch.ones(2048, 2048, dtype=torch.float16, device="npu")
        def took(left, right):
            begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
            torch.npu.synchronize()
            begin.record()
            left @ right
            end.record()
            torch.npu.synchronize()
            return begin.elapsed_time(end)
        print(took(x, x), took(*2 * [torch_npu.npu_format_cast(x, 29)]))
        """,
        VirtualDeviceConfig(chip="ascend910b2", compute=False),
    )
    plain, legacy = map(float, line.split())
    assert legacy == pytest.approx(plain, rel=0.05)
