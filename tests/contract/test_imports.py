"""Dependencies between packages point one way: the table in AGENTS.md, proven.

Each package is read for what its sources import, and imported in a process in which everything
it must not know is blocked.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Package -> what its sources may import of the parts that this table is about.
MAY_IMPORT = {
    "multistream": {"torch", "greenlet"},
    "kernels": {"torch", "torch_npu"},
    "core": {"vllm", "torch", "torch_npu", "transformers"},
    "models": {"vllm", "torch", "vllm_davinci.core", "transformers"},
    "vnpu": set(),
    "meta": {"vllm", "torch", "torch_npu", "vllm_davinci.core", "vllm_davinci.vnpu"},
}
THIRD_PARTY = {"vllm", "torch", "torch_npu", "transformers", "greenlet"}
OURS = {f"vllm_davinci.{name}" for name in MAY_IMPORT}
ROOT = Path(__file__).parents[2]
PRESENT = sorted(name for name in MAY_IMPORT if (ROOT / "packages" / name / "src").is_dir())

BLOCK_AND_IMPORT = """
import importlib, sys

class Blocked:
    @staticmethod
    def find_spec(name, path=None, target=None):
        parts = name.split(".")
        if any(".".join(parts[:length]) in FORBIDDEN for length in (1, 2)):
            raise ModuleNotFoundError(f"{name} is forbidden here", name=name)

FORBIDDEN, PACKAGE = set(sys.argv[1].split(",")), sys.argv[2]
sys.meta_path.insert(0, Blocked)
importlib.import_module(PACKAGE)
print("imported", PACKAGE)
"""


def imported_modules(source: Path) -> set[str]:
    """Absolute names of the modules a file imports at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
            if node.module == "vllm_davinci":
                found.update(f"vllm_davinci.{alias.name}" for alias in node.names)
    return found


def concerned(module: str) -> str | None:
    """The part of the table that a module belongs to: `vllm`, `vllm_davinci.core`, ..."""
    parts = module.split(".")
    name = ".".join(parts[:2]) if parts[0] == "vllm_davinci" else parts[0]
    return name if name in THIRD_PARTY | OURS else None


@pytest.mark.parametrize("package", PRESENT)
def test_sources_import_only_what_the_table_allows(package: str):
    allowed = MAY_IMPORT[package] | {f"vllm_davinci.{package}"}
    wrong = {
        f"{source.relative_to(ROOT)} imports {module}"
        for source in (ROOT / "packages" / package / "src").rglob("*.py")
        for module in imported_modules(source)
        if (part := concerned(module)) is not None and part not in allowed
    }
    assert not wrong


@pytest.mark.parametrize("package", PRESENT)
def test_the_package_imports_with_its_forbidden_neighbours_blocked(package: str):
    forbidden = (THIRD_PARTY | OURS) - MAY_IMPORT[package] - {f"vllm_davinci.{package}"}
    if "torch_npu" in MAY_IMPORT[package]:
        # The environment's check before torch_npu is executed lives in meta, whoever imports it.
        forbidden.discard("vllm_davinci.meta")
    done = subprocess.run(
        [sys.executable, "-c", BLOCK_AND_IMPORT, ",".join(forbidden), f"vllm_davinci.{package}"],
        # What torch and vLLM load through entry points is not the package's doing.
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip().endswith(f"imported vllm_davinci.{package}"), done.stderr


@pytest.mark.parametrize("package", sorted(set(PRESENT) - {"meta"}))
def test_what_a_package_imports_it_also_declares(package: str):
    with (ROOT / "packages" / package / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    declared = {Requirement(text).name.replace("-", "_") for text in project["dependencies"]}
    imported = {
        part
        for source in (ROOT / "packages" / package / "src").rglob("*.py")
        for module in imported_modules(source)
        if (part := concerned(module)) in THIRD_PARTY
    }
    assert imported <= declared
