"""A test module's path mirrors its source's path.

`packages/core/tests/attention/test_paged.py` tests `vllm_davinci/core/attention/paged.py`;
`packages/vnpu/tests/device/test_memory.py` tests `csrc/device/memory.cpp`. A source may have
several test modules: `test_metadata_of_ubatches.py` tests `metadata`, too. The name of a test of a
whole folder begins with the folder's name.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {".py", ".cpp", ".h"}
TESTS = sorted(
    path.relative_to(ROOT)
    for path in ROOT.glob("packages/*/tests/**/test_*.py")
    if "build" not in path.parts
)


def named_sources(test: Path) -> list[Path]:
    """Returns the source files and folders that a test may belong to by its path."""
    package = ROOT / Path(*test.parts[:2])
    inner = Path(*test.parts[3:-1])
    name = test.stem.removeprefix("test_")
    folders = [package / "src" / "vllm_davinci" / package.name / inner, package / "csrc" / inner]
    files = [
        path
        for folder in folders
        if folder.is_dir()
        for path in folder.iterdir()
        if path.suffix in SOURCES and is_about(name, path.stem)
    ]
    return files + [folder for folder in folders if folder.is_dir() and is_about(name, folder.name)]


def is_about(test_name: str, source_name: str) -> bool:
    return f"{test_name}_".startswith(f"{source_name}_")


@pytest.mark.parametrize("test", TESTS, ids=str)
def test_a_test_module_stands_where_its_source_stands(test: Path):
    assert named_sources(test), (
        f"{test}: no source of that name in that folder. Move the test to the folder of what it "
        f"tests, or begin its name with the name of the source."
    )
