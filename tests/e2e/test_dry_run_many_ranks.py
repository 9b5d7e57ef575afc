"""Dry-runs larger than a supernode: modelled times show the links between hosts."""

import json
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.forked import run_command

pytestmark = pytest.mark.thorough

LIMIT_S = 300
WORK = ("--requests=3", "--prompt-tokens=128", "--output-tokens=4", "--enforce-eager")


def communication_ps(repository: Path, directory: Path, ranks: int) -> int:
    """Returns the modelled time of all collectives, with one expert per rank."""
    directory.mkdir()
    source = repository / "checkpoints" / "tiny_deepseek" / "config.json"
    config = {**json.loads(source.read_text()), "n_routed_experts": ranks}
    (directory / "config.json").write_text(json.dumps(config))
    report = directory / "report.json"
    done = run_command(
        "vllm_davinci.meta",
        "dry-run",
        f"--model={directory}",
        "--chip=ascend910c",
        "--topology=two-supernodes",
        f"--data-parallel-size={ranks}",
        "--enable-expert-parallel",
        f"--json={report}",
        *WORK,
        limit_s=LIMIT_S,
    )
    assert done.status == 0, done.stderr[-3000:]
    found = json.loads(report.read_text())
    assert found["world_size"] == ranks
    return sum(step["modelled"]["communication_ps"] for step in found["steps"])


def test_the_link_between_supernodes_shows(repository: Path, tmp_path: Path) -> None:
    """384 ranks fit into one supernode; 768 use RDMA between two."""
    within = communication_ps(repository, tmp_path / "within", 384)
    between = communication_ps(repository, tmp_path / "between", 768)
    print("MODELLED", within, between)
    assert between > within > 0
