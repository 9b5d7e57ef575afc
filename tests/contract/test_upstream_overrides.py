"""The table of deviations from vLLM's hooks is complete and matches the code."""

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import vllm

from vllm_davinci.core.upstream_overrides import OVERRIDES, Override

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages" / "core" / "src" / "vllm_davinci" / "core"
NAMED = {place for override in OVERRIDES for place in override.where}
NAMED_MODULES = {place.split(":")[0] for place in NAMED}
FOREIGN = ("torch", "torch_npu", "npu", "vllm")


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yields each module of core: its name in the table, and its syntax tree."""
    for path in sorted(CORE.rglob("*.py")):
        relative = path.relative_to(CORE.parent).with_suffix("")
        if relative.name != "upstream_overrides":
            yield ".".join(relative.parts), ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda override: override.what[:40])
def test_names_in_a_row_exist_on_both_sides(override: Override):
    for place in override.where:
        module, _, name = place.partition(":")
        attrgetter(name)(import_module(f"vllm_davinci.{module}"))
    (installed,) = vllm.__path__
    for file, names in override.upstream.items():
        text = (Path(installed) / file).read_text(encoding="utf-8")
        absent = [name for name in names if name not in text]
        assert not absent, f"{file} of the installed vLLM has no {absent}: is the row still needed?"


def test_every_private_method_of_vllm_that_is_overridden_has_a_row():
    overridden = set()
    for name, _ in sources():
        module = import_module(f"vllm_davinci.{name.removesuffix('.__init__')}")
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                overridden.update(
                    f"{name}:{cls.__name__}.{method}"
                    for method, value in vars(cls).items()
                    if is_private(method) and inspect.isfunction(value)
                    if any(is_vllms(base) and method in vars(base) for base in cls.__mro__[1:])
                )
    assert overridden - NAMED == set()


def test_overrides_of_methods_without_autograd_run_without_it():
    """With autograd, each step's tensors would be kept for a backward pass."""
    exempt = {
        "core.runner.graphs:_OnNPU.capture",  # runs no model
        # The private method that it calls is decorated.
        "core.worker:NPUWorker.determine_available_memory",
    }
    with_autograd = set()
    for name, _ in sources():
        module = import_module(f"vllm_davinci.{name.removesuffix('.__init__')}")
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__:
                continue
            for method, value in vars(cls).items():
                if method.startswith("__") or not inspect.isfunction(value):
                    continue
                bases = [vars(base).get(method) for base in cls.__mro__[1:] if is_vllms(base)]
                bases = [base for base in bases if inspect.isfunction(base)]
                if not bases:
                    continue
                own = inspect.getsource(value)
                if "@torch.inference_mode" in inspect.getsource(bases[0]) and not (
                    "@torch.inference_mode" in own or f"super().{method}" in own
                ):
                    with_autograd.add(f"{name}:{cls.__name__}.{method}")
    assert with_autograd - exempt == set()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_vllms(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "vllm"


def test_every_module_that_reaches_into_others_has_a_row():
    """A row is needed for imports of vLLM's private names, assignments to foreign modules or to
    private attributes of foreign objects, and strings with vLLM's module or file names.
    """
    reaching = {
        name: why
        for name, tree in sources()
        if name not in NAMED_MODULES
        if (why := [text for node in ast.walk(tree) for text in reaches(node)])
    }
    assert reaching == {}


def reaches(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
        yield from (f"imports {alias.name}" for alias in node.names if is_private(alias.name))
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute):
                text = ast.unparse(target)
                holder = text.split(".")[0]
                if holder in FOREIGN or (is_private(target.attr) and holder not in ("self", "cls")):
                    yield f"assigns to {text}"
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
        holder = ast.unparse(node.args[0]).split(".")[0]
        if holder in FOREIGN:
            yield f"assigns with {ast.unparse(node)}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        words = node.value
        is_path = words.startswith(("vllm.", "vllm/")) and " " not in words and len(words) > 5
        # core names its loggers "vllm.NAME", because vLLM prints only these.
        if is_path and words != "vllm.":
            yield f"names {words}"
