"""Models the steps of published deployments: the files of durations that vllm-davinci ships.

Run by `nox -s step_costs`; `-- NAME...` names rows of `vllm-davinci deployments`, all without.
`--missing` leaves out those whose file the installed timing model has made; `--check` writes
nothing, and fails where a file is of another state of the model: engines leave it aside then, and
make one at their first start. A row takes one to three minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from versions import ROOT
from vllm_davinci.meta.deployments.table import all_deployments
from vllm_davinci.meta.step_costs.provider import SHIPPED, file_name, is_current

LIMIT_S = 1800.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        return _tell_stale()
    rows = all_deployments()
    failed = []
    for name in options.names or [name for name, row in rows.items() if not row.refused]:
        if options.missing and any(is_current(file) for file in _files_of(name)):
            continue
        try:
            print(f"{name}: {write(name)}", flush=True)
        except subprocess.SubprocessError as error:
            failed.append(name)
            print(f"{name}: {error}", flush=True)
    return 1 if failed else 0


def write(name: str) -> str:
    """Models one row and keeps its durations; says where, or why not."""
    with tempfile.TemporaryDirectory(prefix="step-costs.") as directory:
        made = Path(directory) / "costs.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "vllm_davinci.meta", "dry-run"),
                *(f"--deployment={name}", f"--step-costs={made}"),
            ],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT_S,
            check=True,
        )  # fmt: skip
        content: dict[str, Any] = json.loads(made.read_text(encoding="utf-8"))
    if content["world_size"] == 1:
        return "one rank has nothing to decide"
    content["model"] = content["deployment"] = name
    SHIPPED.mkdir(exist_ok=True)
    file = SHIPPED / file_name(content["engine"])
    file.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    return file.name


def _files_of(name: str) -> list[Path]:
    return [file for file in _shipped() if f'"deployment":"{name}"' in file.read_text("utf-8")]


def _shipped() -> list[Path]:
    return sorted(SHIPPED.glob("*.json"))


def _tell_stale() -> int:
    stale = [file.name for file in _shipped() if not is_current(file)]
    print(f"{len(_shipped())} files, {len(stale)} of another state of the timing model", *stale)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
