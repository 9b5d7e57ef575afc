"""Operators that launch a whole stage of a layer in one call: `torch.ops.vllm_davinci.*`.

Importing this package registers them. README.md lists them with their shapes; `reference` defines
each in plain torch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# Before the operators: its library is one that theirs is linked to.
import torch_npu

from vllm_davinci.kernels import calls
from vllm_davinci.kernels._C import find_symbol, launches, operator_names

# A class and no operator: the attention launches of a captured graph, and their updates.
ATTENTION_GROUPS = "attention_groups"

# These work on tensors in host memory, while a checkpoint is loaded, and launch nothing.
HOST_OPERATORS = ("block_fp8_floats", "block_fp8_integers")

# Version of core's protocol for operator providers that this package fills.
api_version = 1


@cache
def supported_ops() -> frozenset[str]:
    """Names of the operators whose launches the CANN libraries of this process all have.

    Initializes the device: only then are CANN's operator libraries loaded.
    """
    torch_npu.npu.init()
    names = {*operator_names(), ATTENTION_GROUPS, *HOST_OPERATORS}
    return frozenset(name for name in names if all(_exists(launch) for launch in _launches(name)))


def _launches(name: str) -> list[str]:
    if name in HOST_OPERATORS:
        return []
    return ["FusedInferAttentionScoreV3"] if name == ATTENTION_GROUPS else launches(name)


def _exists(launch: str) -> bool:
    try:
        return bool(find_symbol(f"aclnn{launch}"))
    except NotImplementedError:
        return False


def load(name: str) -> Any:
    """The typed function of one operator, from `calls`; for `attention_groups`, the class.

    Raises KeyError with the names there are when `name` is none of them.
    """
    if name not in supported_ops():
        raise KeyError(
            f"vllm-davinci-kernels has no operator {name!r} on this device. It has: "
            f"{', '.join(sorted(supported_ops()))}."
        )
    if name == ATTENTION_GROUPS:
        return torch.classes.vllm_davinci.AttentionGroups
    return getattr(calls, name)


__all__ = ["api_version", "load", "supported_ops"]
