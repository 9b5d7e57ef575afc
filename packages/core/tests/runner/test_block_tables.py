"""A step's blocks and slots equal a definition that works token by token."""

import random

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_davinci.core.runner.block_tables import NPUBlockTables
from vllm_davinci.core.runner.buffers import leave_out_uva

REQUESTS, TOKENS = 5, 64


def tables(groups: int = 1, ranks: int = 1, rank: int = 0, interleave: int = 1) -> NPUBlockTables:
    leave_out_uva()
    made = BlockTables(
        block_sizes=[4, 8][:groups],
        max_num_reqs=REQUESTS,
        max_num_batched_tokens=TOKENS,
        max_num_blocks_per_group=[16, 8][:groups],
        device=torch.device("npu"),
        cp_size=ranks,
        cp_rank=rank,
        cp_interleave=interleave,
    )
    return NPUBlockTables.taking_over(made)


def test_rows_equal_those_of_the_steps_requests_then_the_null_block():
    ours = tables(groups=2)
    ours.append_block_ids(3, ([5, 6], [9]), overwrite=True)
    ours.append_block_ids(1, ([7], [2, 3]), overwrite=True)
    ours.append_block_ids(3, ([8], []), overwrite=False)
    first, second = ours.gather(np.array([3, 1]), num_padded=3)
    assert first[:, :4].tolist() == [[5, 6, 8, 0], [7, 0, 0, 0], [0, 0, 0, 0]]
    assert second[:, :3].tolist() == [[9, 0, 0], [2, 3, 0], [0, 0, 0]]


def test_rows_are_updated_for_changes_since_the_previous_step():
    ours, slots = tables(), np.array([0, 2])
    ours.append_block_ids(0, ([4],), overwrite=True)
    ours.append_block_ids(2, ([5],), overwrite=True)
    before = ours.gather(slots, 2)[0]
    assert before[:, 0].tolist() == [4, 5]
    assert ours.gather(slots, 2)[0].data_ptr() == before.data_ptr()
    ours.append_block_ids(2, ([6],), overwrite=True)  # another request replaced it
    assert ours.gather(slots, 2)[0][:, 0].tolist() == [4, 6]
    ours.get_dummy_block_tables(2)  # after an idle step
    assert ours.gather(slots, 2)[0][:, 0].tolist() == [4, 6]


def test_more_blocks_than_a_row_has_are_refused():
    with pytest.raises(RuntimeError, match="17 blocks of group 0, and its block table has room"):
        tables().append_block_ids(0, (list(range(17)),), overwrite=True)


@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 1), (2, 2)])
def test_slots_equal_those_of_each_tokens_block(ranks: int, interleave: int):
    draw = random.Random(ranks + interleave)
    for rank in range(ranks):
        ours = tables(1, ranks, rank, interleave)
        blocks = {slot: draw.sample(range(1, 90), 16) for slot in (4, 0, 2)}
        for slot, of_request in blocks.items():
            ours.append_block_ids(slot, (of_request,), overwrite=True)
        rows = [(slot, position) for slot in (4, 0, 2) for position in range(3, 3 + 4 + slot)]
        slots, positions = (np.array(each) for each in zip(*rows, strict=True))
        written = ours.slots_of(slots, positions, num_padded=len(rows) + 2)[0].tolist()
        expected = []
        for slot, position in rows:
            turn, place = divmod(position, interleave * ranks)
            local = turn * interleave + place % interleave
            is_kept = place // interleave == rank
            expected.append(blocks[slot][local // 4] * 4 + local % 4 if is_kept else -1)
        assert written == [*expected, -1, -1]


@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 2)])
def test_the_device_finds_the_slots_that_the_host_finds(ranks: int, interleave: int):
    draw = random.Random(ranks)
    ours = tables(2, ranks, ranks - 1, interleave)
    slots = np.array([4, 0, 2])
    for slot in slots:
        blocks = [draw.sample(range(1, 90), count) for count in (16, 8)]
        ours.append_block_ids(int(slot), tuple(blocks), overwrite=True)
    ours.gather(slots, num_padded=4)
    lengths, computed = np.array([3, 1, 5]), np.array([9, 22, 0])
    starts = np.concatenate([[0], lengths.cumsum()])
    positions = np.arange(9) + np.repeat(computed - starts[:-1], lengths)
    expected = ours.slots_of(np.repeat(slots, lengths), positions, num_padded=11).cpu()
    found = ours.compute_slot_mappings(
        torch.tensor([4, 0, 2]).npu(),
        torch.from_numpy(starts).int().npu(),
        torch.from_numpy(np.pad(positions, (0, 2))).npu(),
        11,
        out=torch.zeros(2, 20, dtype=torch.int64).npu(),
    )
    assert torch.equal(found.cpu(), expected)


def test_a_request_that_keeps_nothing_has_no_slots():
    ours = tables()
    ours.append_block_ids(1, ([3, 5],), overwrite=True)
    ours.gather(np.array([1, 1]), num_padded=2)
    ends = torch.tensor([0, 1, 2], dtype=torch.int32).npu()
    positions = torch.tensor([6, 6]).npu()
    found = ours.compute_slot_mappings(torch.tensor([-1, 1]).npu(), ends, positions, 3)
    assert found.tolist() == [[-1, 5 * 4 + 2, -1]]


def test_new_blocks_of_a_slot_replace_the_previous_requests():
    ours = tables()
    ours.append_block_ids(2, ([7, 8, 9],), overwrite=True)
    ours.append_block_ids(2, ([4],), overwrite=True)
    assert ours.gather(np.array([2]), 1)[0][0, :3].tolist() == [4, 0, 0]
