"""Between core and kernels there is no operator that only one of them knows."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from vllm_davinci.core.components.compiled_operators import FUSED_OPS
from vllm_davinci.kernels import ATTENTION_GROUPS, HOST_OPERATORS, reference
from vllm_davinci.kernels._C import operator_names

CI = Path(__file__).parents[2] / "ci"


def test_every_compiled_operator_is_one_that_core_uses() -> None:
    assert sorted([*operator_names(), ATTENTION_GROUPS, *HOST_OPERATORS]) == sorted(FUSED_OPS)


def test_typed_calls_are_those_of_the_definitions() -> None:
    sys.path.insert(0, str(CI))
    try:
        generated = import_module("operator_calls")
    finally:
        sys.path.remove(str(CI))
    names = [*operator_names(), *HOST_OPERATORS]
    files = {
        generated.CALLS: generated.calls_file(reference, names),
        generated.PROTOCOLS: generated.protocols_file(reference, names, [ATTENTION_GROUPS]),
    }
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale: run `nox -s docs`"
