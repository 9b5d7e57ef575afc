"""Methods and options of speculative decoding, and which of them this release serves."""

from typing import TYPE_CHECKING

from vllm_davinci.core.errors import RELEASE, ConfigurationError

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

SERVED = ("ngram", "custom_class")


def check_speculation(vllm_config: "VllmConfig") -> None:
    """Raises ConfigurationError for a method or an option that this release does not serve."""
    asked = vllm_config.speculative_config
    if asked is None:
        return
    if asked.method not in SERVED:
        raise ConfigurationError(
            f"not available in {RELEASE}: speculative decoding of method {asked.method!r} "
            f"(--speculative-config). Use one of {', '.join(SERVED)}, or start without it."
        )
    if reasons := [why for why, is_asked in _refused(asked, vllm_config).items() if is_asked]:
        raise ConfigurationError(
            f"not available in {RELEASE}: {'; '.join(reasons)}. Leave that out of "
            "--speculative-config."
        )


def _refused(asked: "SpeculativeConfig", vllm_config: "VllmConfig") -> dict[str, bool]:
    """By reason, whether it holds for what is asked."""
    return {
        f"rejection_sample_method {asked.rejection_sample_method!r} (the runner knows "
        '"standard" and "synthetic")': asked.rejection_sample_method
        not in ("standard", "synthetic"),
        "speculative decoding over pipeline stages (--pipeline-parallel-size "
        f"{vllm_config.parallel_config.pipeline_parallel_size})": (
            vllm_config.parallel_config.pipeline_parallel_size > 1
        ),
    }
