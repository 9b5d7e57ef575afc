"""An engine with a fault at one point answers correctly, or names the failure and ends.

Tests a few points; `nox -s faults` tests a share of all.
"""

from functools import cache

import pytest

from vllm_davinci_testing.engines.fault_engines import ENGINES
from vllm_davinci_testing.engines.fault_points import chosen, outcome, points_of, run, shuffled
from vllm_davinci_testing.engines.fault_tables import GOOD

CASES = 24
counted = cache(lambda engine: points_of(ENGINES[engine]))


@pytest.mark.thorough
@pytest.mark.parametrize("case", range(CASES))
def test_an_engine_answers_correctly_or_names_the_failure(case: int) -> None:
    engine = list(ENGINES)[case % len(ENGINES)]
    expected, points = counted(engine)
    # Points in a fixed order that mixes the kinds of faults.
    _, faults = shuffled(chosen(points, 1, "2026-01-01"), "2026-01-01")[case]
    result = run(ENGINES[engine], faults)
    what = outcome(result, expected, faults.split(";")[-1])
    assert what in GOOD, f"{engine}, {faults}: {what} {result.left}\n{result.log[-6000:]}"
