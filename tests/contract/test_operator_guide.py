"""The guide to new operators shows a real one, and what it promises holds."""

import json
import re
from pathlib import Path

import pytest

from vllm_davinci.vnpu import library_directory
from vllm_davinci.vnpu.coverage import operators
from vllm_davinci.vnpu.operator_rows import constraints, declared
from vllm_davinci_testing.operators.generated_calls import breaking
from vllm_davinci_testing.operators.legal_calls import LEGAL

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "add_an_operator.md").read_text(encoding="utf-8")
VNPU = ROOT / "packages" / "vnpu"


@pytest.fixture(scope="module")
def shown() -> tuple[str, str]:
    """Returns name and code of the operator that the guide shows."""
    (code,) = re.findall(r"```cpp\n(.*?)```", GUIDE, re.DOTALL)
    (name,) = re.findall(r"^VNPU_OPERATOR\((\w+)", code, re.MULTILINE)
    return name, code


def test_the_code_is_all_that_there_is_of_the_operator(shown: tuple[str, str]) -> None:
    name, code = shown
    (file,) = re.findall(r"`(packages/vnpu/csrc/ops/\S+\.cpp)`", GUIDE)
    assert code in (ROOT / file).read_text(encoding="utf-8")
    others = [
        str(path.relative_to(ROOT))
        for path in [*VNPU.glob("csrc/**/*"), *VNPU.glob("src/**/*")]
        if path.suffix in {".cpp", ".h", ".inc", ".in", ".json", ".py"}
        and re.search(rf"\b(aclnn)?{name}\b", path.read_text(encoding="utf-8"))
    ]
    # Files with modelled times name all operators.
    elsewhere = {each for each in others if "/legacy/" in each or "modelled_calls" in each}
    assert set(others) - elsewhere <= {file}


def test_the_library_exports_both_phases(shown: tuple[str, str]) -> None:
    name, _ = shown
    exported = (library_directory() / "libopapi.so").read_bytes()
    assert f"\0aclnn{name}GetWorkspaceSize\0".encode() in exported
    assert f"\0aclnn{name}\0".encode() in exported


def test_its_row_appears_in_coverage(shown: tuple[str, str]) -> None:
    name, code = shown
    (operator,) = (operator for operator in operators() if operator.name == name)
    assert operator.exported and operator.asked and operator.priced
    tier = re.search(r"\.tier = k(\w+)", code)
    assert operator.tier == (tier[1] if tier else "T1")


def test_its_rules_are_listed_and_refuse_generated_calls(shown: tuple[str, str]) -> None:
    name, code = shown
    rules = [row for row in constraints() if row.operator == f"aclnn{name}"]
    assert [rule.argument for rule in rules] == re.findall(r'\{"(\w+)", ', code)
    assert all(breaking(rule, LEGAL[name]) for rule in rules)


def test_every_operator_is_declared_by_a_row_and_none_twice() -> None:
    rows = [row.operator for row in declared()]
    assert len(rows) == len(set(rows)) > 400
    absent = json.loads((VNPU / "src/vllm_davinci/vnpu/operators_absent.json").read_text())
    assert not {f"aclnn{name}" for names in absent.values() for name in names} & set(rows)


@pytest.mark.parametrize("path", re.findall(r"`((?:packages|tests|docs)/[\w./]+\.\w+)`", GUIDE))
def test_the_files_that_the_guide_names_exist(path: str) -> None:
    assert (ROOT / path).is_file()


def _defined(text: str, result: str) -> set[str]:
    return set(re.findall(rf"\b{result} (\w+)\(", text))


def test_rules_and_cost_stand_in_the_operators_own_file() -> None:
    """Rules and costs shared by several files' operators may be in a header."""
    for path in sorted(VNPU.glob("csrc/ops/*/*.cpp")):
        text = path.read_text(encoding="utf-8")
        headers = [*path.parent.glob("*.h"), *path.parents[1].glob("*.h")]
        shared = "".join(header.read_text(encoding="utf-8") for header in headers)
        for field, result in (("rules", "Rules"), ("cost", "void")):
            named = set(re.findall(rf"\.{field} = (\w+)", text))
            assert named <= _defined(text, result) | _defined(shared, result), path
        for name in _defined(text, "Rules"):
            assert len(re.findall(rf"\b{name}\(", text)) > 1, f"no row of {path} has {name}"
