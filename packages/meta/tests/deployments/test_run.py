"""A dry-run of a deployment has figures or a reason, and a line of the page."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci.meta.__main__ import main
from vllm_davinci.meta.deployments.page import page_of
from vllm_davinci.meta.deployments.run import Outcome, outcome_of, reason_of
from vllm_davinci.meta.deployments.table import all_deployments

NAME = "qwen3-8b-a2"


def step(tokens: list[int], ms: int, bound_ms: int) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "modelled": {"host_ps": ms * 10**9},
        "overlap_bound_ps": bound_ms * 10**9,
    }


REPORT = {
    "world_size": 16,
    "memory": {
        **{f"{part}_bytes": 1 << 30 for part in ("weight", "activation", "other", "graph")},
        "piece_bytes": 0,
        "cache_bytes": 2 << 30,
        "total_bytes": 64 << 30,
        "cache_tokens": 7000,
    },
    # Two prompts in pieces beside the first one's tokens, then tokens alone.
    "steps": [step([64], 9, 8), step([1, 63], 7, 6), step([1, 1], 3, 2), step([1, 1], 5, 4)],
}


def test_figures_are_of_steps_with_prompts_and_of_steps_without() -> None:
    found = outcome_of(NAME, REPORT)
    assert found.reason is None
    assert (found.ranks, found.cache_tokens) == (16, 7000)
    assert (found.used_bytes, found.memory_bytes) == (6 << 30, 64 << 30)
    assert (found.first_token_ms, found.first_token_bound_ms) == (16, 14)
    assert (found.token_ms, found.token_bound_ms) == (4, 3)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("noise\nvllm-davinci dry-run: too large\nmore noise\n", "too large"),
        ("vllm-davinci dry-run: --port does nothing here: ...\nKeyError: 'x'\n", "KeyError: 'x'"),
        ("", ""),
        ("x" * 500, "x" * 400 + "..."),
    ],
)
def test_a_reason_is_the_last_word(log: str, reason: str) -> None:
    assert reason_of(log) == reason


@pytest.mark.parametrize(
    ("refused", "reason", "is_expected"),
    [
        ("", None, True),
        ("", "no sinks", False),
        ("sinks", "attention sinks not supported", True),
        ("sinks", "too large", False),
        ("sinks", None, False),  # it starts by now: the row says otherwise
    ],
)
def test_a_row_says_what_is_to_come_of_it(
    refused: str, reason: str | None, is_expected: bool
) -> None:
    row = dataclasses.replace(all_deployments()[NAME], refused=refused)
    assert Outcome(NAME, reason).is_expected(row) == is_expected


def test_a_run_that_is_not_as_the_table_says_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The outcomes are there already, so that nothing is run."""
    for outcome in (Outcome(NAME, ranks=1), Outcome("gpt-oss-120b-a2-tp4", "too large")):
        path = tmp_path / f"{outcome.name}.outcome.json"
        path.write_text(json.dumps(outcome.to_json()))
    run = ["deployments", "--resume", f"--run={tmp_path}", f"--page={tmp_path / 'page.md'}"]
    assert main([*run, NAME]) == 0
    assert main([*run, NAME, "gpt-oss-120b-a2-tp4"]) == 1
    assert "not as the table says: gpt-oss-120b-a2-tp4" in capsys.readouterr().out
    assert "of 2 models; 1 start and serve" in (tmp_path / "page.md").read_text()


def test_the_page_has_a_line_for_each_row() -> None:
    refused = Outcome("gpt-oss-120b-a2-tp4", "no sinks | none")
    page = page_of(all_deployments(), [outcome_of(NAME, REPORT), refused], "Figures of today.")
    lines = page.splitlines()
    assert lines[:3] == ["# Deployments", "", "Figures of today."]
    assert "of 2 models; 1 start and serve their requests, 1 do not." in page
    assert (
        f"| {NAME} | mixed | 16 x ascend910b3 | 6.0 of 64 | 7,000 | 4 x 1024 | 16.0 (14.0) "
        "| 4.0 (3.0) |"
    ) in lines
    assert "| gpt-oss-120b-a2-tp4 | mixed | ascend910b3 | no sinks / none |" in lines


def test_the_command_lists_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deployments", "--json", NAME]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["checkpoint"]["name"] == "Qwen3-8B"
    assert main(["deployments"]) == 0
    assert f"{len(all_deployments())} deployments" in capsys.readouterr().out


def test_wrong_commands_say_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deployments", "qwen3-8b-a3"]) == 1
    assert "Did you mean 'qwen3-8b-a2'?" in capsys.readouterr().err
    assert main(["deployments", "--page=x"]) == 2
    assert "--page needs --run DIRECTORY" in capsys.readouterr().err
    assert main(["dry-run", "--deployment=qwen3-8b-a3"]) == 1
    assert "Did you mean 'qwen3-8b-a2'?" in capsys.readouterr().err
    assert main(["dry-run", "--chip=ascend910b2"]) == 2
    assert "or --deployment NAME" in capsys.readouterr().err
