"""Fused operators: one call for a whole stage, if an installed package provides it.

A layer asks for `fused_op(definition)` and calls the result with keywords; if it is None, the layer
composes torch_npu's operators. Both launch the same work in the same order, so results are
bit-identical. The loader does the same for its work on the host (`block_fp8_*`).
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from vllm_davinci import operators
from vllm_davinci.core import components
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# Not an operator but a class: the attention launches of a captured graph, and their updates.
ATTENTION_GROUPS = "attention_groups"
FUSED_OPS = (*operators.__all__, ATTENTION_GROUPS)

# Name -> function. Empty until a worker has its device, and in processes without one.
_fused_ops: dict[str, Callable[..., Any]] = {}


def fused_op(definition: Callable[P, R]) -> Callable[P, R] | None:
    """The operator of the definition's name, or None if torch_npu's operators are to be composed.

    definition: a function of `vllm_davinci.operators`, which documents arguments and results
    """
    return _fused_ops.get(definition.__name__)


def attention_groups() -> Callable[[], Any] | None:
    """The class, if an installed package provides it."""
    return _fused_ops.get(ATTENTION_GROUPS)


def choose_fused_ops(is_enabled: bool) -> None:
    """Enables the installed providers' operators for this process, or none.

    Call it after the process has its device: only then can a provider tell what the device
    supports. Raises ComponentError for a provider that does not fit.
    """
    _fused_ops.clear()
    providers = components.find(components.OPERATORS)
    if providers and not is_enabled:
        logger.info_once(
            "enable_compiled_operators is false: stages are composed of torch_npu's operators."
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
