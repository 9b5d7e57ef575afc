"""Dry-runs of DeepSeek-R1 in int8, with the published commands' checkpoint."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_davinci.planner.deployments.checkpoint import write_checkpoint
from vllm_davinci.planner.deployments.table import deployment

LIMIT_S = 1200.0
# The published commands' checkpoint.
CHECKPOINT = deployment("deepseek-r1-mla-multistream").checkpoint
CONFIG = CHECKPOINT.configuration()
MOE_LAYERS: int = CONFIG["num_hidden_layers"] - CONFIG["first_k_dense_replace"]


def dry_run(
    chip: str, topology: str, *options: str, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Dry-runs rank 0 of 16 with these additional options; returns the report.

    config: the plugin's options
    """
    with tempfile.TemporaryDirectory(prefix="deepseek-r1.") as name:
        report = Path(name) / "report.json"
        _command(Path(name), chip, topology, config, f"--json={report}", *options)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def step_costs(
    chip: str, topology: str, destination: Path, *options: str, config: Mapping[str, Any]
) -> None:
    """Writes the `step_costs` file of this engine."""
    with tempfile.TemporaryDirectory(prefix="deepseek-r1.") as name:
        options = (f"--step-costs={destination}", *options)
        _command(Path(name), chip, topology, config, *options)


def _command(
    model: Path, chip: str, topology: str, config: Mapping[str, Any] | None, *options: str
) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "vllm_davinci.meta", "dry-run"),
            *dry_run_options(model, chip, topology, config),
            *options,
        ],
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )


def dry_run_options(
    model: Path, chip: str, topology: str, config: Mapping[str, Any] | None
) -> tuple[str, ...]:
    """Returns options of `vllm-davinci dry-run` for rank 0 of 16. model: a directory for its
    checkpoint
    """
    write_checkpoint(CHECKPOINT, model)
    return (
        *(f"--model={model}", f"--chip={chip}", f"--topology={topology}"),
        *("--tensor-parallel-size=16", "--quantization=ascend", "--gpu-memory-utilization=0.95"),
        f"--additional-config={json.dumps(dict(config or {}))}",
    )
