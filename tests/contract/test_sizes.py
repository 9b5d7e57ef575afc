"""A reader can hold a file and a function: 300 lines, and 60."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("packages", "tests", "benchmarks", "checkpoints", "ci", "examples")
SUFFIXES = (".py", ".h", ".cpp", ".inc")
FILE_LINES, FUNCTION_LINES = 300, 60
# Lists that have one row, or one case, for each thing that they name; nothing in them is read in
# order. The generated one is written by `nox -s docs`.
TABLES = {
    "packages/core/src/vllm_davinci/core/config/other_keys.py",
    "packages/core/src/vllm_davinci/core/upstream_overrides.py",
    "packages/vnpu/csrc/ops/attention/fused_infer_attention_constraints.cpp",
    "packages/vnpu/csrc/ops/attention/cache_constraints.cpp",
    "packages/vnpu/csrc/ops/matmul/matmul_constraints.cpp",
    "tests/support/src/vllm_davinci_testing/operators/illegal_calls.py",
    "tests/support/src/vllm_davinci_testing/operators/legal_calls.py",
}
# Longer ones, with the lines that they may have (files rounded up to fifties, functions to tens):
# the lists only shrink.
FILES: dict[str, int] = {
    "packages/core/tests/features/test_overlap.py": 350,
    "ci/clients/openai_calls.py": 370,
    "ci/prepare_environment.py": 350,
    "packages/core/src/vllm_davinci/core/config/parsing.py": 450,
    "packages/meta/src/vllm_davinci/meta/doctor.py": 350,
    "packages/core/src/vllm_davinci/core/graph/capture.py": 350,
    "packages/core/src/vllm_davinci/core/model_runner.py": 450,
    "packages/core/src/vllm_davinci/core/process/shutdown.py": 400,
    "packages/core/src/vllm_davinci/core/runner/graphs.py": 400,
    "packages/core/src/vllm_davinci/core/runner/model_runner.py": 400,
    "packages/core/src/vllm_davinci/core/triton_kernels/verification.py": 400,
    "packages/core/src/vllm_davinci/core/ubatch/splitter.py": 350,
    "packages/core/src/vllm_davinci/core/worker.py": 350,
    "packages/core/tests/triton_kernels/interpreted.py": 600,
    "packages/vnpu/csrc/ops/arguments.h": 350,
    "packages/vnpu/csrc/ops/operator.cpp": 400,
    "tests/contract/test_tasks.py": 350,
    "tests/e2e/test_dry_run.py": 400,
    "tests/support/src/vllm_davinci_testing/plugin.py": 350,
}
FUNCTIONS: dict[str, int] = {
    "ci/prepare_environment.py:prepare": 90,
    "packages/core/src/vllm_davinci/core/triton_kernels/inputs.py:post_update": 70,
    "packages/core/src/vllm_davinci/core/triton_kernels/drafting.py:prepare_prefill_inputs": 70,
    "packages/core/src/vllm_davinci/core/triton_kernels/penalties.py:bad_words": 70,
    "packages/core/src/vllm_davinci/core/triton_kernels/verification.py:reject": 100,
    "packages/core/src/vllm_davinci/core/triton_kernels/verification.py:resample": 70,
    "packages/models/src/vllm_davinci/models/deepseek_v4_attention.py:__init__": 80,
}


def sources() -> Iterator[tuple[str, Path]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            relative = path.relative_to(ROOT)
            if path.suffix not in SUFFIXES or path.is_symlink() or not path.is_file():
                continue
            if {"build", "__pycache__", "node_modules"} & set(relative.parts):
                continue
            yield relative.as_posix(), path


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of each Python function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def problems(found: dict[str, int], limit: int, listed: dict[str, int]) -> list[str]:
    """Names files or functions that are too long, and rows of the list that are not needed."""
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


def test_files_are_short() -> None:
    found = {
        name: len(path.read_text(encoding="utf-8").splitlines())
        for name, path in sources()
        if name not in TABLES
    }
    wrong = problems(found, FILE_LINES, FILES)
    assert not wrong, "\n".join(wrong)


def test_functions_are_short() -> None:
    found: dict[str, int] = {}
    for name, path in sources():
        if path.suffix == ".py":
            for function, lines in functions(path):
                key = f"{name}:{function}"
                found[key] = max(lines, found.get(key, 0))
    wrong = problems(found, FUNCTION_LINES, FUNCTIONS)
    assert not wrong, "\n".join(wrong)


def test_what_is_too_long_is_told() -> None:
    assert len(problems({"a.py": 301, "b.py": 300}, FILE_LINES, {})) == 1
    assert len(problems({"a.py": 350}, FILE_LINES, {"a.py": 349})) == 1
    assert not problems({"a.py": 349}, FILE_LINES, {"a.py": 349})
    assert problems({"a.py": 290}, FILE_LINES, {"a.py": 349}) == [
        "a.py: 290 lines now: take it off the list"
    ]
