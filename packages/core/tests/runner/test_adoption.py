"""Attributes of a runner that are replaced when vLLM assigns them."""

from __future__ import annotations

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


def test_who_assigns_sees_at_once_what_was_made_of_it():
    runner = Runner()
    assert runner.seen_by_vllm == runner.part == "ours of made"


def test_none_is_no_part():
    runner = Runner()
    runner.part = None
    assert runner.part is None


def test_a_part_that_is_not_there_is_no_attribute():
    runner = Runner()
    del runner.part
    assert not hasattr(runner, "part")
    with pytest.raises(AttributeError, match="Runner has no part to delete"):
        del runner.part
