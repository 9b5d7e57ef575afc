"""The choice of vLLM's model runner for a whole run, and the tests that pass on V2."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
LISTED_ON_V2 = "v2"
# Choice -> the variable's value.
CHOICES = {"v1": "0", LISTED_ON_V2: "1", "v2-all": "1"}
# Files and cases, one per line; `#` begins a comment.
LISTED = "tests/e2e/passes_on_v2.txt"


def use(choice: str) -> None:
    """Call it before vLLM is imported: the fork server and all engines inherit it."""
    os.environ[VARIABLE] = CHOICES[choice]


def listed(text: str) -> list[str]:
    """The node ids of a list, or their prefixes."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def is_listed(node_id: str, names: Iterable[str]) -> bool:
    """True if a list names this case, its test, file or folder."""
    return any(
        node_id == name or node_id.startswith((f"{name}[", f"{name}::", f"{name}/"))
        for name in names
    )


class ListedTests:
    """Removes tests that the list does not name."""

    def __init__(self, root: Path) -> None:
        self._names = listed((root / LISTED).read_text(encoding="utf-8"))

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left_out = [item for item in items if not is_listed(item.nodeid, self._names)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if is_listed(item.nodeid, self._names)]
