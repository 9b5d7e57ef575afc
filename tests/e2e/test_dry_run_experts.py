"""Rows of routed experts in a dry-run: one rank's share."""

import json
import shutil
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.forked import run_command

LIMIT_S = 300
WORK = ("--requests=8", "--prompt-tokens=1000", "--output-tokens=1", "--enforce-eager")
# So large that experts' products take longer than their launches.
LARGE = json.dumps({"hidden_size": 4096, "moe_intermediate_size": 2048})


def products_ps(repository: Path, directory: Path, *options: str) -> float:
    """Returns the modelled time of a rank's grouped products."""
    shutil.copy(repository / "checkpoints" / "tiny_deepseek" / "config.json", directory)
    timeline = directory / "timeline.json"
    done = run_command(
        "vllm_davinci.meta", "dry-run", f"--model={directory}", "--chip=ascend910b2", *WORK,
        f"--hf-overrides={LARGE}", f"--trace={timeline}", *options, limit_s=LIMIT_S,
    )  # fmt: skip
    assert done.status == 0, done.stderr[-3000:]
    tasks = [task for task in json.loads(timeline.read_text()) if task["ph"] == "X"]
    found = [task["dur"] for task in tasks if "GroupedMatmul" in task["name"]]
    assert found
    return sum(found)


def test_experts_that_ranks_share_out_have_their_part_of_the_rows(repository, tmp_path):
    """The flag and the option, which both keep experts whole, give the same products."""
    ranks = "--tensor-parallel-size=4"
    flag = products_ps(repository, tmp_path, ranks, "--enable-expert-parallel")
    share = '--additional-config={"expert_tensor_parallel_size": 1}'
    assert products_ps(repository, tmp_path, ranks, share) == flag


def test_halves_of_experts_take_the_rows_of_two_ranks(repository: Path, tmp_path: Path) -> None:
    """Each product has half an expert and twice the rows."""
    ranks = ("--tensor-parallel-size=2", "--data-parallel-size=2")
    gathered = '--additional-config={"moe_communication": "all_gather"}'
    whole = products_ps(repository, tmp_path, *ranks, gathered, "--enable-expert-parallel")
    halves = products_ps(repository, tmp_path, *ranks, gathered)
    assert halves == pytest.approx(whole, rel=0.05)
