"""Operators that launch a whole stage of a layer in one call: `torch.ops.vllm_davinci.*`.

Importing this package registers them. README.md lists them; `vllm_davinci.operators` defines each
in plain torch.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# Before the operators, which are linked to its library.
import torch_npu


def built_for(torch_release: str) -> str:
    """Error message for a module built for another torch release."""
    return (
        f"vllm-davinci-kernels was built for {torch_release}, and torch {torch.__version__} is "
        "installed. In a checkout, run: pip install --no-build-isolation --no-cache-dir "
        "--force-reinstall --no-deps ./packages/kernels"
    )


try:
    from vllm_davinci.kernels._C import find_symbol, launches, operator_names, torch_version
except ImportError as error:
    raise ImportError(f"{error}. {built_for('another torch, it seems')}") from error
if torch_version != torch.__version__.split("+")[0]:
    raise ImportError(built_for(f"torch {torch_version}"))

# A class, not an operator: the attention launches of a captured graph, and their updates.
ATTENTION_GROUPS = "attention_groups"

# Operators for loading checkpoints: they work in host memory and launch nothing.
HOST_OPERATORS = ("block_fp8_floats", "block_fp8_integers")

# Version of core's operator provider protocol that this package implements.
api_version = 1


@cache
def supported_ops() -> frozenset[str]:
    """Names of the operators that this process's CANN libraries support completely.

    Initializes the device, which loads CANN's operator libraries.
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
    """The function of one operator; for `attention_groups`, the class.

    Raises KeyError with the known names if `name` is unknown.
    """
    if name not in supported_ops():
        raise KeyError(
            f"vllm-davinci-kernels has no operator {name!r} on this device. It has: "
            f"{', '.join(sorted(supported_ops()))}."
        )
    if name == ATTENTION_GROUPS:
        return torch.classes.vllm_davinci.AttentionGroups
    return _function_of(getattr(torch.ops.vllm_davinci, name).default)


def _function_of(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """A function with the parameters of the operator's schema, for calls by keyword.

    It passes arguments by position, because torch looks up each keyword in the schema, and calls
    what `OpOverload.__call__` calls, which saves as much as the function costs.
    """
    arguments = operator._schema.arguments
    names = ", ".join(each.name for each in arguments)
    parameters = ", ".join(
        f"{each.name}={each.default_value!r}" if each.has_default_value() else each.name
        for each in arguments
    )
    made: Callable[..., Any] = eval(f"lambda {parameters}: call({names})", {"call": operator._op})
    return made


__all__ = ["api_version", "load", "supported_ops"]
