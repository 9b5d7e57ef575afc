"""Definitions, compiled operators and core's layers know the same operators."""

from vllm_davinci import operators
from vllm_davinci.core.components.fused_ops import ATTENTION_GROUPS
from vllm_davinci.kernels import ATTENTION_GROUPS as COMPILED_GROUPS
from vllm_davinci.kernels import HOST_OPERATORS
from vllm_davinci.kernels._C import operator_names


def test_every_compiled_operator_has_a_definition_and_the_reverse() -> None:
    assert sorted([*operator_names(), *HOST_OPERATORS]) == sorted(operators.__all__)
    assert ATTENTION_GROUPS == COMPILED_GROUPS
