"""The calls that a chip is asked about, asked of the virtual NPU: it answers what we believe."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from vllm_davinci.meta.verify.finding import Finding
from vllm_davinci.meta.verify.first_phase import ABSENT, TAKEN
from vllm_davinci.meta.verify.parts_of import constraints
from vllm_davinci.meta.verify.settings import Settings

pytestmark = pytest.mark.refused_calls


def test_every_call_is_answered_as_we_believe(tmp_path: Path) -> None:
    found: list[Finding] = []
    for case in constraints.cases(Settings(), tmp_path):
        found += case.run()
    asked = found[1:]
    assert not [finding.name for finding in asked if not finding.passed]
    answers = Counter(finding.value for finding in asked)
    assert answers[TAKEN] > 600 and answers["161002"] > 400 and not answers[ABSENT]
    assert len({finding.name for finding in found}) == len(found)


def test_another_answer_is_told_with_what_mends_it(tmp_path: Path) -> None:
    cases = list(constraints.cases(Settings(), tmp_path))
    data = json.loads(constraints.CALLS.read_text(encoding="utf-8"))
    call = next(each for each in data["calls"] if each["asks"] == "a legal call")
    arguments = {**data["legal"][call["operator"]], **call["changes"]}
    assert any(case.name == f"constraints/{call['operator']}/a legal call" for case in cases)
    stricter = {**call, "expected": "161002"}

    class Phase:
        def answer(self, operator: str, arguments: object) -> tuple[str, str]:
            return TAKEN, "512 bytes of workspace"

    finding = constraints._asked(Phase(), "name", stricter, arguments, "A2 8.5")  # type: ignore[arg-type]
    assert finding.passed is False and finding.value == TAKEN
    assert finding.details["believed"] == "161002"
    assert finding.details["arguments"] == arguments
