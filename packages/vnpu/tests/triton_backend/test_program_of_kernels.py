"""Triton kernels on virtual NPUs equal torch or a definition."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from vllm_davinci.vnpu import counted
from vllm_davinci.vnpu.triton_backend.cann.extension import extract_slice, get_element, insert_slice

SIZE = 1000


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


def on_npu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [each.npu() for each in tensors]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8]
)
def test_sums_have_torchs_bits(dtype: torch.dtype):
    given = (torch.randn(2, SIZE) * 50).to(dtype)
    x, y = on_npu(*given)
    out = torch.zeros_like(x)
    add_kernel[(triton.cdiv(SIZE, 128),)](x, y, out, SIZE, BLOCK=128)
    torch.testing.assert_close(out.cpu(), given[0] + given[1], rtol=0, atol=0)


def test_a_launch_counts_as_one():
    x, y = on_npu(torch.ones(SIZE), torch.ones(SIZE))
    out = torch.zeros_like(x)
    with counted() as counts:
        add_kernel[(8,)](x, y, out, SIZE, BLOCK=128)
    assert (counts.launches, counts.synchronizations) == (1, 0)


def test_a_graph_replays_a_kernel():
    x, y = on_npu(torch.ones(SIZE), torch.ones(SIZE))
    out = torch.zeros_like(x)
    add_kernel[(8,)](x, y, out, SIZE, BLOCK=128)
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        add_kernel[(8,)](x, y, out, SIZE, BLOCK=128)
        result = out * 2
    x.fill_(5)
    graph.replay()
    assert result.cpu().unique().tolist() == [12.0]


@triton.jit
def integers_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + lanes), tl.load(y_ptr + lanes)
    tl.store(out_ptr + lanes, x // y)
    tl.store(out_ptr + BLOCK + lanes, x % y)
    tl.store(out_ptr + 2 * BLOCK + lanes, (x << 3) ^ (x >> 2) | y)
    tl.store(out_ptr + 3 * BLOCK + lanes, tl.maximum(x, y) - tl.minimum(x, y))
    tl.store(out_ptr + 4 * BLOCK + lanes, tl.where(x < y, x, -x))
    tl.store(out_ptr + 5 * BLOCK + lanes, tl.umulhi(x.to(tl.uint32), y.to(tl.uint32)).to(tl.int32))


def test_integers_are_exact():
    x = torch.randint(-(2**31), 2**31 - 1, (256,), dtype=torch.int32)
    y = torch.randint(-50, 50, (256,), dtype=torch.int32)
    x[0], y[0] = -(2**31), -1  # the quotient wraps
    y[y == 0] = 7
    out = torch.zeros(6, 256, dtype=torch.int32).npu()
    integers_kernel[(1,)](x.npu(), y.npu(), out, BLOCK=256)
    a, b = x.long(), y.long()
    unsigned = ((a % 2**32).numpy().astype(object) * (b % 2**32).numpy().astype(object)) >> 32
    expected = [
        torch.div(a, b, rounding_mode="trunc"),
        torch.fmod(a, b),
        ((x << 3) ^ (x >> 2)) | y,
        torch.maximum(a, b) - torch.minimum(a, b),
        torch.where(a < b, a, -a),
        torch.tensor(unsigned.tolist()),
    ]
    for ours, theirs in zip(out.cpu(), expected, strict=True):
        assert torch.equal(ours, theirs.to(torch.int32))


@triton.jit
def floats_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes)
    tl.store(out_ptr + lanes, tl.exp(x))
    tl.store(out_ptr + BLOCK + lanes, tl.log(tl.abs(x)))
    tl.store(out_ptr + 2 * BLOCK + lanes, tl.sqrt_rn(tl.abs(x)))
    tl.store(out_ptr + 3 * BLOCK + lanes, tl.div_rn(1.0, x))
    tl.store(out_ptr + 4 * BLOCK + lanes, tl.floor(x) + tl.ceil(x))
    tl.store(out_ptr + 5 * BLOCK + lanes, tl.sigmoid(x))
    tl.store(out_ptr + 6 * BLOCK + lanes, x.to(tl.bfloat16).to(tl.float32))
    tl.store(out_ptr + 7 * BLOCK + lanes, x.to(tl.float16).to(tl.float32))
    tl.store(out_ptr + 8 * BLOCK + lanes, x.to(tl.int32).to(tl.float32))
    tl.store(out_ptr + 9 * BLOCK + lanes, tl.erf(x) + tl.sin(x))


def test_floats():
    x = torch.randn(512) * 3
    out = torch.zeros(10, 512).npu()
    floats_kernel[(1,)](x.npu(), out, BLOCK=512)
    exp, log, root, inverse, whole, sigmoid, bf16, f16, integer, others = out.cpu()
    for ours, theirs in (
        (root, x.abs().double().sqrt().float()),  # torch's float32 result has 1 ulp more
        (inverse, 1 / x),
        (whole, x.floor() + x.ceil()),
        (bf16, x.bfloat16().float()),
        (f16, x.half().float()),
        (integer, x.int().float()),
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(exp, x.exp(), rtol=3e-7, atol=0)
    torch.testing.assert_close(log, x.abs().log(), rtol=3e-7, atol=1e-7)
    torch.testing.assert_close(sigmoid, x.sigmoid(), rtol=5e-7, atol=0)
    torch.testing.assert_close(others, x.erf() + x.sin(), rtol=0, atol=5e-7)


@triton.jit
def float8_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes)
    tl.store(out_ptr + lanes, x.to(tl.float8e4nv).to(tl.float32))
    tl.store(out_ptr + BLOCK + lanes, x.to(tl.float8e5).to(tl.float32))


def test_float8_has_torchs_bits():
    x = torch.cat([torch.randn(500) * scale for scale in (100.0, 1.0, 1e-3)] + [torch.zeros(548)])
    x = x.clamp(-448, 448)  # beyond this, we saturate and torch gives NaN
    out = torch.zeros(2, 2048).npu()
    float8_kernel[(1,)](x.npu(), out, BLOCK=2048)
    assert torch.equal(out[0].cpu(), x.to(torch.float8_e4m3fn).float())
    assert torch.equal(out[1].cpu(), x.to(torch.float8_e5m2).float())


@triton.jit
def rows_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + rows * COLUMNS + columns)
    of_row = out_ptr + tl.arange(0, ROWS)
    tl.store(of_row, tl.sum(x, axis=1))
    tl.store(of_row + ROWS, tl.max(x, axis=1))
    tl.store(of_row + 2 * ROWS, tl.argmax(x, axis=1).to(tl.float32))
    tl.store(of_row + 3 * ROWS, tl.sum(tl.where(x > 0, 1, 0), axis=1).to(tl.float32))
    of_element = out_ptr + 4 * ROWS + rows * COLUMNS + columns
    tl.store(of_element, tl.cumsum(x, axis=1))
    tl.store(of_element + ROWS * COLUMNS, tl.sort(x, dim=1))
    tl.store(of_element + 2 * ROWS * COLUMNS, tl.flip(x, dim=1))
    transposed = tl.trans(x)
    of_transposed = out_ptr + 4 * ROWS + 3 * ROWS * COLUMNS
    tl.store(
        of_transposed + tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :],
        transposed,
    )


def test_reductions_scans_and_shapes():
    rows, columns = 8, 64
    x = torch.randn(rows, columns)
    x[3, 5] = x[3, 50] = 9.0  # of equal values, the first is the greatest
    out = torch.zeros(4 * rows + 4 * rows * columns).npu()
    rows_kernel[(1,)](x.npu(), out, ROWS=rows, COLUMNS=columns)
    of_rows, of_elements = out.cpu()[: 4 * rows].view(4, rows), out.cpu()[4 * rows :].view(4, -1)
    torch.testing.assert_close(of_rows[0], x.sum(1))
    assert torch.equal(of_rows[1], x.amax(1))
    assert torch.equal(of_rows[2], x.argmax(1).float())
    assert torch.equal(of_rows[3], (x > 0).sum(1).float())
    torch.testing.assert_close(of_elements[0].view(rows, columns), x.cumsum(1))
    assert torch.equal(of_elements[1].view(rows, columns), x.sort(1).values)
    assert torch.equal(of_elements[2].view(rows, columns), x.flip(1))
    assert torch.equal(of_elements[3].view(columns, rows), x.T)


@triton.jit
def pairs_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    even, odd = tl.split(tl.reshape(tl.load(x_ptr + lanes), (BLOCK // 2, 2)))
    tl.store(out_ptr + lanes, tl.interleave(odd, even))


def test_pairs_are_split_and_joined():
    x = torch.randn(64)
    out = torch.zeros(64).npu()
    pairs_kernel[(1,)](x.npu(), out, BLOCK=64)
    assert torch.equal(out.cpu(), x.view(-1, 2).flip(1).reshape(-1))


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, K: tl.constexpr, STEP: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    sums = tl.zeros((N, N), dtype=tl.float32)
    for start in range(0, K, STEP):
        steps = start + tl.arange(0, STEP)
        a = tl.load(a_ptr + rows * K + steps[None, :])
        b = tl.load(b_ptr + steps[:, None] * N + columns)
        sums = tl.dot(a, b, sums)
    tl.store(out_ptr + rows * N + columns, sums)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_do_not_depend_on_how_k_is_split(dtype: torch.dtype):
    a, b = torch.randn(16, 64).to(dtype), torch.randn(64, 16).to(dtype)
    results = []
    for step in (16, 64):
        out = torch.zeros(16, 16).npu()
        product_kernel[(1,)](a.npu(), b.npu(), out, K=64, STEP=step, N=16)
        results.append(out.cpu())
    assert torch.equal(*results)
    torch.testing.assert_close(results[0].double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@triton.jit
def collatz(n):
    steps = 0
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    return steps


@triton.jit(noinline=True)
def squared(x):
    return x * x


@triton.jit
def control_kernel(x_ptr, out_ptr, count):
    number = tl.program_id(0)
    if number >= count:
        return
    n = tl.load(x_ptr + number)
    a, b = 0, 1
    for _ in range(n % 20):
        a, b = b, a + b
    tl.store(out_ptr + 3 * number, collatz(n))
    tl.store(out_ptr + 3 * number + 1, a)
    tl.store(out_ptr + 3 * number + 2, squared(n) + squared(n + 1))


def test_loops_branches_and_calls():
    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    numbers = [1, 6, 7, 27, 97]
    fibonacci = [0, 1]
    for _ in range(20):
        fibonacci.append(fibonacci[-2] + fibonacci[-1])
    out = torch.zeros(5, 3, dtype=torch.int32).npu()
    control_kernel[(7,)](torch.tensor(numbers, dtype=torch.int32).npu(), out, 5)
    assert out.tolist() == [[steps(n), fibonacci[n % 20], n * n + (n + 1) ** 2] for n in numbers]


@triton.jit
def atomic_kernel(ids_ptr, counts_ptr, largest_ptr, sums_ptr, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + lanes)
    tl.atomic_add(counts_ptr + ids, 1, mask=ids > 0)
    tl.atomic_max(largest_ptr, tl.max(ids))
    tl.atomic_add(sums_ptr, tl.sum(ids).to(tl.float32))


def test_atomic_updates():
    ids = torch.randint(0, 10, (256,), dtype=torch.int32)
    counts, largest, sums = on_npu(
        torch.zeros(10, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    )
    atomic_kernel[(4,)](ids.npu(), counts, largest, sums, BLOCK=64)
    expected = ids.bincount(minlength=10)
    expected[0] = 0
    assert torch.equal(counts.cpu(), expected.int())
    assert (largest.item(), sums.item()) == (ids.max().item(), ids.sum().item())


@triton.jit
def table_kernel(table_ptr, out_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    address = tl.load(table_ptr + row).to(tl.pointer_type(tl.int32))
    lanes = tl.arange(0, BLOCK)
    tl.store(out_ptr + row * BLOCK + lanes, tl.load(address + lanes) + row)


def test_addresses_that_lie_in_memory():
    rows = [torch.arange(16, dtype=torch.int32).npu() * n for n in (1, 10)]
    table = torch.tensor([each.data_ptr() for each in rows], dtype=torch.int64).npu()
    out = torch.zeros(2, 16, dtype=torch.int32).npu()
    table_kernel[(2,)](table, out, BLOCK=16)
    assert torch.equal(out[0].cpu(), rows[0].cpu()) and torch.equal(out[1].cpu(), rows[1].cpu() + 1)


@triton.jit
def undefined_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out_ptr + lanes, tl.load(x_ptr + lanes, mask=lanes < size))


def test_masked_lanes_read_poison():
    out = torch.zeros(8).npu()
    undefined_kernel[(1,)](torch.ones(3).npu(), out, 3, BLOCK=8)
    assert out[:3].tolist() == [1, 1, 1] and bool(out[3:].isnan().all())


# --- bad input: kernel, program and line ---------------------------------------------------------


def failure(kernel: Any, *arguments: Any, grid: tuple[int, ...] = (1,), **options: Any) -> str:
    with pytest.raises((RuntimeError, NotImplementedError)) as raised:
        kernel[grid](*arguments, **options)
    return str(raised.value)


def line_of(kernel: Any, text: str) -> int:
    lines = kernel.fn.__code__.co_firstlineno, kernel.src
    with open(__file__) as file:
        found = [n for n, line in enumerate(file, 1) if text in line and n >= lines[0]]
    return found[0]


def test_an_address_behind_a_tensor_names_program_line_and_parameter():
    x, y = on_npu(torch.ones(300), torch.ones(300))
    text = failure(add_kernel, x, y, torch.zeros_like(x)[:200].clone(), 300, grid=(3,), BLOCK=128)
    line = line_of(add_kernel, "tl.store(out_ptr + offsets, x + y")
    assert (
        f"Triton kernel add_kernel, program (1, 0, 0), {__file__}:{line}: a store of lane 72"
        in text
    )
    assert "800 bytes behind the begin of out_ptr, a tensor with 800 bytes" in text


def test_a_tensor_of_the_host_is_refused():
    x = torch.ones(128).npu()
    text = failure(add_kernel, x, torch.ones(128), x, 128, BLOCK=128)
    assert "no address of the device" in text and "program (0, 0, 0)" in text


@triton.jit
def waiting_kernel(flag_ptr, out_ptr):
    while tl.load(flag_ptr, volatile=True) == 0:
        pass
    tl.store(out_ptr, 1)


def test_a_loop_that_never_ends_is_refused():
    flag = torch.zeros(1, dtype=torch.int32).npu()
    text = failure(waiting_kernel, flag, flag.clone())
    line = line_of(waiting_kernel, "while tl.load(flag_ptr")
    assert f"waiting_kernel, program (0, 0, 0), {__file__}:{line}: an endless loop" in text


@triton.jit
def asm_kernel(out_ptr):
    lanes = tl.arange(0, 16)
    value = tl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [lanes], tl.int32, True, 1)
    tl.store(out_ptr + lanes, value)


def test_an_unknown_operation_is_refused_by_name():
    text = failure(asm_kernel, torch.zeros(16, dtype=torch.int32).npu())
    line = line_of(asm_kernel, "tl.inline_asm_elementwise")
    assert f"Triton kernel asm_kernel, {__file__}:{line}: tt.elementwise_inline_asm" in text


@triton.jit
def slices_kernel(x_ptr, y_ptr, out_ptr, picked_ptr, row):
    lanes = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x, y = tl.load(x_ptr + lanes), tl.load(y_ptr + lanes)
    part = extract_slice(x, (row, 2), (4, 4), (1, 3))
    tl.store(out_ptr + lanes, insert_slice(y, part, (2, row), (4, 4), (2, 1)))
    tl.store(picked_ptr, get_element(x, (row, 5)))
    tl.store(picked_ptr + 1, get_element(tl.max(x, 1), (7,)))


def test_slices_of_tensors_equal_those_of_torch():
    x, y = torch.randn(2, 8, 16)
    x[3, 5] = float("inf")
    expected = y.clone()
    expected[2::2, 3:7] = x[3:7, 2:14:3][:3]  # the fourth row is out of bounds
    given = on_npu(x, y)
    out, picked = torch.zeros_like(given[1]), torch.zeros(2).npu()
    slices_kernel[(1,)](*given, out, picked, 3)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0)
    assert picked.tolist() == [x[3, 5].item(), x[7].max().item()]
