"""An operator's call and definition are one row of one file, which every check runs."""

from pathlib import Path

from vllm_davinci_testing.processes.programs import copied, insert, said_in

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
    family = copied(OPERATORS, tmp_path) / "calls" / "norms.py"
    insert(family, "-> Iterator[OperatorCall]:\n", ROWS.lstrip("\n"))
    seen = said_in(tmp_path, PROGRAM)
    assert seen["found"] == {
        "operators/toy_twice/qwen3-8b/toy": True,
        "operators/toy_wrong/qwen3-8b/toy": False,
    }
