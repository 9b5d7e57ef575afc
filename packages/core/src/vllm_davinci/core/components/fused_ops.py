"""Fused operators: one call for a whole stage, where an installed package has it.

A layer asks `fused_op(name)`, calls the answer by keyword, and composes torch_npu's operators when
it is None. Both ways launch the same work in the same order, so results are equal bit for bit. So
does the loader for its work on the host (`block_fp8_*`). `compiled_operators` has the types.
"""

from collections.abc import Callable
from typing import Any

from vllm_davinci.core import components
from vllm_davinci.core.components.compiled_operators import FUSED_OPS, CompiledOperators
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

# Name -> function. Empty until a worker has its device, and in processes without one.
_fused_ops: dict[str, Callable[..., Any]] = {}


def _fused_op(name: str) -> Any:
    """The fused operator of that name, or None when torch_npu's are to be composed."""
    return _fused_ops.get(name)


fused_op: CompiledOperators = _fused_op


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
