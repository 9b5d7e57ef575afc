"""A deployment's dry-run has figures or a reason, and a line on the page."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci.meta.__main__ import main
from vllm_davinci.planner import time_limit
from vllm_davinci.planner.deployments.page import page_of
from vllm_davinci.planner.deployments.run import Outcome, outcome_of, reason_of
from vllm_davinci.planner.deployments.table import Deployment, all_deployments
from vllm_davinci.planner.devices import MOST_DEVICES

NAME = "qwen3-8b-a2"
C = "ascend910c"


def step(tokens: list[int], ms: int, bound_ms: int) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "modelled": {"host_ps": ms * 10**9},
        "overlap_bound_ps": bound_ms * 10**9,
    }


REPORT: dict[str, Any] = {
    "world_size": 16,
    "decode_tokens": 1,
    "memory": {
        **{f"{part}_bytes": 1 << 30 for part in ("weight", "activation", "other", "graph")},
        "piece_bytes": 0,
        "cache_bytes": 2 << 30,
        "total_bytes": 64 << 30,
        "cache_tokens": 7000,
        "profiled_bytes": 1 << 30,
        "largest_steps": {
            "64 tokens of prompts, whole": 1 << 30,
            "64 tokens of prompts, cut at 50%": 3 << 29,
            "63 tokens of decodes and a prompt, cut at 50%": 1 << 29,
        },
    },
    # Two chunked prompts, the second beside the first one's decodes, then only decodes.
    "steps": [step([64], 9, 8), step([1, 63], 7, 6), step([1, 1], 3, 2), step([1, 1], 5, 4)],
}


def test_figures_cover_steps_with_and_without_prompts() -> None:
    found = outcome_of(NAME, REPORT)
    assert found.reason is None
    assert (found.ranks, found.cache_tokens) == (16, 7000)
    assert (found.used_bytes, found.memory_bytes) == (6 << 30, 64 << 30)
    assert (found.whole_bytes, found.split_bytes) == (1 << 30, 3 << 29)
    assert (found.first_token_ms, found.first_token_bound_ms) == (16, 14)
    assert (found.token_ms, found.token_bound_ms) == (4, 3)


def test_drafts_are_tokens_of_decodes() -> None:
    steps = [step([64], 9, 8), step([2, 63], 7, 6), step([2, 2], 3, 2), step([2, 1], 5, 4)]
    found = outcome_of(NAME, {**REPORT, "decode_tokens": 2, "steps": steps})
    assert (found.first_token_ms, found.token_ms) == (16, 4)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("noise\nvllm-davinci dry-run: too large\nmore noise\n", "too large"),
        ("vllm-davinci dry-run: --port does nothing here: ...\nKeyError: 'x'\n", "KeyError: 'x'"),
        ("", ""),
        ("x" * 500, "x" * 400 + "..."),
    ],
)
def test_a_reason_is_the_last_message(log: str, reason: str) -> None:
    assert reason_of(log) == reason


@pytest.mark.parametrize(
    ("refused", "reason", "is_expected"),
    [
        ("", None, True),
        ("", "no sinks", False),
        ("sinks", "attention sinks not supported", True),
        ("sinks", "too large", False),
        ("sinks", None, False),  # starts although the row says refused
    ],
)
def test_a_row_states_the_expected_outcome(
    refused: str, reason: str | None, is_expected: bool
) -> None:
    row = dataclasses.replace(all_deployments()[NAME], refused=refused)
    assert Outcome(NAME, reason).is_expected(row) == is_expected


def test_a_run_that_contradicts_the_table_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses stored outcomes, so that nothing runs."""
    for outcome in (Outcome(NAME, ranks=1), Outcome("gpt-oss-120b-a2-tp4", "too large")):
        path = tmp_path / f"{outcome.name}.outcome.json"
        path.write_text(json.dumps(outcome.to_json()))
    run = ["deployments", "--resume", f"--run={tmp_path}", f"--page={tmp_path / 'page.md'}"]
    assert main([*run, NAME]) == 0
    assert main([*run, NAME, "gpt-oss-120b-a2-tp4"]) == 1
    assert "unexpected results: gpt-oss-120b-a2-tp4" in capsys.readouterr().out
    assert "of 2 models; 1 start and serve" in (tmp_path / "page.md").read_text()


def test_the_page_has_a_line_for_each_row() -> None:
    refused = Outcome("gpt-oss-120b-a2-tp4", "no sinks | none")
    page = page_of(all_deployments(), [outcome_of(NAME, REPORT), refused], "Figures of today.")
    lines = page.splitlines()
    assert lines[:3] == ["# Deployments", "", "Figures of today."]
    assert "of 2 models; 1 start and serve their requests, 1 do not." in page
    assert (
        f"| {NAME} | mixed | 16 x ascend910b3 | 6.0 of 64 | 1.0 / 1.0 / 1.5 | 7,000 | 4 x 1024 "
        "| 16.0 (14.0) | 4.0 (3.0) |"
    ) in lines
    assert "| gpt-oss-120b-a2-tp4 | mixed | ascend910b3 | no sinks / none |" in lines


def test_the_command_lists_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["deployments", "--json", NAME]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["checkpoint"]["name"] == "Qwen3-8B"
    assert main(["deployments", NAME]) == 0
    assert f"source: {all_deployments()[NAME].source}" in capsys.readouterr().out
    assert main(["deployments"]) == 0
    said = capsys.readouterr().out
    assert f"{len(all_deployments())} deployments" in said
    assert {line.split()[0] for line in said.splitlines() if line.strip()} >= {*all_deployments()}
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "is_of"),
    [
        (("--model=DeepSeek-R1-W8A8",), lambda row: row.checkpoint.name == "DeepSeek-R1-W8A8"),
        (("--model=deepseek-r1*",), lambda row: row.checkpoint.name.startswith("DeepSeek-R1")),
        (("--chip=Ascend910B2",), lambda row: row.chip == "ascend910b2"),
        (("--chip=910C", "--role=decode"), lambda row: (row.chip, row.role) == (C, "decode")),
        (("--chip=Ascend910_9382",), lambda row: row.chip == C),
        (("glm-4.7-*", NAME), lambda row: row.name == NAME or row.name.startswith("glm-4.7-")),
    ],
)
def test_rows_are_found_by_their_names_models_and_chips(
    options: tuple[str, ...],
    is_of: Callable[[Deployment], bool],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["deployments", "--json", *options]) == 0
    found = {row["name"] for row in json.loads(capsys.readouterr().out)}
    assert found == {name for name, row in all_deployments().items() if is_of(row)}
    assert 0 < len(found) < len(all_deployments())


def test_wrong_commands_get_advice(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status, said in (
        (["deployments", "qwen3-8b-a3"], 1, "Did you mean 'qwen3-8b-a2'?"),
        (["deployments", "--page=x"], 2, "--page needs --run DIRECTORY"),
        (["deployments", "--also=--enable-dbo"], 2, "--also needs --run DIRECTORY"),
        (["deployments", "--limit=60"], 2, "with --run or --step-costs"),
        (["deployments", "--run=x", "--limit=nan"], 2, "seconds above 0"),
        (
            ["deployments", "--model=deepseek", "--chip=910b7"],
            1,
            "no row matches all of these options. Models: DeepSeek",
        ),
        (["dry-run", "--deployment=qwen3-8b-a3"], 1, "Did you mean 'qwen3-8b-a2'?"),
        (["dry-run", "--chip=ascend910b2"], 2, "or --deployment NAME"),
        (["dry-run", "some/model", "--chip=ascend910b2"], 2, "did you mean --model some/model?"),
    ):
        assert main(arguments) == status
        assert said in capsys.readouterr().err


@pytest.mark.nightly("planning")
def test_dry_runs_see_every_device_although_a_virtual_npu_is_active() -> None:
    """Processes under `vnpu run`, as these tests, have 8 devices. The caller's variables stay."""
    code = """
import os
from vllm_davinci.planner.deployments.run import prepared_processes
if __name__ == "__main__":
    before = dict(os.environ)
    with prepared_processes().Pool(1) as pool:
        count = pool.apply(eval, ("__import__('torch').accelerator.device_count()",))
    print("devices", count, dict(os.environ) == before)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert f"devices {MOST_DEVICES} True\n" in done.stdout, done.stderr[-2000:]


def test_time_limits_grow_with_the_work_and_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for load, factor in ((0.0, 1), (4.0, 2)):
        monkeypatch.setattr(time_limit.os, "getloadavg", lambda load=load: (load, 0, 0))
        monkeypatch.setattr(time_limit.os, "cpu_count", lambda: 2)
        assert time_limit.time_limit(0) == 600 * factor
        assert time_limit.time_limit(1000) == 2600 * factor
