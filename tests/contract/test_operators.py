"""Between core and kernels there is no operator that only one of them knows."""

from __future__ import annotations

import ast
from pathlib import Path

from vllm_davinci import core
from vllm_davinci.core.components.fused_ops import FUSED_OPS
from vllm_davinci.kernels._C import operator_names


def test_every_compiled_operator_is_one_that_layers_use() -> None:
    assert sorted(operator_names()) == sorted(FUSED_OPS)


def test_layers_ask_for_each_fused_operator_and_for_no_other() -> None:
    asked = {
        name
        for path in Path(core.__path__[0]).rglob("*.py")
        for name in _names_asked_for(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert sorted(asked) == sorted(FUSED_OPS)


def _names_asked_for(module: ast.Module) -> list[str]:
    """Strings in calls of `fused_op`, and in values given to a name `fused_ops`."""
    holders: list[ast.AST] = []
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "fused_op":
            holders += node.args
        elif isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(getattr(target, "id", None) == "fused_ops" for target in targets):
                holders.append(node.value)
    return [
        constant.value
        for holder in holders
        for constant in ast.walk(holder)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    ]
