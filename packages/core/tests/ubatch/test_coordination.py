"""Data-parallel ranks split a step together or not at all."""

import json
from pathlib import Path

from vllm_davinci_testing.processes.ranks import check_ranks

RANK_PROGRAM = Path(__file__).with_name("coordination_rank.py")

# Per DP rank: rows, graph mode, sizes of the ubatches, whether it prefills.
# Then: rows of all, mode, parts, whether any of them prefills.
CASES = [
    (
        [[300, 0, [150, 150], True], [512, 0, [200, 312], True]],
        [[300, 512], 0, [[150, 200], [150, 312]], True],
    ),
    ([[300, 0, [150, 150], True], [512, 0, [], False]], [[300, 512], 0, None, True]),
    ([[300, 0, [150, 150], False], [1, 2, [], True]], [[300, 1], None, None, True]),
    ([[8, 2, [], False], [4, 2, [], False]], [[8, 4], 2, None, False]),
]


def test_one_dp_rank_that_would_not_split_is_a_veto():
    steps = json.dumps([ranks for ranks, _ in CASES])
    for printed in check_ranks(RANK_PROGRAM, 2, steps):
        assert json.loads(printed.splitlines()[-1]) == [expected for _, expected in CASES]
