"""Examples run as their first lines say, and show what they promise."""

import subprocess
from pathlib import Path

LIMIT_S = 120


def test_two_micro_batches_take_turns_without_a_race(repository: Path):
    program = repository / "examples" / "overlap_two_microbatches.py"
    done = subprocess.run(
        ["vnpu", "run", "--races", "report", "--schedule", "fuzz:7", "--", "python", str(program)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert "8 turns on npu, largest difference 0.0\n" in done.stdout
    assert "vnpu: 0 races found." in done.stdout + done.stderr


def test_the_guide_shows_the_example(repository: Path):
    program = (repository / "examples" / "overlap_two_microbatches.py").read_text("utf-8")
    code = program[program.index("import torch") :]
    assert code in (repository / "packages" / "multistream" / "README.md").read_text("utf-8")
