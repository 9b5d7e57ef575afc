"""The total number of lines must not grow, and a function has at most 60 lines."""

import ast
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("packages", "tests", "benchmarks", "checkpoints", "ci", "examples")
FUNCTION_LINES = 60
# Longer functions with their limits, rounded up to tens; this list only shrinks.
FUNCTIONS: dict[str, int] = {
    "ci/prepare_environment.py:prepare": 90,
    "packages/core/src/vllm_davinci/core/triton_kernels/drafting.py:prepare_block_inputs": 100,
    "packages/core/src/vllm_davinci/core/triton_kernels/inputs.py:post_update": 70,
    "packages/core/src/vllm_davinci/core/triton_kernels/penalties.py:bad_words": 70,
    "packages/core/src/vllm_davinci/core/triton_kernels/verification.py:reject": 100,
    "packages/core/src/vllm_davinci/core/triton_kernels/verification.py:resample": 70,
    "packages/models/src/vllm_davinci/models/deepseek_v4_attention.py:__init__": 80,
}


@pytest.fixture(scope="module")
def budget() -> ModuleType:
    sys.path.insert(0, str(ROOT / "ci"))
    return import_module("line_budget")


def sources() -> Iterator[tuple[str, Path]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if not {"build", "__pycache__"} & set(relative.parts):
                yield relative.as_posix(), path


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yields name and line count of each Python function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def problems(found: dict[str, int], limit: int, listed: dict[str, int]) -> list[str]:
    """Returns functions above the limit, and listed exceptions that are no longer needed."""
    long = [
        f"{name}: {lines} lines, at most {listed.get(name, limit)}: split it where it has a "
        "second reason to change"
        for name, lines in found.items()
        if lines > listed.get(name, limit)
    ]
    done = [
        f"{name}: {found.get(name, 0)} lines now: take it off the list"
        for name in listed
        if found.get(name, 0) <= limit
    ]
    return [*long, *done]


def test_the_sums_of_lines_and_tokens_have_not_grown(budget: ModuleType) -> None:
    more = budget.grown(budget.recorded(), budget.measured())
    hint = "take as much away, or: python ci/line_budget.py --record --for 'WHAT THE GROWTH IS FOR'"
    assert not more, "\n".join([*more, hint])


def test_a_growth_is_seen(budget: ModuleType) -> None:
    before = {"python": {"ci": budget.Size(10, 50), "tests": budget.Size(5, 9)}, "cpp": {}}
    moved = {"python": {"tests": budget.Size(15, 59)}, "cpp": {}}
    assert budget.grown(before, moved) == []
    moved["cpp"] = {"packages/vnpu/csrc": budget.Size(1, 0)}
    assert budget.grown(before, moved) == ["cpp: 1 lines, and 0 are recorded"]


def test_functions_are_short() -> None:
    found: dict[str, int] = {}
    for name, path in sources():
        for function, lines in functions(path):
            key = f"{name}:{function}"
            found[key] = max(lines, found.get(key, 0))
    wrong = problems(found, FUNCTION_LINES, FUNCTIONS)
    assert not wrong, "\n".join(wrong)


def test_long_functions_are_reported() -> None:
    assert len(problems({"a": 61}, FUNCTION_LINES, {})) == 1
    assert len(problems({"a": 80}, FUNCTION_LINES, {"a": 70})) == 1
    assert not problems({"a": 70}, FUNCTION_LINES, {"a": 70})
    assert problems({"a": 50}, FUNCTION_LINES, {"a": 70}) == [
        "a: 50 lines now: take it off the list"
    ]
