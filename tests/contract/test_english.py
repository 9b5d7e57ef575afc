"""Docstrings are sentences: none begins in the middle of one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("packages", "tests", "benchmarks", "ci", "examples")
# "Of one weight at most so many." leaves the reader to look for its subject.
FRAGMENT = re.compile(r"(Of|What|Whose|That|How much)\b")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that documents a module, a class, a function or a field."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def fragments(path: Path) -> list[str]:
    """Places of a file's docstrings that begin in the middle of a sentence."""
    name = path.relative_to(ROOT).as_posix()
    return [
        f"{name}:{line}: {text.splitlines()[0]}"
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if FRAGMENT.match(text)
    ]


def test_docstrings_begin_with_their_subject_or_verb() -> None:
    found = [
        each
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for each in fragments(path)
    ]
    assert not found, "give these a subject or a verb:\n" + "\n".join(found)


def test_a_fragment_is_seen() -> None:
    text = 'class Sizes:\n    limit: int\n    """Of one weight at most so many."""\n'
    assert [line for line, each in docstrings(text) if FRAGMENT.match(each)] == [3]
