"""Recorded launches of Triton kernels are repeated elsewhere with the same results."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_davinci_testing.processes.programs import run_to_end

pytestmark = pytest.mark.nightly("operators")

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "conformance" / "compiled_triton"
LIMIT_S = 400


def run(*command: str | Path, **environment: str) -> str:
    done = run_to_end([*map(str, command)], LIMIT_S, env={**os.environ, **environment})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def replayed(directory: Path) -> dict[str, dict[str, Any]]:
    """Runs the recorded kernels in Triton's interpreter, because there is no GPU here; returns
    results by kernel.
    """
    written = directory / "results.json"
    run(sys.executable, TOOLS / "replay.py", directory, "--json", written,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0")  # fmt: skip
    results = json.loads(written.read_text(encoding="utf-8"))["results"]
    return {result["kernel"]: result for result in results}


def test_an_example_s_kernels_are_recorded_and_repeated(tmp_path: Path) -> None:
    program = (ROOT / "examples" / "triton_kernel.py", "--mended")
    printed = run(sys.executable, TOOLS / "record.py", tmp_path, *program, VNPU_TRITON="1")
    assert "2 kernels, 2 launches recorded" in printed
    results = replayed(tmp_path)
    assert set(results) == {"__main__.sum_kernel", "__main__.scale_kernel"}
    # The interpreter adds in another order.
    assert results["__main__.sum_kernel"]["difference"] < 1e-6
    assert results["__main__.scale_kernel"]["ulp"] <= 1

    (recorded,) = tmp_path.glob("scale_kernel_*-1.pt")
    record = torch.load(recorded, weights_only=False)
    record["after"][1].view(torch.float32)[7] *= 1.001
    torch.save(record, recorded)
    assert replayed(tmp_path)["__main__.scale_kernel"]["difference"] > 1e-5
