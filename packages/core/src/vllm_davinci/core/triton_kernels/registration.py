"""The table of stand-ins for the Triton kernels of vLLM's V2 runner."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from vllm_davinci.core.triton_kernels import inputs, logprobs, penalties, sampling

RUNNER = "vllm.v1.worker.gpu"
BATCH = f"{RUNNER}.input_batch"
SAMPLE = f"{RUNNER}.sample"

STAND_INS: dict[str, Callable[..., Any]] = {
    f"{BATCH}._prepare_prefill_inputs_kernel": inputs.prepare_prefill_inputs,
    f"{BATCH}._prepare_pos_seq_lens_kernel": inputs.prepare_pos_seq_lens,
    f"{BATCH}._combine_sampled_and_draft_tokens_kernel": inputs.combine_sampled_and_draft_tokens,
    f"{BATCH}._get_num_sampled_and_rejected_kernel": inputs.get_num_sampled_and_rejected,
    f"{BATCH}._post_update_kernel": inputs.post_update,
    f"{BATCH}._post_update_num_computed_tokens_kernel": inputs.post_update_num_computed_tokens,
    f"{BATCH}._expand_idx_mapping_kernel": inputs.expand_idx_mapping,
    f"{SAMPLE}.gumbel._temperature_kernel": sampling.temperature,
    f"{SAMPLE}.gumbel._gumbel_sample_kernel": sampling.gumbel_sample,
    f"{SAMPLE}.min_p._min_p_kernel": sampling.min_p,
    f"{SAMPLE}.penalties._bincount_kernel": penalties.bincount,
    f"{SAMPLE}.penalties._penalties_kernel": penalties.penalties,
    f"{SAMPLE}.bad_words._bad_words_kernel": penalties.bad_words,
    f"{SAMPLE}.logit_bias._bias_kernel": penalties.bias,
    f"{RUNNER}.structured_outputs._apply_grammar_bitmask_kernel": penalties.apply_grammar_bitmask,
    f"{SAMPLE}.logprob._topk_log_softmax_kernel": logprobs.topk_log_softmax,
    f"{SAMPLE}.logprob._ranks_kernel": logprobs.ranks,
    f"{SAMPLE}.logprob._fill_logprob_token_ids_kernel": logprobs.fill_logprob_token_ids,
    f"{SAMPLE}.prompt_logprob._prompt_logprobs_token_ids_kernel": (
        logprobs.prompt_logprobs_token_ids
    ),
}


@cache
def register() -> None:
    """Gives the table to vLLM, once in a process; it calls them where it would launch kernels."""
    from vllm.triton_utils.dispatcher import register_kernels  # imports modules of the runner

    with warnings.catch_warnings():  # it looks through all modules, at deprecated names too
        warnings.simplefilter("ignore", FutureWarning)
        register_kernels(STAND_INS)
