"""Between core and kernels there is no operator that only one of them knows."""

from __future__ import annotations

from vllm_davinci.core.components.fused_ops import FUSED_OPS
from vllm_davinci.kernels import ATTENTION_GROUPS, HOST_OPERATORS
from vllm_davinci.kernels._C import operator_names


def test_every_compiled_operator_is_one_that_core_uses() -> None:
    assert sorted([*operator_names(), ATTENTION_GROUPS, *HOST_OPERATORS]) == sorted(FUSED_OPS)
