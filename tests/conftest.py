"""Shared by tests of several packages: the repository's root and its packages."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def packages(repository: Path) -> list[Path]:
    """The package directories under packages/."""
    return sorted(path.parent for path in repository.glob("packages/*/pyproject.toml"))
