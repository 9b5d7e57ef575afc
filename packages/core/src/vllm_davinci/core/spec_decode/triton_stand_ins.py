"""The table of stand-ins for vLLM's Triton kernels of speculative decoding."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from vllm_davinci.core.spec_decode import rejection

SAMPLER = "vllm.v1.sample.rejection_sampler"

STAND_INS: dict[str, Callable[..., Any]] = {
    f"{SAMPLER}.rejection_greedy_sample_kernel": rejection.keep_greedy,
    f"{SAMPLER}.rejection_random_sample_kernel": rejection.keep_random,
    f"{SAMPLER}.expand_kernel": rejection.expand,
    f"{SAMPLER}.sample_recovered_tokens_kernel": rejection.recover,
}


@cache
def register() -> None:
    """Gives the table to vLLM, once in a process; it calls them where it would launch kernels."""
    from vllm.triton_utils.dispatcher import register_kernels  # imports modules of the runner

    with warnings.catch_warnings():  # it looks through all modules, at deprecated names too
        warnings.simplefilter("ignore", FutureWarning)
        register_kernels(STAND_INS)
