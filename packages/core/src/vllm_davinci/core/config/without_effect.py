"""Options that do nothing, or nothing more than happens anyway, on this engine."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.errors import RELEASE, ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# torch_npu's own variable for binding threads to cores.
CPU_AFFINITY = "CPU_AFFINITY_CONF"


def check_effects(
    vllm_config: "VllmConfig", config: DavinciConfig, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Notes about such options.

    Raises ConfigurationError for a size of the LM head's group that this release does not have.
    """
    graph = config.torchair_graph_config
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    if config.lmhead_tp_size not in (-1, tp_size):
        raise ConfigurationError(
            f"not available in {RELEASE}: additional_config key 'lmhead_tp_size' = "
            f"{config.lmhead_tp_size}; the LM head is divided as the other layers are, among "
            f"{tp_size} ranks (--tensor-parallel-size). Use -1 or {tp_size}."
        )
    notes = {
        "torchair_graph_config.enable_super_kernel": (
            graph.enable_super_kernel,
            "the host launches a captured step as a whole",
        ),
        "torchair_graph_config.enable_view_optimize": (
            "enable_view_optimize" in graph.model_fields_set,
            "nothing is compiled",
        ),
        "enable_prefill_optimizations": (
            config.enable_prefill_optimizations,
            "DeepSeek's prefill operators are always used",
        ),
        "enable_cpu_binding": (
            config.enable_cpu_binding and environ.get(CPU_AFFINITY, "0") not in ("", "0"),
            f"{CPU_AFFINITY}={environ.get(CPU_AFFINITY)} lets torch_npu bind threads",
        ),
    }
    return [
        f"additional_config key {key!r} has no effect: {why}"
        for key, (holds, why) in notes.items()
        if holds
    ]
