"""A pytest plugin that runs an even sample of each test function's cases: `--most-cases N`.

The sample has the first case, the last, and cases at equal distances between them; it is the same
in every run. `--too-large REGEX` excludes cases by name. The plugin reports how many cases of each
sampled function ran.
"""

import re
from collections import defaultdict

import pytest
from outcome_plugin import SAMPLED, write


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--most-cases", type=int, required=True)
    parser.addoption("--too-large", default="(?!)")


def sample(count: int, most: int) -> set[int]:
    """Returns indices of at most `most` of `count` cases."""
    if count <= most:
        return set(range(count))
    return {place * (count - 1) // (most - 1) for place in range(most)}


@pytest.hookimpl(tryfirst=True)  # before --deselect, so that a restart samples the same cases
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    of_function: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        of_function[item.nodeid.partition("[")[0]].append(item)
    chosen = set()
    for function, cases in of_function.items():
        small = [case for case in cases if not re.search(config.option.too_large, case.nodeid)]
        places = sample(len(small), config.option.most_cases)
        chosen |= {small[place] for place in places}
        if len(places) < len(cases):
            message = f"{len(places)} of {len(cases)}"
            write(test=f"{function}[*]", outcome=SAMPLED, message=message)
    items[:] = [item for item in items if item in chosen]
