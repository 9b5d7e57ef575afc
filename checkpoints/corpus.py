"""The training text: the source of the running Python's standard library.

A hash of each file's path decides whether it is training text or held out, so that the split is the
same on every machine. Functions with a docstring also give conversations: the docstring is the
request, the source the answer.
"""

import ast
import hashlib
import re
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Excluded: installed packages, tests, programs, tables of data, and build facts of one machine
# (`_sysconfigdata*`, `config-*`).
EXCLUDED_DIRECTORIES = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "idle_test",
    "lib-dynload",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
EXCLUDED_FILES = re.compile(r"(_sysconfigdata.*|entities|this|antigravity|_sysconfig_vars.*)\.py")
HELD_OUT_ONE_IN = 32  # files; about 3 % of the text

# A line that can be the first of a file or an interactive session.
TOP_LEVEL = re.compile(
    r"^(?:async def|def|class|import|from|if|for|while|try|with|@|[A-Za-z_][\w.]* =)\b", re.M
)


@dataclass(frozen=True)
class SourceFile:
    """A file of the standard library; `path` is relative to the library, with `/`."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Conversation:
    """A request and the function that answers it."""

    request: str
    answer: str


def standard_library() -> list[SourceFile]:
    """Returns the library's files, sorted by path.

    Raises FileNotFoundError if Python was installed without the library's source.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = PurePosixPath(path.relative_to(root).as_posix())
        if _is_library_code(relative):
            with tokenize.open(path) as file:
                files.append(SourceFile(str(relative), file.read()))
    if not files:
        raise FileNotFoundError(
            f"no Python source under {root}: use a Python that ships its standard library as .py"
        )
    return files


def training_files() -> list[SourceFile]:
    """Returns the files that a model may train on."""
    return [file for file in standard_library() if not file.held_out]


def held_out_files() -> list[SourceFile]:
    """Returns the files that no shipped model was trained on, to measure perplexity."""
    return [file for file in standard_library() if file.held_out]


def conversations(files: list[SourceFile]) -> Iterator[Conversation]:
    """Returns requests for the documented functions of `files`, in text order."""
    for file in files:
        for node in ast.walk(ast.parse(file.text)):
            if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
                lines = file.text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
                summary = " ".join(docstring.split("\n\n")[0].split())
                yield Conversation(_request(node.name, summary), textwrap.dedent("".join(lines)))


def _request(name: str, summary: str) -> str:
    forms = (
        summary,
        f"Write a Python function {name}: {summary}",
        f"Write the function {name}.",
        f"Write a function for this: {summary}",
    )
    return forms[hashlib.sha256(f"{name} {summary}".encode()).digest()[0] % len(forms)]


def _is_library_code(path: PurePosixPath) -> bool:
    return not (
        EXCLUDED_DIRECTORIES.intersection(path.parts[:-1])
        or path.parts[0].startswith("config-")
        or EXCLUDED_FILES.fullmatch(path.name)
    )
