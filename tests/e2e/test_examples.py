"""Examples run as their first lines say, and print what these promise."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from vllm_davinci_testing.engines.alarms import alarming_lines
from vllm_davinci_testing.engines.server_process import FORKED_WORKERS

LIMIT_S = 120
ENGINE_LIMIT_S = 300  # covers an engine's life on a busy machine with two cores


@pytest.mark.nightly("planning")
def test_two_ubatches_take_turns_without_a_race(repository: Path):
    program = repository / "examples" / "overlap_two_ubatches.py"
    done = subprocess.run(
        ["vnpu", "run", "--races", "report", "--schedule", "fuzz:7", "--", "python", str(program)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert "8 turns on npu, largest difference 0.0\n" in done.stdout
    assert "vnpu: 0 races found." in done.stdout + done.stderr


def test_the_missing_wait_is_found_at_its_two_lines(repository: Path):
    program = repository / "examples" / "find_a_race.py"
    lines = program.read_text("utf-8").split("\n")
    [product] = [n for n, line in enumerate(lines, 1) if " @ " in line]
    [total] = [n for n, line in enumerate(lines, 1) if ".sum()" in line]
    done = subprocess.run(
        ["vnpu", "run", "--races", "report", "--", "python", str(program)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    [report] = re.findall(r"vnpu: race on.*?Nothing orders", done.stderr, flags=re.DOTALL)
    innermost = re.findall(r"launched at\n\s+(\S+):(\d+) in overlapped_sum", report)
    assert [(Path(file).name, int(line)) for file, line in innermost] == [
        ("find_a_race.py", product),
        ("find_a_race.py", total),
    ]
    assert "vnpu: 1 race found." in done.stderr


def test_the_guide_shows_the_example(repository: Path):
    program = (repository / "examples" / "overlap_two_ubatches.py").read_text("utf-8")
    code = program[program.index("import torch") :]
    assert code in (repository / "packages" / "multistream" / "README.md").read_text("utf-8")


def run_on_vnpu(
    program: Path, *arguments: str | Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs an example on the virtual NPU; it must succeed."""
    return subprocess.run(
        ["vnpu", "run", "--", "python", str(program), *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=ENGINE_LIMIT_S,
        check=True,
    )


@pytest.mark.nightly("planning")
def test_text_is_generated_on_two_devices_without_an_alarming_line(repository: Path):
    checkpoint = repository / "checkpoints" / "tiny_deepseek"
    program = repository / "examples" / "generate.py"
    done = run_on_vnpu(program, checkpoint, "def ", "import ", "-tp", "2", **FORKED_WORKERS)
    assert f"{checkpoint} on 2 x npu" in done.stdout
    assert "\nimport os\nimport sys\n" in done.stdout
    assert alarming_lines(done.stdout + done.stderr) == []


@pytest.mark.nightly("planning")
def test_offline_overlap_splits_the_prompts_step(repository: Path):
    def decisions() -> list[str]:
        done = run_on_vnpu(
            repository / "examples" / "overlap_offline.py",
            repository / "checkpoints" / "tiny_deepseek",
            "--max-model-len=1024",
            "--max-tokens=20",
            VNPU_MEMORY="2GiB",
            **FORKED_WORKERS,
        )
        assert "41 requests, 1 different texts" in done.stdout
        found = re.findall(r"rank \d: (\{.*\})", done.stdout)
        assert len(found) == 2
        return found

    # On a busy machine the two ranks' prompts may never run at the same time.
    assert any(all("'split': 1" in each for each in decisions()) for _ in range(3))
