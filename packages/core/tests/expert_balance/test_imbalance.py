"""The imbalance of ranks equals values computed by hand."""

import pytest
import torch

from vllm_davinci.core.expert_balance.imbalance import imbalance


@pytest.mark.parametrize(
    ("loads", "placed", "expected"),
    [
        ([[4, 4, 4, 4]], [[0, 1, 2, 3]], 1.0),
        ([[8, 4, 2, 2]], [[0, 1, 2, 3]], 1.5),
        ([[8, 4, 2, 2]], [[0, 2, 1, 3]], 1.25),
        # 4 + 4 + 2 on one rank, 4 + 1 + 1 on the other.
        ([[8, 4, 2, 2]], [[0, 1, 2, 0, 3, 3]], 1.25),
        ([[8, 0, 0, 0], [0, 0, 0, 0]], [[0, 1, 2, 3], [0, 1, 2, 3]], 2.0),
        ([[0, 0, 0, 0]], [[0, 1, 2, 3]], 1.0),
    ],
)
def test_the_largest_load_of_a_rank_over_the_mean(loads, placed, expected):
    assert imbalance(torch.tensor(loads), torch.tensor(placed), 2) == pytest.approx(expected)
