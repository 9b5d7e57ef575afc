"""A step that decodes on: the mask of its padding rows is right, and written where it changes."""

import pytest
import torch

from vllm_davinci.core.sampling.steady_decode import SteadyDecodeRunner
from vllm_davinci_testing.layers.launch_counter import LaunchCounter

MOST_ROWS = 16


@pytest.fixture
def runner(device: torch.device) -> SteadyDecodeRunner:
    """As far as the mask goes."""
    made = SteadyDecodeRunner.__new__(SteadyDecodeRunner)
    made.is_padding = torch.zeros(MOST_ROWS, dtype=torch.bool, device=device)
    made._masked = None
    return made


def test_each_step_has_the_mask_of_its_rows(runner: SteadyDecodeRunner) -> None:
    for rows, padded in [(5, 8), (5, 8), (8, 8), (3, 16), (5, 8), (0, 4), (16, 16), (1, 1)]:
        mask = runner._prepare_padding_mask(rows, padded)
        assert mask.tolist() == [False] * rows + [True] * (padded - rows)
        assert mask.data_ptr() == runner.is_padding.data_ptr()  # graphs read it there


def test_a_step_with_as_many_rows_as_the_one_before_launches_nothing(
    runner: SteadyDecodeRunner,
) -> None:
    runner._prepare_padding_mask(5, 8)
    with LaunchCounter() as counter:
        runner._prepare_padding_mask(5, 8)
    assert counter.names == []
    with LaunchCounter() as counter:
        runner._prepare_padding_mask(6, 8)
    assert counter.names == ["aten::fill_", "aten::fill_"]
