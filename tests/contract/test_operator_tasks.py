"""An operator's call and definition are one row of one file, which every check then makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPERATORS = ROOT / "packages" / "operators" / "src" / "vllm_davinci" / "operators"
ROWS = """
    toy = {"x": normal(3, model.hidden)}
    yield OperatorCall("toy_twice", "Muls", "toy", toy, lambda x: x * 2, lambda x: x + x)
    yield OperatorCall("toy_wrong", "Muls", "toy", toy, lambda x: x * 2, lambda x: x + x + 1)
"""
PROGRAM = """
import json
from vllm_davinci import operators
from vllm_davinci.verify.models import calls_of
from vllm_davinci.operators.calls.call import compare, generator_of, on_device

found = {}
for name, call in calls_of(["qwen3-8b"]):
    if "toy" in name:
        arguments = call.make(generator_of(name, 1))
        moved = {key: on_device(value) for key, value in arguments.items()}
        outcome = compare(call.call(**moved), call.definition(**arguments), call.exact)
        found[name] = outcome.error <= outcome.bound and not outcome.wrong
print(json.dumps({"file": operators.__file__, "found": found}))
"""


def test_an_operator_is_a_row_that_verify_compares(tmp_path: Path) -> None:
    copy = tmp_path / "vllm_davinci" / "operators"
    shutil.copytree(OPERATORS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    family, head = copy / "calls" / "norms.py", "-> Iterator[OperatorCall]:\n"
    before = family.read_text(encoding="utf-8")
    assert before.count(head) == 1
    family.write_text(before.replace(head, head + ROWS.lstrip("\n")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["file"].startswith(str(tmp_path))
    assert seen["found"] == {
        "operators/toy_twice/qwen3-8b/toy": True,
        "operators/toy_wrong/qwen3-8b/toy": False,
    }
