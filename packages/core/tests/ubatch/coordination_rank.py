"""One DP rank of test_coordination.py: `coordination_rank.py CASES` with torchrun's variables.

CASES is JSON with [ubatch_sizes, prefills] for each case and rank. Prints the answers as JSON.
"""

import json
import sys
from datetime import timedelta

import torch.distributed as dist

from vllm_davinci.core.ubatch.coordination import RankStep, coordinate_across_dp


def main(cases: list[list[list[object]]]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    answers = []
    for case in cases:
        before = group._get_sequence_number_for_group()
        answer = coordinate_across_dp(RankStep(*case[rank]), 2, rank, group)  # type: ignore[arg-type]
        assert group._get_sequence_number_for_group() == before + 1, "more than one message"
        parts = answer.ubatch_sizes and [sizes.tolist() for sizes in answer.ubatch_sizes]
        answers.append([parts, answer.prefills])
    print(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
