"""A prompt's time is computed from some of its chunks."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_davinci.planner.dry_run.sampled_prompt import SampledPrompt, chunks_of


@pytest.mark.parametrize(
    ("chunks", "samples", "expected"),
    [
        (1, 5, [0]),
        (2, 3, [0, 1]),
        (16, 3, [0, 1, 15]),
        (16, 5, [0, 1, 6, 10, 15]),
        (3, 9, [0, 1, 2]),
    ],
)
def test_the_ends_and_even_places_between_are_modelled(chunks, samples, expected):
    assert chunks_of(chunks, samples) == expected


def test_chunks_between_modelled_ones_lie_on_the_line_through_both():
    def chunk(*times: int) -> tuple[Any, ...]:
        return tuple(SimpleNamespace(modelled=SimpleNamespace(ps=ps)) for ps in times)

    modelled = {0: chunk(8, 2), 2: chunk(14), 6: chunk(22)}
    total = SampledPrompt(7 * 64, 7, modelled).total_ps(lambda report: report.ps)
    assert total == 10 + 12 + 14 + 16 + 18 + 20 + 22
