"""Sleep mode: our backend replaces CUDA's."""

from vllm_davinci.core.config.registered_names import SLEEP_BACKEND, VLLMS_SLEEP_BACKEND
from vllm_davinci.core.features.feature import Engine, Feature, model_has, refused


def _is_asked(engine: Engine) -> bool:
    return bool(getattr(engine.model, "enable_sleep_mode", False))


def _settle(engine: Engine) -> None:
    if engine.model.sleep_mode_backend == VLLMS_SLEEP_BACKEND:
        engine.model.sleep_mode_backend = SLEEP_BACKEND


FEATURES = (
    Feature(
        "--enable-sleep-mode",
        "sleep mode",
        _is_asked,
        excludes={"--kv-transfer-config": "", "--kv-offloading-size": ""},
        settle=_settle,
    ),
    refused(
        "--sleep-mode-offload-cudagraph",
        "graphs in host memory during sleep",
        lambda e: _is_asked(e) and e.model.sleep_mode_offload_cudagraph,
    ),
    refused(
        "--enable-nccl-comm-suspend",
        "collectives that sleep",
        lambda e: _is_asked(e) and model_has("enable_nccl_comm_suspend")(e),
    ),
)
