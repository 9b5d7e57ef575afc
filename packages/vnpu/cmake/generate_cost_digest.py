"""Writes a digest of what turns an operator into time: `generate_cost_digest.py OUTPUT CSRC`.

The timing model's code, the functions that say what an operator has to do, and which operator names
which of them. Comments and white space do not count. Reports and files of costs carry it, so that
figures of another model are not taken for this one's.
"""

import hashlib
import pathlib
import re
import sys
from collections.abc import Iterator


def lines_of(path: pathlib.Path, only: str = "") -> Iterator[str]:
    for line in path.read_text().splitlines():
        code = re.sub(r"\s+", "", re.sub(r"//.*", "", line))
        if code and only in code:
            yield code


def digest_of(csrc: pathlib.Path) -> str:
    sources = sorted(path for path in csrc.rglob("*") if path.suffix in (".cpp", ".h"))
    digest = hashlib.sha256()
    for path in sources:
        folder = path.relative_to(csrc).parts[0]
        is_whole = folder == "timing" or (folder == "ops" and path.stem.endswith("costs"))
        if is_whole or folder == "ops":
            for line in lines_of(path, "" if is_whole else ".cost="):
                digest.update(f"{line}\n".encode())
    return digest.hexdigest()[:16]


def main() -> None:
    output, csrc = map(pathlib.Path, sys.argv[1:])
    text = f'"{digest_of(csrc)}"\n'
    if (
        not output.exists() or output.read_text() != text
    ):  # else all that includes it is built again
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)


if __name__ == "__main__":
    main()
