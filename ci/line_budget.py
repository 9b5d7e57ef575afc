"""Compares lines and tokens of every part of the repository with the recorded ones.

`python ci/line_budget.py` prints them with changes since they were recorded. The sums of Python and
of C++ may only fall: `--record` writes the current sums, and requires `--for REASON` if one grew.
tests/contract/test_sizes.py fails if a sum grew without a record.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tokenize
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "ci" / "line_budget.json"
LANGUAGES = {"python": (".py",), "cpp": (".h", ".cpp", ".inc")}
NOT_OURS = {"build", "__pycache__", "node_modules", ".venv", ".nox"}
_CPP_TOKEN = re.compile(r"\w+|\"(?:\\.|[^\"\\])*\"|[^\w\s]")
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """lines: with blank lines and comments; tokens: of code, without comments"""

    lines: int = 0
    tokens: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.lines + other.lines, self.tokens + other.tokens)

    def __sub__(self, other: Size) -> Size:
        return Size(self.lines - other.lines, self.tokens - other.tokens)


Sizes = dict[str, dict[str, Size]]  # by language and part


def part_of(file: Path) -> str:
    """Returns a file's part: `packages/core/src`, `tests/e2e`, `ci` (two folders, three below
    packages/).
    """
    folders = file.parts[:-1]
    return "/".join(folders[: 3 if folders[:1] == ("packages",) else 2]) or "."


def size_of(path: Path) -> Size:
    text = path.read_text(encoding="utf-8")
    if path.suffix in LANGUAGES["cpp"]:
        tokens = len(_CPP_TOKEN.findall(re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)))
    else:
        with path.open("rb") as file:
            tokens = sum(each.type not in _LAYOUT for each in tokenize.tokenize(file.readline))
    return Size(text.count("\n"), tokens)


def measured(root: Path = ROOT) -> Sizes:
    """Returns the current sizes of all files outside environments and builds."""
    found: Sizes = {language: {} for language in LANGUAGES}
    for language, suffixes in LANGUAGES.items():
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root)
            if path.suffix not in suffixes or NOT_OURS & set(relative.parts) or path.is_symlink():
                continue
            part = part_of(relative)
            found[language][part] = found[language].get(part, Size()) + size_of(path)
    return found


def recorded() -> Sizes:
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return {
        language: {part: Size(*row) for part, row in content[language].items()}
        for language in LANGUAGES
    }


def total(parts: dict[str, Size]) -> Size:
    return sum(parts.values(), Size())


def grown(before: Sizes, now: Sizes) -> list[str]:
    """Describes each sum that has grown in a line."""
    return [
        f"{language}: {new} {what}, and {old} are recorded"
        for language in LANGUAGES
        for (what, old), new in zip(
            asdict(total(before[language])).items(),
            asdict(total(now[language])).values(),
            strict=True,
        )
        if new > old
    ]


def print_table(before: Sizes, now: Sizes) -> None:
    for language in LANGUAGES:
        old, new = before[language], now[language]
        print(f"{language:42} {'lines':>7} {'':>7} {'tokens':>8}")
        for part in sorted(old.keys() | new.keys()):
            _print_row(f"  {part}", old.get(part, Size()), new.get(part, Size()))
        _print_row("  sum", total(old), total(new))


def _print_row(name: str, old: Size, new: Size) -> None:
    change = new - old
    print(f"{name:42} {new.lines:7} {change.lines:+7} {new.tokens:8} {change.tokens:+8}")


def record(now: Sizes, reason: str) -> None:
    content: dict[str, Any] = {"last growth": reason}
    for language, parts in now.items():
        content[language] = {part: [size.lines, size.tokens] for part, size in parts.items()}
    text = json.dumps(content, indent=1)
    # Write one row per line, so that changes of two parts touch different lines.
    RECORD.write_text(re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", text) + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="record the current sizes")
    parser.add_argument("--for", dest="reason", default="", help="reason for growth")
    options = parser.parse_args()
    now = measured()
    before = recorded() if RECORD.is_file() else now
    print_table(before, now)
    more = grown(before, now)
    if options.record:
        if more and not options.reason:
            print("\n".join(more), "Say what for: --record --for REASON", sep="\n")
            return 1
        last = json.loads(RECORD.read_text("utf-8"))["last growth"] if RECORD.is_file() else ""
        record(now, options.reason or last)
    return 0


if __name__ == "__main__":
    sys.exit(main())
