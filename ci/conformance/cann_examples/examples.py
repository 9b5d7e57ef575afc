"""The example programs that sources of CANN's have: where each lies, and what it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cann_examples.pages import sample_output

RUNTIME = "runtime"
PROJECTS = ("ops-math", "ops-nn", "ops-transformer", RUNTIME)
# As git's patterns, of what is read here.
PATTERNS = {
    **dict.fromkeys(PROJECTS, (":(glob)**/examples/**/test_aclnn*.cpp",)),
    RUNTIME: tuple(
        f":(glob)example/**/{name}"
        for name in ("CMakeLists.txt", "*.cpp", "README_en.md", "run.sh")
    ),
}

# Folders and names say which chips an example is for, where it is not for all.
_OTHER_CHIPS = re.compile(r"/arch\d\d/|950|310p", re.IGNORECASE)
_PHASE_ONE = re.compile(r"\b(aclnn[A-Z]\w*?)GetWorkspaceSize\s*\(")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TARGET = re.compile(r"\badd_executable\s*\(\s*(\w+)")
_DEVICE_CODE = "ascendc_library"
# Two processes that exchange something: their script starts both.
_PARTNER = "proc_"
_FOLDER = re.compile(r"^\s*mkdir -p (\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """
    name:      "ops-nn/activation/elu/examples/test_aclnn_elu": project and path of the program
    operators: that it calls
    left_out:  why it is not for a virtual NPU of this kind; None where it is
    prints:    samples of lines that its page says it prints, with its partners; see pages.py
    partners:  programs that run beside it, in the same directory
    folders:   that the directory has
    """

    name: str
    operators: frozenset[str]
    left_out: str | None
    prints: tuple[tuple[str, ...], ...] = ()
    partners: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    @property
    def project(self) -> str:
        return self.name.split("/")[0]


def project_of(checkout: Path) -> str:
    """The project that a checkout is of, by its path. Raises SystemExit where that says nothing."""
    for part in reversed(checkout.resolve().parts):
        for name in PROJECTS:
            if name in part:
                return name
    raise SystemExit(
        f"{checkout}: which of {', '.join(PROJECTS)} is this? Let its path have that name."
    )


def examples_of(project: str, source: Path) -> list[Example]:
    """All programs of a project, by name. source: a directory with its files"""
    find = _runtime_programs if project == RUNTIME else _operator_programs
    return sorted(find(project, source), key=lambda example: example.name)


def _operator_programs(project: str, source: Path) -> Iterator[Example]:
    for path in source.glob("**/examples/**/test_aclnn*.cpp"):
        name = f"{project}/{path.relative_to(source).with_suffix('')}"
        left_out = None
        if "/experimental/" in name:
            left_out = "experimental"
        elif _OTHER_CHIPS.search(name):
            left_out = "for other chips"
        operators = _operators(path)
        yield Example(name, operators, left_out or (None if operators else "calls no operator"))


def _runtime_programs(project: str, source: Path) -> Iterator[Example]:
    for build in source.glob("example/**/CMakeLists.txt"):
        text = build.read_text(encoding="utf-8", errors="replace")
        left_out = "needs device code" if _DEVICE_CODE in text else None
        operators = frozenset[str]().union(*map(_operators, build.parent.glob("*.cpp")))
        script = _text_of(build.with_name("run.sh"))
        prints = sample_output(_text_of(build.with_name("README_en.md")), script)
        folders = tuple(name for name in _FOLDER.findall(script) if name not in ("build", "out"))
        targets = _TARGET.findall(text)
        pair = [target for target in targets if target.startswith(_PARTNER)]
        directory = f"{project}/{build.parent.relative_to(source)}"
        for target in targets:
            partners = [other for other in pair if target in pair and other != target]
            yield Example(
                f"{directory}/{target}",
                operators,
                left_out,
                prints if len(targets) == 1 or target in pair else (),
                tuple(f"{directory}/{other}" for other in partners),
                folders,
            )


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _operators(path: Path) -> frozenset[str]:
    code = _COMMENT.sub("", path.read_text(encoding="utf-8", errors="replace"))
    return frozenset(_PHASE_ONE.findall(code))
