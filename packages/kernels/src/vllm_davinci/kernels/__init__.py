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

from vllm_davinci.kernels._C import find_symbol, launches, operator_names

# Version of core's protocol for operator providers that this package fills.
api_version = 1


@cache
def supported_ops() -> frozenset[str]:
    """Names of the operators whose launches the CANN libraries of this process all have.

    Initializes the device: only then are CANN's operator libraries loaded.
    """
    torch_npu.npu.init()
    return frozenset(
        name for name in operator_names() if all(_exists(launch) for launch in launches(name))
    )


def _exists(launch: str) -> bool:
    try:
        return bool(find_symbol(f"aclnn{launch}"))
    except NotImplementedError:
        return False


def load(name: str) -> Any:
    """The function of one operator.

    Raises KeyError with the names there are when `name` is none of them.
    """
    if name not in supported_ops():
        raise KeyError(
            f"vllm-davinci-kernels has no operator {name!r} on this device. It has: "
            f"{', '.join(sorted(supported_ops()))}."
        )
    return getattr(torch.ops.vllm_davinci, name).default


__all__ = ["api_version", "load", "supported_ops"]
