"""The table of stand-ins for vLLM's Triton kernels of speculative decoding."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from vllm_davinci.core.spec_decode import drafting, rejection

SAMPLER = "vllm.v1.sample.rejection_sampler"
DRAFTING = "vllm.v1.spec_decode.utils"

STAND_INS: dict[str, Callable[..., Any]] = {
    f"{SAMPLER}.rejection_greedy_sample_kernel": rejection.keep_greedy,
    f"{SAMPLER}.rejection_random_sample_kernel": rejection.keep_random,
    f"{SAMPLER}.expand_kernel": rejection.expand,
    f"{SAMPLER}.sample_recovered_tokens_kernel": rejection.recover,
    f"{DRAFTING}.eagle_prepare_next_token_padded_kernel": drafting.next_tokens,
    f"{DRAFTING}.eagle_prepare_inputs_padded_kernel": drafting.places_to_sample,
    f"{DRAFTING}.eagle_step_slot_mapping_metadata_kernel": drafting.next_positions,
    f"{DRAFTING}.copy_and_expand_eagle_inputs_kernel": drafting.with_new_tokens,
}


@cache
def register() -> None:
    """Gives the table to vLLM, once per process; vLLM calls it instead of launching kernels."""
    from vllm.triton_utils.dispatcher import register_kernels  # imports modules of the runner

    with warnings.catch_warnings():  # it scans all modules, deprecated names included
        warnings.simplefilter("ignore", FutureWarning)
        register_kernels(STAND_INS)
