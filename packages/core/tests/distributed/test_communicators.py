"""Device memory of communicators is taken before a worker measures what is left."""

import json
from pathlib import Path

from vllm_davinci_testing.processes.ranks import check_ranks

RANK_PROGRAM = Path(__file__).with_name("communicators_rank.py")
CHECKPOINT = Path(__file__).parents[4] / "checkpoints" / "tiny_deepseek"
TWO_BUFFERS_BYTES = 2 * 200 << 20  # of each group, by default


def test_no_group_takes_memory_at_its_first_step():
    for printed in check_ranks(RANK_PROGRAM, 4, str(CHECKPOINT), VNPU_SOC="Ascend910B3"):
        (line,) = (line for line in printed.splitlines() if line.startswith("taken "))
        taken = json.loads(line.removeprefix("taken "))
        assert taken.pop("made") >= 4 * TWO_BUFFERS_BYTES
        assert set(taken.values()) == {0}, taken
