"""Attributes of a runner that are replaced when vLLM sets them."""

import pytest

from vllm_davinci.core.runner.adoption import adopted


class VllmsRunner:
    def __init__(self) -> None:
        self.part: object = None
        self.part = "made"
        self.seen_by_vllm = self.part


class Runner(VllmsRunner):
    @adopted
    def part(self, part: str) -> str:
        return f"ours of {part}"


def test_an_assigned_value_is_replaced_at_once():
    runner = Runner()
    assert runner.seen_by_vllm == runner.part == "ours of made"


def test_none_adds_no_part():
    runner = Runner()
    runner.part = None
    assert runner.part is None


def test_a_missing_part_is_not_an_attribute():
    runner = Runner()
    del runner.part
    assert not hasattr(runner, "part")
    with pytest.raises(AttributeError, match="Runner has no part to delete"):
        del runner.part
