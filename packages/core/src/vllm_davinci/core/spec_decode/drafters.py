"""Selects the drafter that vLLM's runner makes."""

from copy import copy

from vllm.config import VllmConfig

NGRAM = "vllm_davinci.core.spec_decode.ngram.NgramProposer"


def with_own_drafter(vllm_config: VllmConfig) -> VllmConfig:
    """The configuration for the runner only, in which our class looks up n-grams."""
    asked = vllm_config.speculative_config
    if asked is None or asked.method != "ngram":
        return vllm_config
    told, speculative = copy(vllm_config), copy(asked)
    speculative.method, speculative.model = "custom_class", NGRAM
    told.speculative_config = speculative
    return told
