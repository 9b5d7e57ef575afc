"""Tables that the host writes and the device reads."""

import random

import torch
from vllm.utils import platform_utils
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor

from vllm_davinci.core.runner.buffers import (
    CopiedTensor,
    IndexedWrites,
    leave_out_uva,
    take_over_tables,
)


class Holder:
    """Stands for a state of vLLM's runner."""

    def __init__(self) -> None:
        leave_out_uva()
        device = torch.device("npu")
        self.counts = UvaBackedTensor(8, dtype=torch.int32)
        self.tokens = StagedWriteTensor((6, 20), torch.int32, device, uva_instead_of_gpu=True)
        self.lengths = StagedWriteTensor(6, torch.int32, device)


Holder.__module__ = "vllm.v1.worker.gpu.of_tests"


def test_the_device_reads_no_memory_of_the_host_and_the_host_has_pinned_memory():
    leave_out_uva()
    assert not platform_utils.is_uva_available()
    assert platform_utils.is_pin_memory_available()


def test_all_tables_of_a_holder_are_taken_over_once():
    holder = Holder()
    holder.counts.np[:] = range(8)
    take_over_tables([holder], holder)
    assert isinstance(holder.counts, CopiedTensor)
    assert isinstance(holder.tokens, IndexedWrites) and isinstance(holder.lengths, IndexedWrites)
    assert holder.counts.gpu.tolist() == list(range(8))


def test_a_table_is_copied_where_it_has_changed_and_stays_where_it_is():
    holder = Holder()
    take_over_tables(holder)
    table = holder.counts
    address = table.gpu.data_ptr()
    table.np[3] = 5
    assert table.copy_to_uva().tolist() == [0, 0, 0, 5, 0, 0, 0, 0]
    table.gpu.zero_()  # only this test does this, to show that the next call copies nothing
    assert table.copy_to_uva(4).tolist() == [0, 0, 0, 0]
    table.np[0] = 1
    assert table.copy_to_uva(4).tolist() == [1, 0, 0, 5]
    assert table.gpu.data_ptr() == address


def test_staged_runs_are_written_as_they_were_given():
    draw = random.Random(3)
    holder = Holder()
    take_over_tables(holder)
    expected = torch.zeros(6, 20, dtype=torch.int32)
    for count in (1, 0, 4, 2):
        for row in draw.sample(range(6), count):
            start = draw.randrange(15)
            run = [draw.randrange(1000) for _ in range(draw.randint(1, 20 - start))]
            holder.tokens.stage_write(row, start, run)
            expected[row, start : start + len(run)] = torch.tensor(run)
            holder.lengths.stage_write_elem(row, len(run))
        holder.tokens.apply_write()
        holder.lengths.apply_write()
        assert torch.equal(holder.tokens.gpu.cpu(), expected)
