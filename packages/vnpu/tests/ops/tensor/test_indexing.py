"""Gather, scatter, advanced indexing and masks equal torch's on the CPU."""

from collections.abc import Callable

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, Pair, tensors, values

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
        new = torch.zeros_like(new)  # a repeated position gets either value
    npu[at_npu] = new.npu()
    cpu[at_cpu] = new
    compare(npu, cpu)
    npu[at_npu] = 3
    cpu[at_cpu] = 3
    compare(npu, cpu)


def test_expanded_source_and_overlapping_windows_are_read_as_on_the_cpu() -> None:
    base = values((9,), torch.float32, 1)
    windows_npu, windows_cpu = base.npu().unfold(0, 4, 1), base.unfold(0, 4, 1)
    compare(windows_npu[ROWS.npu()], windows_cpu[ROWS])
    compare(windows_npu.index_select(1, ROWS[:2].npu()), windows_cpu.index_select(1, ROWS[:2]))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_embedding_equals_torch(index_dtype, shape, dtype):
    weight = values((11, 8), dtype, 1)
    index = values(shape, torch.int64, 2, low=0, high=11).to(index_dtype)
    embedding = torch.nn.functional.embedding
    compare(embedding(index.npu(), weight.npu()), embedding(index, weight))
    # The table is a slice of another table: its rows have a stride.
    compare(embedding(index.npu(), weight.npu()[:, 2:6]), embedding(index, weight[:, 2:6]))


def test_embedding_outside_the_table_is_refused() -> None:
    with pytest.raises(RuntimeError, match="aclnnEmbedding"):
        torch.nn.functional.embedding(torch.tensor([11]).npu(), torch.zeros(11, 8).npu())
        torch.npu.synchronize()


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


def test_index_fill_takes_its_positions_from_the_host() -> None:
    x = values((4, 6), torch.float32, 1)
    npu = x.npu()
    aclnn.call("InplaceIndexFillTensor", npu, 1, (0, 4), aclnn.Number(7))
    compare(npu, x.index_fill(1, torch.tensor([0, 4]), 7))
