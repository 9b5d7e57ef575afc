"""Options that exclude balanced experts."""

from typing import TYPE_CHECKING

from vllm_davinci.core.config.options import DYNAMIC
from vllm_davinci.core.config.parsing import get_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = f"additional_config key {DYNAMIC!r}"


def refused_with_balance(vllm_config: "VllmConfig") -> dict[str, bool]:
    """Lists what cannot be had together with balanced experts: name -> whether it is asked for."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    config = get_config(vllm_config)
    if not config.eplb_config.dynamic_eplb:
        return {f"--enable-eplb of vLLM; {KEY} is": parallel.enable_eplb}
    return {
        f"{KEY} with {what}": is_asked
        for what, is_asked in {
            "drafts (--speculative-config)": vllm_config.speculative_config is not None,
            "adapters (--enable-lora)": vllm_config.lora_config is not None,
            "pipeline stages (--pipeline-parallel-size)": parallel.pipeline_parallel_size > 1,
            "sleep (--enable-sleep-mode)": model is not None and model.enable_sleep_mode,
            "'enable_weight_nz_layout'": config.enable_weight_nz_layout,
        }.items()
    }
