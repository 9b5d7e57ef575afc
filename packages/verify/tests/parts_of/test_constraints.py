"""The virtual NPU gives the expected answers to the calls for a chip."""

import json
from collections import Counter
from typing import Any

import pytest

from vllm_davinci.verify.first_phase import ABSENT, TAKEN
from vllm_davinci.verify.parts_of import constraints
from vllm_davinci_testing.processes.forked import run_alone

pytestmark = pytest.mark.refused_calls

ASK = """
import json
from pathlib import Path
from vllm_davinci.verify.parts_of import constraints
from vllm_davinci.verify.settings import Settings

found = [finding for case in constraints.cases(Settings(), Path()) for finding in case.run()]
print(json.dumps([finding.fields() for finding in found]))
"""


def asked(**variables: str) -> list[dict[str, Any]]:
    """Returns the part's findings; the first names the chip whose answers are expected."""
    ended = run_alone(ASK, **variables)
    assert ended.status == 0, ended.output[-4000:]
    found: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_every_call_has_the_expected_answer() -> None:
    place, *found = asked(VNPU_SOC="Ascend910B3", VNPU_CANN="8.5")
    assert place["value"] == "A2 8.5, for Ascend910B3 with CANN 8.5"
    assert not [finding["name"] for finding in found if not finding["passed"]]
    answers = Counter(finding["value"] for finding in found)
    assert answers[TAKEN] > 1500 and answers["161002"] > 900 and not answers[ABSENT]
    assert len({finding["name"] for finding in found}) == len(found)


def test_a_chip_that_accepts_everything_is_reported_call_by_call() -> None:
    _, *found = asked(VNPU_SOC="Ascend910B3", VNPU_STRICT="0")
    wrong = [finding for finding in found if not finding["passed"]]
    assert len(wrong) > 900 and all(finding["value"] == TAKEN for finding in wrong)
    norm = next(each for each in wrong if each["name"].startswith("constraints/RmsNorm/gamma"))
    assert norm["details"]["believed"] in ("161002", "561002")
    assert norm["details"]["arguments"]["x"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("expected", "place", "answer"),
    [("161002", "A2 8.5", "161002"), ({"A2 8.5": "taken", "A2 9.0": "561002"}, "A2 9.0", "561002")],
)
def test_expected_answers_may_depend_on_the_release(expected: Any, place: str, answer: str) -> None:
    assert constraints.expected_of({"expected": expected}, place) == answer
