"""Imports have one direction: between packages, core's folders, and files.

Packages: each one's sources import only what the table in AGENTS.md allows, and a process that
blocks everything else can import it. Core's folders import only from folders below them. No files
or folders of a package form an import cycle. Imports for annotations, or inside functions, count
too, because a reader follows them as well.
"""

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

# Package -> modules of this table that its sources may import.
MAY_IMPORT = {
    "multistream": {"torch", "greenlet"},
    "operators": {"torch"},
    "kernels": {"torch", "torch_npu"},
    "core": {"vllm", "torch", "torch_npu", "transformers", "vllm_davinci.operators"},
    "models": {"vllm", "torch", "vllm_davinci.core", "transformers"},
    # only in its folders `hosts`, called by the device if torch is present, and `triton_backend`
    "vnpu": {"torch", "torch_npu"},
    "meta": {
        "vllm",
        "torch",
        "torch_npu",
        "transformers",
        "vllm_davinci.core",
        "vllm_davinci.vnpu",
    },
    "planner": {
        "vllm",
        "torch",
        "torch_npu",
        "vllm_davinci.core",
        "vllm_davinci.meta",
        "vllm_davinci.vnpu",
    },
    "verify": {
        "vllm",
        "torch",
        "torch_npu",
        "transformers",
        "vllm_davinci.meta",
        "vllm_davinci.operators",
    },
}
THIRD_PARTY = {"vllm", "torch", "torch_npu", "transformers", "greenlet"}
OURS = {f"vllm_davinci.{name}" for name in MAY_IMPORT}
ROOT = Path(__file__).parents[2]
PRESENT = sorted(name for name in MAY_IMPORT if (ROOT / "packages" / name / "src").is_dir())

# Core's folders and root files: each imports only from entries above it in this list.
CORE_FOLDERS = (
    "errors",
    "log",
    "components",
    "device",
    "config",
    "weight_files",
    "scheduler",
    "inputs",
    "sampling",
    "spec_decode",
    "multimodal",
    "graph",
    "distributed",
    "layers",
    "fused_moe",
    "quantization",
    "expert_balance",
    "attention",
    "linear_attention",
    "lora",
    "sleep_mode",
    "weight_transfer",
    "kv_cache",
    "kv_offload",
    "kv_transfer",
    "checkpoint",
    "ubatch",
    "process",
    "triton_kernels",
    "features",
    "platform",
    "runner",
    "worker",
    "out_of_tree",
    "upstream_overrides",
    "",  # core/__init__.py, the public API
    "export",  # used offline; serving does not import it
)
MAX_FILES_AT_CORES_ROOT = 8

# Imports each package in a fork of a process with torch, which every package may import.
BLOCK_AND_IMPORT = """
import importlib, json, os, sys, traceback
import torch

class Blocked:
    @staticmethod
    def find_spec(name, path=None, target=None):
        parts = name.split(".")
        if any(".".join(parts[:length]) in forbidden for length in (1, 2)):
            raise ModuleNotFoundError(f"{name} is forbidden here", name=name)

sys.meta_path.insert(0, Blocked)
for package, forbidden in json.loads(sys.argv[1]).items():
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    try:
        importlib.import_module(package)
        print("imported", package, flush=True)
    except BaseException:
        traceback.print_exc()
    os._exit(0)
"""


@cache
def imports_of(source: Path) -> list[ast.Import | ast.ImportFrom]:
    """Returns a file's absolute imports, at any depth."""
    return [
        node
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import)
        or (isinstance(node, ast.ImportFrom) and node.level == 0 and node.module)
    ]


def imported_modules(source: Path) -> set[str]:
    """Returns absolute names of the modules that a file imports, at any depth."""
    found: set[str] = set()
    for node in imports_of(source):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif node.module:
            found.add(node.module)
            if node.module == "vllm_davinci":
                found.update(f"vllm_davinci.{alias.name}" for alias in node.names)
    return found


def concerned(module: str) -> str | None:
    """Returns the package of a module (`vllm`, `vllm_davinci.core`, ...) if the table has it."""
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


def test_each_package_imports_with_its_forbidden_neighbours_blocked():
    blocked = {}
    for package in PRESENT:
        forbidden = (THIRD_PARTY | OURS) - MAY_IMPORT[package] - {f"vllm_davinci.{package}"}
        if "torch_npu" in MAY_IMPORT[package]:
            # meta checks the environment before torch_npu runs, whichever package imports
            # torch_npu.
            forbidden.discard("vllm_davinci.meta")
        blocked[f"vllm_davinci.{package}"] = sorted(forbidden)
    done = subprocess.run(
        [sys.executable, "-c", BLOCK_AND_IMPORT, json.dumps(blocked)],
        # Entry points of torch and vLLM would import more than the package does.
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    imported = [line for line in done.stdout.splitlines() if line.startswith("imported ")]
    assert imported == [f"imported {package}" for package in blocked], done.stderr


@pytest.mark.parametrize("package", sorted(set(PRESENT) - {"meta"}))
def test_a_package_declares_its_imports(package: str):
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


@cache
def sources(package: str) -> dict[str, Path]:
    """Maps every module of a package to its file; compiled modules have a .pyi file."""
    base = ROOT / "packages" / package / "src"
    modules = {}
    for source in sorted([*base.rglob("*.py"), *base.rglob("*.pyi")]):
        parts = source.relative_to(base).with_suffix("").parts
        if parts[0] == "vllm_davinci":
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = source
    return modules


@cache
def imports_within(package: str) -> dict[str, set[str]]:
    """Maps each module to the modules of its package that it imports.

    `from package import name` counts as an import of the module `package.name`, if it exists.
    """
    modules = sources(package)
    graph: dict[str, set[str]] = {}
    for module, source in modules.items():
        found = set()
        for node in imports_of(source):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            else:
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                found.update(name if name in modules else node.module for name in names)
        graph[module] = found & set(modules) - {module}
    return graph


def folder(module: str, package: str) -> str:
    """Returns a module's folder within its package; a root file is a folder of its own."""
    source = sources(package)[module]
    inside = source.relative_to(ROOT / "packages" / package / "src" / "vllm_davinci" / package)
    if len(inside.parts) > 1:
        return inside.parent.as_posix()
    return "" if inside.stem == "__init__" else inside.stem


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Returns strongly connected components with more than one node."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        pending = [start]
        while pending:
            new = graph[pending.pop()] - seen
            seen |= new
            pending += new
        return seen

    reached = {node: reachable(node) for node in graph}
    return {
        frozenset(other for other in reached[node] if node in reached[other])
        for node in graph
        if node in reached[node]
    }


def test_imports_in_core_go_down_only():
    upward = set()
    for module, imported in imports_within("core").items():
        own = folder(module, "core").split("/")[0]
        assert own in CORE_FOLDERS, f"{own} is in no place of CORE_FOLDERS: give it one"
        for other in imported:
            above = folder(other, "core").split("/")[0]
            if above and CORE_FOLDERS.index(above) > CORE_FOLDERS.index(own):
                upward.add(f"{module} imports {other}")
    assert not upward


@pytest.mark.parametrize("package", PRESENT)
def test_no_files_of_a_package_import_each_other_in_a_circle(package: str):
    assert not circles(imports_within(package))


@pytest.mark.parametrize("package", PRESENT)
def test_no_folders_of_a_package_import_each_other_in_a_circle(package: str):
    graph: dict[str, set[str]] = {}
    for module, imported in imports_within(package).items():
        own = folder(module, package)
        graph.setdefault(own, set())
        for other in {folder(each, package) for each in imported} - {own}:
            graph.setdefault(other, set())
            graph[own].add(other)
    assert not circles(graph)


def test_cores_root_holds_few_files():
    root = ROOT / "packages" / "core" / "src" / "vllm_davinci" / "core"
    files = sorted(file.name for file in root.glob("*.py"))
    assert len(files) <= MAX_FILES_AT_CORES_ROOT, files
