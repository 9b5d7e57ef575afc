"""The fastest dispatch method by an engine's step-time table."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.fused_moe.communication import CommunicationMethod, CommunicationRule
from vllm_davinci.core.fused_moe.expert_layout import ExpertLayout
from vllm_davinci.core.fused_moe.method_costs import MethodCosts

CONTENT: dict[str, Any] = {
    "decodes": [
        {"tokens": 1, "by_method": {"all_gather": 10, "all_to_all": 30}},
        {"tokens": 9, "by_method": {"all_gather": 50, "all_to_all": 30}},
    ],
    "steps": [
        {
            "tokens": 100,
            "by_method": {
                "whole": {"all_gather": 40, "all_to_all": 20},
                "split": {"all_gather": 15, "all_to_all": 30},
            },
        }
    ],
}


@pytest.fixture
def costs(tmp_path: Path) -> MethodCosts:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(CONTENT))
    return MethodCosts.read(file)


def rule(costs: MethodCosts | None, forced: CommunicationMethod | None = None) -> CommunicationRule:
    """Makes the rule for two DP ranks of two TP ranks each, with decodes of up to 16 tokens."""
    layout = ExpertLayout(4, 1)
    return CommunicationRule(forced, layout, 2, 2, 16, "none", overlapped=True, costs=costs)


@pytest.mark.parametrize(
    ("max_tokens", "num_ubatches", "method"),
    [
        (1, 1, CommunicationMethod.ALL_GATHER),
        (5, 1, CommunicationMethod.ALL_GATHER),  # both take 30: the first wins
        (6, 1, CommunicationMethod.ALL_TO_ALL),
        (16, 1, CommunicationMethod.ALL_TO_ALL),  # larger sizes keep the last size's ratio
        (100, 1, CommunicationMethod.ALL_TO_ALL),
        (50, 2, CommunicationMethod.ALL_GATHER),
    ],
)
def test_each_step_uses_the_fastest_method(costs, max_tokens, num_ubatches, method):
    choice = rule(costs).choose(max_tokens, num_ubatches)
    assert choice.method is method
    other = {"all_gather": "all_to_all", "all_to_all": "all_gather"}[method.value]
    assert choice.reason == f"by its step times it is faster than {other} (modelled)"


def test_a_requested_method_stays(costs: MethodCosts):
    # With a requested method, `of_engine` reads no costs, and the rule obeys the request.
    assert rule(None, CommunicationMethod.ALL_TO_ALL).choose(1).method.value == "all_to_all"


def test_costs_of_one_method_decide_nothing(costs: MethodCosts):
    assert costs.fastest("whole", 100, ["all_gather", "fused"]) is None


@pytest.mark.parametrize(
    "content",
    ["", "{}", '{"decodes": [], "steps": [{"tokens": 1}]}', '{"decodes": 3, "steps": []}'],
)
def test_a_file_without_step_times_by_method_is_refused(tmp_path: Path, content: str):
    file = tmp_path / "costs.json"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match="has no step times by method"):
        MethodCosts.read(file)


def test_sizes_that_do_not_ascend_are_refused(tmp_path: Path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({**CONTENT, "decodes": CONTENT["decodes"][::-1]}))
    with pytest.raises(ConfigurationError, match="expected ascending sizes"):
        MethodCosts.read(file)
