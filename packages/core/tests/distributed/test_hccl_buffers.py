"""Communicators take their device memory before a worker measures the free memory."""

import json
from pathlib import Path

from vllm_davinci_testing.processes.ranks import check_ranks, run_ranks

RANK_PROGRAM = Path(__file__).with_name("hccl_buffers_rank.py")
CHECKPOINT = Path(__file__).parents[4] / "checkpoints" / "tiny_deepseek"
TWO_BUFFERS_BYTES = 2 * 200 << 20  # default size of each group's buffer


def test_no_group_takes_memory_at_its_first_step():
    for printed in check_ranks(RANK_PROGRAM, 4, str(CHECKPOINT), VNPU_SOC="Ascend910B3"):
        (line,) = (line for line in printed.splitlines() if line.startswith("taken "))
        taken = json.loads(line.removeprefix("taken "))
        assert taken.pop("made") >= 4 * TWO_BUFFERS_BYTES
        assert set(taken.values()) == {0}, taken


def test_groups_that_do_not_fit_end_the_start_with_their_size_and_advice():
    """Two of the four groups fit."""
    variables = {"VNPU_SOC": "Ascend910B3", "VNPU_MEMORY": "1GiB"}
    for ended in run_ranks(RANK_PROGRAM, 4, str(CHECKPOINT), **variables):
        assert ended.status != 0
        (said,) = (line for line in ended.output.splitlines() if "DeviceError:" in line)
        assert "The HCCL communicator of the group ep:0 does not fit: it takes 400.00 MiB" in said
        assert "twice its buffer of 200 MiB, and 222.00 MiB of 1.00 GiB are free" in said
        assert "set HCCL_BUFFSIZE, 200 now, to fewer MiB" in said
