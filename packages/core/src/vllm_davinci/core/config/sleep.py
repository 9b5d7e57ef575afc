"""Settings of sleep mode that this release cannot serve, and the backend that serves the others."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VLLMS_BACKEND, SLEEP_BACKEND = "cumem", "davinci"


def refused_with_sleep(vllm_config: "VllmConfig") -> dict[str, bool]:
    """Lists what cannot be had together with --enable-sleep-mode: name -> whether it is asked for.

    Sets the backend in place of vLLM's default, which is CUDA's.
    """
    model = vllm_config.model_config
    if model is None or not model.enable_sleep_mode:
        return {}
    if model.sleep_mode_backend == VLLMS_BACKEND:
        model.sleep_mode_backend = SLEEP_BACKEND
    return {
        "graphs in the host's memory during sleep (--sleep-mode-offload-cudagraph)": (
            model.sleep_mode_offload_cudagraph
        ),
        "sleep of an engine whose KV cache goes on elsewhere (--enable-sleep-mode with "
        "--kv-transfer-config or --kv-offloading-size)": (
            vllm_config.kv_transfer_config is not None
            or vllm_config.cache_config.kv_offloading_size is not None
        ),
        "collectives that sleep (--enable-nccl-comm-suspend)": model.enable_nccl_comm_suspend,
    }
