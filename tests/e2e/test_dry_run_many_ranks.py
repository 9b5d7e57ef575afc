"""Dry-runs of more ranks than a supernode's half: the links between hosts show in the times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.forked import run_command

pytestmark = pytest.mark.thorough

LIMIT_S = 300
WORK = ("--requests=3", "--prompt-tokens=128", "--output-tokens=4", "--enforce-eager")
RANKS = 384


def test_the_link_between_supernodes_shows(repository: Path, tmp_path: Path) -> None:
    """All ranks fit into one supernode; on two smaller ones they reach each other by RDMA."""
    source = repository / "checkpoints" / "tiny_deepseek" / "config.json"
    config = json.loads(source.read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_routed_experts": RANKS}))
    report = tmp_path / "report.json"
    taken = []
    for topology in ("supernode", "two-supernodes"):
        done = run_command(
            "vllm_davinci.meta",
            "dry-run",
            f"--model={tmp_path}",
            "--chip=ascend910c",
            f"--topology={topology}",
            f"--data-parallel-size={RANKS}",
            "--enable-expert-parallel",
            f"--json={report}",
            *WORK,
            limit_s=LIMIT_S,
        )
        assert done.status == 0, done.stderr[-3000:]
        found = json.loads(report.read_text())
        assert found["world_size"] == RANKS
        taken.append(sum(step["modelled"]["communication_ps"] for step in found["steps"]))
    assert taken[1] > taken[0] > 0
