"""Rows of routed experts in a dry-run: the part that one rank of several has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from vllm_davinci_testing.processes.forked import run_command

LIMIT_S = 300
WORK = ("--requests=4", "--prompt-tokens=512", "--output-tokens=1", "--enforce-eager")


def test_experts_that_ranks_share_out_have_their_part_of_the_rows(
    repository: Path, tmp_path: Path
) -> None:
    """Whole experts by either option have the same products."""
    shutil.copy(repository / "checkpoints" / "tiny_deepseek" / "config.json", tmp_path)
    report = tmp_path / "report.json"

    def products_ps(*options: str) -> int:
        done = run_command(
            "vllm_davinci.meta", "dry-run", f"--model={tmp_path}", "--chip=ascend910b2", *WORK,
            "--tensor-parallel-size=4", f"--json={report}", *options, limit_s=LIMIT_S,
        )  # fmt: skip
        assert done.status == 0, done.stderr[-3000:]
        return int(json.loads(report.read_text())["steps"][0]["modelled"]["busy_ps"]["cube"])

    flag = products_ps("--enable-expert-parallel")
    option = products_ps('--additional-config={"expert_tensor_parallel_size": 1}')
    assert option == flag
