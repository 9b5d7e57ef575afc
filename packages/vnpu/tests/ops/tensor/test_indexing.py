"""Gather, scatter, advanced indexing and masks equal torch's on the CPU."""

from collections.abc import Callable

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import ALL, FLOATS, NUMBERS, Pair, tensors, values

GRID = ((6, 5, 4),)
ROWS = torch.tensor([3, 0, 3, 5])
COLUMNS = torch.tensor([[4], [2]])
NONE = torch.tensor([], dtype=torch.int64)

Selection = Callable[[torch.Tensor, torch.device], tuple[object, ...]]
SELECTIONS: dict[str, Selection] = {
    "rows": lambda x, d: (ROWS.to(d),),
    "int32 rows": lambda x, d: (ROWS.int().to(d),),
    "negative rows": lambda x, d: (ROWS.sub(6).to(d),),
    "columns": lambda x, d: (slice(None), COLUMNS.to(d)),
    "last dimension": lambda x, d: (..., ROWS[:2].to(d)),
    "pairs": lambda x, d: (ROWS.to(d), COLUMNS.to(d)),
    "pairs around a slice": lambda x, d: (ROWS.to(d), slice(None), ROWS.clamp_max(3).to(d)),
    "no rows": lambda x, d: (NONE.to(d),),
    "no columns": lambda x, d: (slice(None), NONE.to(d)),
    "mask": lambda x, d: (x > 0,),
    "mask of rows": lambda x, d: (torch.tensor([True, False, True, False, False, True]).to(d),),
    "mask of columns": lambda x, d: (
        slice(None),
        torch.tensor([True, False, False, False, True]).to(d),
    ),
    "empty mask": lambda x, d: (torch.zeros(6, dtype=torch.bool).to(d),),
    "byte mask": lambda x, d: (torch.tensor([1, 0, 1, 0, 0, 1], dtype=torch.uint8).bool().to(d),),
}


@pytest.mark.parametrize("name", SELECTIONS)
@given(x=tensors((torch.float32, torch.bfloat16, torch.int64, torch.bool), GRID))
def test_advanced_indexing_equals_torch(name: str, x: Pair) -> None:
    npu, cpu = x.npu, x.cpu
    compare(npu[SELECTIONS[name](npu, npu.device)], cpu[SELECTIONS[name](cpu, cpu.device)])


@pytest.mark.parametrize("name", SELECTIONS)
@given(x=tensors((torch.float32, torch.bfloat16, torch.int64), GRID), seed=st.integers(0, 99))
def test_writes_through_advanced_indices_equal_torch(name: str, x: Pair, seed: int) -> None:
    npu, cpu = x.npu.clone(), x.cpu.clone()
    at_npu, at_cpu = SELECTIONS[name](npu, npu.device), SELECTIONS[name](cpu, cpu.device)
    new = values(cpu[at_cpu].shape, cpu.dtype, seed)
    if "rows" in name or "pairs" in name:
        new = torch.zeros_like(new)  # a position that occurs twice takes either value
    npu[at_npu] = new.npu()
    cpu[at_cpu] = new
    compare(npu, cpu)
    npu[at_npu] = 3
    cpu[at_cpu] = 3
    compare(npu, cpu)


@given(x=tensors((torch.float32, torch.int64), GRID), seed=st.integers(0, 99))
def test_accumulating_writes_add_repeated_positions(x: Pair, seed: int) -> None:
    new = values((4, 5, 4), x.cpu.dtype, seed)
    npu, cpu = x.npu.clone(), x.cpu.clone()
    npu.index_put_((ROWS.npu(),), new.npu(), accumulate=True)
    cpu.index_put_((ROWS,), new, accumulate=True)
    compare(npu, cpu, rtol=1e-6, atol=1e-6)


def test_values_broadcast_over_the_written_positions() -> None:
    npu, cpu = torch.zeros(6, 5).npu(), torch.zeros(6, 5)
    row = values((5,), torch.float32, 1)
    npu[ROWS.npu()] = row.npu()
    cpu[ROWS] = row
    compare(npu, cpu)


def test_expanded_source_and_overlapping_windows_are_read_as_on_the_cpu() -> None:
    base = values((9,), torch.float32, 1)
    windows_npu, windows_cpu = base.npu().unfold(0, 4, 1), base.unfold(0, 4, 1)
    compare(windows_npu[ROWS.npu()], windows_cpu[ROWS])
    compare(windows_npu.index_select(1, ROWS[:2].npu()), windows_cpu.index_select(1, ROWS[:2]))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@given(x=tensors(ALL, GRID), dim=st.integers(-3, 2))
def test_index_select_equals_torch(index_dtype: torch.dtype, x: Pair, dim: int) -> None:
    index = torch.tensor([3, 0, 2, 3], dtype=index_dtype)
    compare(x.npu.index_select(dim, index.npu()), x.cpu.index_select(dim, index))
    compare(x.npu.index_select(dim, NONE.npu()), x.cpu.index_select(dim, NONE))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_embedding_equals_torch(index_dtype, shape, dtype):
    weight = values((11, 8), dtype, 1)
    index = values(shape, torch.int64, 2, low=0, high=11).to(index_dtype)
    embedding = torch.nn.functional.embedding
    compare(embedding(index.npu(), weight.npu()), embedding(index, weight))
    # A table that is a slice of another: rows with a stride.
    compare(embedding(index.npu(), weight.npu()[:, 2:6]), embedding(index, weight[:, 2:6]))


def test_embedding_outside_the_table_is_refused() -> None:
    with pytest.raises(RuntimeError, match="aclnnEmbedding"):
        torch.nn.functional.embedding(torch.tensor([11]).npu(), torch.zeros(11, 8).npu())
        torch.npu.synchronize()


@given(x=tensors(ALL, GRID), dim=st.integers(-3, 2), seed=st.integers(0, 99))
def test_gather_and_take_equal_torch(x: Pair, dim: int, seed: int) -> None:
    index = values((3, 2, 4), torch.int64, seed, low=0, high=4)
    compare(torch.gather(x.npu, dim, index.npu()), torch.gather(x.cpu, dim, index))
    compare(torch.take(x.npu, index.npu()), torch.take(x.cpu, index))


@st.composite
def scatters(draw: st.DrawFn) -> tuple[Pair, int, torch.Tensor]:
    """A target [6, 5, 4], a dimension, and an index [3, 2, 4] without repeated positions in it."""
    x = draw(tensors((torch.float32, torch.int32), GRID))
    dim = draw(st.integers(-3, 2))
    steps = torch.arange((3, 2, 4)[dim]).view([-1 if d == dim % 3 else 1 for d in range(3)])
    return x, dim, steps.expand(3, 2, 4).contiguous()


@given(case=scatters(), seed=st.integers(0, 99))
def test_scatter_equals_torch(case: tuple[Pair, int, torch.Tensor], seed: int) -> None:
    x, dim, index = case
    source = values((3, 2, 4), x.cpu.dtype, seed)
    npu_index, npu_source = index.npu(), source.npu()
    compare(x.npu.scatter(dim, npu_index, npu_source), x.cpu.scatter(dim, index, source))
    compare(x.npu.scatter(dim, npu_index, 2), x.cpu.scatter(dim, index, 2))
    compare(
        x.npu.clone().scatter_(dim, npu_index, npu_source),
        x.cpu.clone().scatter_(dim, index, source),
    )
    compare(x.npu.clone().scatter_(dim, npu_index, 2), x.cpu.clone().scatter_(dim, index, 2))


@pytest.mark.parametrize("reduce", ["add", "multiply"])
@given(case=scatters(), seed=st.integers(0, 99))
def test_scatter_that_reduces_equals_torch(reduce, case, seed):
    x, dim, index = case
    source = values((3, 2, 4), x.cpu.dtype, seed)
    compare(
        x.npu.clone().scatter_(dim, index.npu(), source.npu(), reduce=reduce),
        x.cpu.clone().scatter_(dim, index, source, reduce=reduce),
    )
    compare(
        x.npu.clone().scatter_(dim, index.npu(), 2, reduce=reduce),
        x.cpu.clone().scatter_(dim, index, 2, reduce=reduce),
    )


@given(x=tensors((torch.float32, torch.int32), GRID), seed=st.integers(0, 99))
def test_scatter_add_and_index_add_sum_repeated_positions(x: Pair, seed: int) -> None:
    index = values((3, 2, 4), torch.int64, seed, low=0, high=4)
    source = values((3, 2, 4), x.cpu.dtype, seed + 1)
    compare(
        x.npu.scatter_add(0, index.npu(), source.npu()),
        x.cpu.scatter_add(0, index, source),
        rtol=1e-6,
        atol=1e-6,
    )
    rows = values((4, 5, 4), x.cpu.dtype, seed + 2)
    compare(
        x.npu.index_add(0, ROWS.npu(), rows.npu(), alpha=2),
        x.cpu.index_add(0, ROWS, rows, alpha=2),
        rtol=1e-6,
        atol=1e-6,
    )


@given(x=tensors((torch.float32, torch.int32), GRID), seed=st.integers(0, 99))
def test_index_copy_fill_and_put_equal_torch(x: Pair, seed: int) -> None:
    index = torch.tensor([3, 0])
    source = values((6, 2, 4), x.cpu.dtype, seed)
    compare(
        x.npu.clone().index_copy_(1, index.npu(), source.npu()),
        x.cpu.clone().index_copy_(1, index, source),
    )
    compare(x.npu.clone().index_fill_(1, index.npu(), 3), x.cpu.clone().index_fill_(1, index, 3))
    compare(
        x.npu.clone().index_fill_(1, index.npu(), torch.tensor(3, dtype=x.cpu.dtype).npu()),
        x.cpu.clone().index_fill_(1, index, torch.tensor(3, dtype=x.cpu.dtype)),
    )
    flat = torch.tensor([7, 119, 0])
    new = values((3,), x.cpu.dtype, seed)
    for accumulate in (False, True):
        compare(
            x.npu.clone().put_(flat.npu(), new.npu(), accumulate=accumulate),
            x.cpu.clone().put_(flat, new, accumulate=accumulate),
        )


def test_scatter_update_writes_each_batch_entry_at_its_position() -> None:
    cache, new = values((2, 4, 8, 3), torch.float32, 1), values((2, 4, 1, 3), torch.float32, 2)
    positions = torch.tensor([5, 2])
    expected = cache.clone()
    for entry, position in enumerate(positions.tolist()):
        expected[entry, :, position : position + 1] = new[entry]
    compare(torch_npu.scatter_update(cache.npu(), positions.npu(), new.npu(), -2), expected)
    in_place = cache.npu()
    torch_npu.scatter_update_(in_place, positions.npu(), new.npu(), -2)
    compare(in_place, expected)


@given(x=tensors(NUMBERS), seed=st.integers(0, 99))
def test_masked_writes_equal_torch(x: Pair, seed: int) -> None:
    mask = values(x.cpu.shape, torch.bool, seed)
    compare(x.npu.masked_fill(mask.npu(), 3), x.cpu.masked_fill(mask, 3))
    value = torch.tensor(2, dtype=x.cpu.dtype)
    compare(x.npu.masked_fill(mask.npu(), value.npu()), x.cpu.masked_fill(mask, value))
    source = values(x.cpu.shape, x.cpu.dtype, seed + 1)
    compare(
        x.npu.clone().masked_scatter_(mask.npu(), source.npu()),
        x.cpu.clone().masked_scatter_(mask, source),
    )


def test_mask_broadcasts_over_the_filled_tensor() -> None:
    x, mask = values((3, 4, 5), torch.float32, 1), values((4, 1), torch.bool, 2)
    compare(x.npu().masked_fill_(mask.npu(), float("-inf")), x.masked_fill(mask, float("-inf")))


@given(x=tensors(ALL), seed=st.integers(0, 99))
def test_masked_select_equals_torch(x: Pair, seed: int) -> None:
    mask = values(x.cpu.shape, torch.bool, seed)
    compare(torch.masked_select(x.npu, mask.npu()), torch.masked_select(x.cpu, mask))


@given(x=tensors(NUMBERS, special=True), seed=st.integers(0, 99))
def test_where_equals_torch(x: Pair, seed: int) -> None:
    condition = values(x.cpu.shape, torch.bool, seed)
    other = values(x.cpu.shape, x.cpu.dtype, seed + 1)
    compare(torch.where(condition.npu(), x.npu, other.npu()), torch.where(condition, x.cpu, other))
    compare(torch.where(condition.npu(), x.npu, 2), torch.where(condition, x.cpu, 2))


def test_index_fill_takes_its_positions_from_the_host() -> None:
    x = values((4, 6), torch.float32, 1)
    npu = x.npu()
    aclnn.call("InplaceIndexFillTensor", npu, 1, (0, 4), aclnn.Number(7))
    compare(npu, x.index_fill(1, torch.tensor([0, 4]), 7))


@given(x=tensors(FLOATS, GRID))
def test_forms_that_leave_the_input_alone_equal_torch(x: Pair) -> None:
    source = torch.ones(4, 5, 4, dtype=x.cpu.dtype)
    rows = torch.tensor([3, 0, 1, 5])
    compare(
        torch.index_copy(x.npu, 0, rows.npu(), source.npu()),
        torch.index_copy(x.cpu, 0, rows, source),
    )
    compare(torch.index_fill(x.npu, 0, rows.npu(), 2), torch.index_fill(x.cpu, 0, rows, 2))
