"""Docstrings begin with a subject or a verb, and use the field's words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("packages", "tests", "benchmarks", "ci", "examples", "checkpoints", "conformance")
# "Of one weight at most so many." hides its subject, and "Whether `plan` has anything to do." has
# no main verb: write "True if steps may be split."
CLAUSE = re.compile(r"(Whether|Which|How|Where|Of|What|Whose|That|Those|How much)\b")
WORDS = {
    r"seals?|unsealed": "checksum",
    r"both ways": "bidirectional",
    r"in vain|for ever": "time out, never, forever",
    r"nobody|somebody|whoever": "the agent, or a verb without one",
    r"so many|as many as": "a number with its noun",
    r"goes on|go on|going on": "continues, is offloaded",
    r"(hold|holds|held) against": "compare",
    r"by lot": "random",
    r"other people's": "another project's",
    r"no neighbours": "not contiguous",
    r"layers? for further|further layers?": "MTP layer",
    r"beside states|with states": "recurrent state",
    r"latent attention": "MLA",
    r"keeps? states": "recurrent state",
    r"way to the experts|ways to the experts": "dispatch method",
    r"further tokens": "multi-token prediction",
    r"without a word|for want of|on (the|its|their) way": "a verb",
    r"is told|are told": "is logged, is reported",
}
HOUSEHOLD = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each docstring of a module, class, function or field."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def plain_faults(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and words of each docstring that opens with a clause or contains one of WORDS."""
    for line, text in docstrings(source):
        for found in (CLAUSE.match(text), HOUSEHOLD.search(text)):
            if found:
                yield line, found[0]


def test_no_text_has_a_conflict_marker() -> None:
    marked = re.compile(r"^(<{7} |>{7} )", re.MULTILINE)
    texts = [
        path
        for folder in (*FOLDERS, "docs")
        for kind in ("md", "py", "toml", "cpp", "h")
        for path in (ROOT / folder).rglob(f"*.{kind}")
    ]
    found = [path for path in texts if marked.search(path.read_text(encoding="utf-8"))]
    assert len(texts) > 1000 and not found


def test_docstrings_begin_with_a_subject_or_verb_and_use_the_fields_words() -> None:
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{line}: {words!r}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, words in plain_faults(path.read_text(encoding="utf-8"))
    ]
    assert not found, "write a verb or the field's word:\n" + "\n".join(found)


def test_a_clause_and_a_household_word_are_seen() -> None:
    text = 'def is_on() -> bool:\n    """Whether a step of so many tokens fetches anything."""\n'
    assert [words for _, words in plain_faults(text)] == ["Whether", "so many"]
