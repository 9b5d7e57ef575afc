"""Compiled operators come from providers when a process has its device, or not at all."""

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType

import pytest

from vllm_davinci import operators
from vllm_davinci.core import components
from vllm_davinci.core.components import fused_ops, providers
from vllm_davinci.core.errors import ComponentError


class Kernels:
    api_version = components.API_VERSION

    def supported_ops(self) -> frozenset[str]:
        return frozenset({"experts", "rms_norm", "an_operator_of_the_future"})

    def load(self, name: str) -> object:
        return lambda *arguments: (name, arguments)


class OldKernels(Kernels):
    api_version = components.API_VERSION - 1


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets entry points load this file, under pytest's module name."""
    module = ModuleType(__name__)
    module.__dict__.update(globals())
    monkeypatch.setitem(sys.modules, __name__, module)
    before = dict(fused_ops._fused_ops)
    yield
    fused_ops._fused_ops.clear()
    fused_ops._fused_ops.update(before)


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    group = components.OPERATORS.group
    entries = EntryPoints(EntryPoint(name, f"{__name__}:{name}", group) for name in names)
    monkeypatch.setattr(providers, "entry_points", lambda group: entries.select(group=group))


def test_operators_that_layers_use_are_loaded(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "Kernels")
    fused_ops.choose_fused_ops(True)
    assert fused_ops.names_in_use() == ["experts", "rms_norm"]
    experts = fused_ops.fused_op(operators.experts)
    assert experts is not None and experts(1, 2) == ("experts", (1, 2))
    assert fused_ops.fused_op(operators.add_rms_norm) is None


def test_operators_are_not_loaded_if_the_option_is_false(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "Kernels")
    fused_ops.choose_fused_ops(True)
    fused_ops.choose_fused_ops(False)
    assert fused_ops.names_in_use() == [] and fused_ops.fused_op(operators.experts) is None


def test_without_a_provider_there_are_none(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch)
    fused_ops.choose_fused_ops(True)
    assert fused_ops.names_in_use() == []


def test_a_provider_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "OldKernels")
    with pytest.raises(ComponentError, match="written for component API"):
        fused_ops.choose_fused_ops(True)


def test_layers_ask_for_each_fused_operator_and_for_no_other():
    asked = {
        name
        for source in Path(fused_ops.__file__).parents[1].rglob("*.py")
        for name in _names_asked_for(ast.parse(source.read_text(encoding="utf-8")))
    }
    assert sorted(asked) == sorted(operators.__all__)


def _names_asked_for(module: ast.Module) -> list[str]:
    """Returns definitions passed to `fused_op`, and values of names `fused_ops`."""
    holders: list[ast.AST] = []
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "fused_op":
            holders += node.args
        elif isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(getattr(target, "id", None) == "fused_ops" for target in targets):
                holders.append(node.value)
    return [
        node.attr
        for holder in holders
        for node in ast.walk(holder)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "operators"
    ]
