"""Selects vLLM's V2 model runner, the only one that serves here."""

from collections.abc import MutableMapping

from vllm_davinci.core.features.feature import refused

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def choose_model_runner(environment: MutableMapping[str, str]) -> None:
    """Selects V2 unless the user has chosen a runner.

    vLLM itself would select V1 for some features that are served here on V2. Call it before vLLM's
    configuration reads the variable; child processes inherit the choice.
    """
    environment.setdefault(MODEL_RUNNER, "1")


def has_triton() -> bool:
    """True if vLLM finds a usable Triton."""
    from vllm.triton_utils import HAS_TRITON  # asks the platform, which imports this module

    return bool(HAS_TRITON)


FEATURES = (
    refused(
        f"{MODEL_RUNNER}=0",
        "vLLM's V1 model runner",
        lambda e: not e.vllm.use_v2_model_runner,
        because="vLLM calls it deprecated",
        instead=f"Unset {MODEL_RUNNER}.",
    ),
    refused(
        "vLLM without a usable Triton",
        "its V2 model runner needs one",
        lambda e: not has_triton(),
        instead="`vllm-davinci doctor` says why Triton is not usable.",
    ),
    refused(
        "--watermark-config",
        "watermarks in texts",
        lambda e: e.vllm.watermark_config is not None,
        because="vLLM's kernels for it have no counterpart on NPUs",
    ),
    refused(
        "hisparse_config of --attention-config",
        "HiSparse",
        lambda e: e.vllm.attention_config.hisparse_config is not None,
        because="vLLM's kernels for it have no counterpart on NPUs",
    ),
)
