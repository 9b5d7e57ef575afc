"""Journal of a part's begun cases and findings, one JSON line each.

If a process dies in a case, the line of its begin remains. The next process continues after it, and
records how the process ended as the case's finding.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_davinci.verify.finding import Finding


class Journal:
    """
    path: the part's file, which may have findings of an earlier process
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.findings: list[dict[str, Any]] = []
        self.ended: set[str] = set()
        self.begun: str | None = None
        self.is_finished = False
        self.seconds = 0.0
        for line in self._lines():
            self.seconds = line.get("seconds", self.seconds)
            if "begins" in line:
                self.begun = line["begins"]
            elif "ends" in line:
                self._keep(line["ends"], line["findings"])
            else:
                self.is_finished = line.get("finished", False)

    def begin(self, case: str) -> None:
        self.begun = case
        self._append({"begins": case})

    def end(self, case: str, findings: Iterable[Finding], seconds: float) -> None:
        """seconds: since the part began, over all of its processes"""
        told = [finding.fields() for finding in findings]
        self._keep(case, told)
        self._append({"ends": case, "findings": told, "seconds": round(seconds, 3)})

    def finish(self, seconds: float) -> None:
        self.is_finished = True
        self._append({"finished": True, "seconds": round(seconds, 3)})

    def _keep(self, case: str, findings: list[dict[str, Any]]) -> None:
        self.ended.add(case)
        self.findings += findings
        self.begun = None

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        """All complete lines; the last one may be cut off after a crash."""
        if not self._path.exists():
            return
        for text in self._path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(text)
            except ValueError:
                return
