"""Data-parallel ranks split a step together or not at all."""

import json
from pathlib import Path

from vllm_davinci_testing.processes.ranks import check_ranks

RANK_PROGRAM = Path(__file__).with_name("coordination_rank.py")

# Per DP rank: ubatch sizes, and True if it prefills. Then the expected sizes, and True if any rank
# prefills.
CASES = [
    ([[[150, 150], True], [[200, 312], True]], [[[150, 200], [150, 312]], True]),
    ([[[150, 150], True], [[], False]], [None, True]),
    ([[[150, 150], False], [[], True]], [None, True]),
    ([[[], False], [[], False]], [None, False]),
]


def test_one_dp_rank_that_would_not_split_is_a_veto():
    steps = json.dumps([ranks for ranks, _ in CASES])
    for printed in check_ranks(RANK_PROGRAM, 2, steps):
        assert json.loads(printed.splitlines()[-1]) == [expected for _, expected in CASES]
