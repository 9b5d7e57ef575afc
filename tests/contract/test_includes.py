"""C++ units, and folders, include each other in one direction.

A unit is a header with the source of the same name. Generated headers and other packages' headers
belong to no unit.
"""

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
SOURCES = [ROOT / "packages" / name / "csrc" for name in ("vnpu", "kernels")]


def units_of(csrc: Path) -> dict[str, set[str]]:
    """Maps each unit to the units that it includes, as paths without suffix."""
    graph: dict[str, set[str]] = {}
    for path in sorted([*csrc.rglob("*.h"), *csrc.rglob("*.cpp")]):
        unit = path.relative_to(csrc).with_suffix("").as_posix()
        included = (
            place.with_suffix("").relative_to(csrc).as_posix()
            for name in INCLUDE.findall(path.read_text(encoding="utf-8"))
            for place in (csrc / name, path.parent / name)
            if place.is_file()
        )
        graph.setdefault(unit, set()).update(name for name in included if name != unit)
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Returns an include cycle, or an empty result."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("csrc", SOURCES, ids=lambda csrc: csrc.parent.name)
def test_no_units_include_each_other_in_a_circle(csrc: Path) -> None:
    graph = units_of(csrc)
    assert sum(map(len, graph.values())) > len(graph)
    assert not circle_in(graph)


@pytest.mark.parametrize("csrc", SOURCES, ids=lambda csrc: csrc.parent.name)
def test_no_folders_include_each_other_in_a_circle(csrc: Path) -> None:
    """Checks folders at the top of `csrc`; files outside folders may include any of them."""
    graph: dict[str, set[str]] = {}
    for unit, included in units_of(csrc).items():
        if "/" not in unit:
            continue
        folder = unit.split("/")[0]
        folders = {name.split("/")[0] for name in included if "/" in name}
        graph.setdefault(folder, set()).update(folders - {folder})
    assert not circle_in(graph)


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert not circle_in({"a": {"b"}, "b": {"c"}, "d": {"a"}})
