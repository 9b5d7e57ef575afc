"""No attribute of any vLLM module is replaced, from import to generated text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# An engine's whole life on a busy machine with two cores.
LIMIT_S = 400


def attributes_after_an_engine(repository: Path, *alter: str) -> dict[str, Any]:
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "vnpu"),
            "run",
            "--",
            sys.executable,
            str(repository / "tests" / "contract" / "vllm_attributes.py"),
            str(repository / "checkpoints" / "tiny_llama"),
            *alter,
        ],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.vnpu
def test_no_attribute_of_a_vllm_module_is_replaced_by_an_engine_run(repository: Path):
    report = attributes_after_an_engine(repository)
    assert report["platform"] == "vllm_davinci.core.platform"
    assert report["tokens"] == 4
    # Fewer would mean that the recorder missed vLLM's modules.
    assert report["modules"] > 300
    assert report["replaced"] == []


@pytest.mark.vnpu
def test_a_replaced_function_would_be_found(repository: Path):
    name = "vllm.v1.worker.gpu_model_runner.cdiv"
    report = attributes_after_an_engine(repository, name)
    assert [line.split(":")[0] for line in report["replaced"]] == [name]
