"""Fused operators: one call for a whole stage, where an installed package has it.

A layer asks `fused_op(definition)`, calls the answer by keyword, and composes torch_npu's operators
when it is None. Both launch the same work in the same order, so results are equal bit for bit. So
does the loader for its work on the host (`block_fp8_*`).
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from vllm_davinci import operators
from vllm_davinci.core import components
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# A class and no operator: the attention launches of a captured graph, and their updates.
ATTENTION_GROUPS = "attention_groups"
FUSED_OPS = (*operators.__all__, ATTENTION_GROUPS)

# Name -> function. Empty until a worker has its device, and in processes without one.
_fused_ops: dict[str, Callable[..., Any]] = {}


def fused_op(definition: Callable[P, R]) -> Callable[P, R] | None:
    """The operator of the definition's name, or None when torch_npu's are to be composed.

    definition: a function of `vllm_davinci.operators`, which says what it takes and returns
    """
    return _fused_ops.get(definition.__name__)


def attention_groups() -> Callable[[], Any] | None:
    """The class, where an installed package has it."""
    return _fused_ops.get(ATTENTION_GROUPS)


def choose_fused_ops(is_enabled: bool) -> None:
    """Takes the operators of the installed providers for this process, or none.

    Called when the process has its device: only then a provider can tell what the device has.
    Raises ComponentError for a provider that does not fit.
    """
    _fused_ops.clear()
    providers = components.find(components.OPERATORS)
    if providers and not is_enabled:
        logger.info_once(
            "enable_compiled_operators is false: torch_npu's own operators are composed."
        )
        return
    for name, provider in providers.items():
        supported = provider.supported_ops()
        taken = [used for used in FUSED_OPS if used in supported and used not in _fused_ops]
        _fused_ops.update({used: provider.load(used) for used in taken})
        logger.info_once("Compiled operators of %r: %s", name, ", ".join(taken) or "none")


def names_in_use() -> list[str]:
    """Names of the operators that layers of this process call, sorted."""
    return sorted(_fused_ops)
