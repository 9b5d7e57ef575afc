"""The table of stand-ins for the Triton kernels of vLLM's V2 runner."""

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from vllm_davinci.core.triton_kernels import (
    drafting,
    inputs,
    layers,
    logprobs,
    multi_module,
    penalties,
    sampling,
    states,
    thinking_budget,
    verification,
)

RUNNER = "vllm.v1.worker.gpu"
BATCH = f"{RUNNER}.input_batch"
SAMPLE = f"{RUNNER}.sample"
DRAFTS = f"{RUNNER}.spec_decode"
DEPENDENT = f"{DRAFTS}.target_dependent_ar.speculator"
MODULES = f"{DRAFTS}.multi_module_mtp.speculator"
VERIFIED = f"{DRAFTS}.rejection_sampler_utils"
BUDGET = f"{SAMPLE}.thinking_budget"
HYBRID = f"{RUNNER}.model_states.mamba_hybrid"
MINIMAX = "vllm.model_executor.layers.minimax_rms_norm.rms_norm_tp"

STAND_INS: dict[str, Callable[..., Any]] = {
    f"{BATCH}._prepare_prefill_inputs_kernel": inputs.prepare_prefill_inputs,
    f"{BATCH}._prepare_pos_seq_lens_kernel": inputs.prepare_pos_seq_lens,
    f"{BATCH}._combine_sampled_and_draft_tokens_kernel": inputs.combine_sampled_and_draft_tokens,
    f"{BATCH}._get_num_sampled_and_rejected_kernel": inputs.get_num_sampled_and_rejected,
    f"{BATCH}._post_update_kernel": inputs.post_update,
    f"{BATCH}._post_update_num_computed_tokens_kernel": inputs.post_update_num_computed_tokens,
    f"{BATCH}._expand_idx_mapping_kernel": inputs.expand_idx_mapping,
    f"{RUNNER}.cp_utils._dcp_local_seq_lens_kernel": inputs.dcp_local_seq_lens,
    f"{SAMPLE}.gumbel._temperature_kernel": sampling.temperature,
    f"{SAMPLE}.gumbel._gumbel_sample_kernel": sampling.gumbel_sample,
    f"{SAMPLE}.min_p._min_p_kernel": sampling.min_p,
    f"{SAMPLE}.trace_replay._trace_replay_kernel": sampling.trace_replay,
    f"{SAMPLE}.output._compact_sampling_mask_kernel": sampling.compact_sampling_mask,
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
    f"{DEPENDENT}._prepare_prefill_inputs_kernel": drafting.prepare_prefill_inputs,
    f"{DEPENDENT}._prepare_decode_inputs_kernel": drafting.prepare_decode_inputs,
    f"{DEPENDENT}._update_draft_inputs_kernel": drafting.update_draft_inputs,
    f"{DRAFTS}.standalone_ar.speculator._prepare_prefill_inputs_kernel": drafting.with_new_tokens,
    f"{MODULES}._prepare_input_buffers_kernel": multi_module.prepare_input_buffers,
    f"{MODULES}._prepare_input_hidden_states_and_embeddings_kernel": (
        multi_module.prepare_input_hidden_states_and_embeddings
    ),
    f"{MODULES}._pad_trailing_draft_slots_kernel": multi_module.pad_trailing_draft_slots,
    f"{MODULES}._cache_inputs_kernel": multi_module.cache_inputs,
    f"{MODULES}._shift_input_ids_kernel": multi_module.shift_input_ids,
    f"{DRAFTS}.dflash.speculator._prepare_dflash_inputs_kernel": drafting.prepare_block_inputs,
    f"{DRAFTS}.ngram.speculator._ngram_scan_kernel": drafting.ngram_scan,
    f"{DRAFTS}.ngram.speculator._ngram_finalize_kernel": drafting.ngram_finalize,
    f"{DRAFTS}.rejection_sampler._gather_draft_sampled_kernel": verification.gather_draft_sampled,
    f"{DRAFTS}.rejection_sampler._flatten_sampled_kernel": verification.flatten_sampled,
    f"{VERIFIED}._compute_local_logits_stats_kernel": verification.local_logits_stats,
    f"{VERIFIED}._rejection_kernel": verification.reject,
    f"{VERIFIED}._resample_kernel": verification.resample,
    f"{VERIFIED}._insert_resampled_kernel": verification.insert_resampled,
    f"{RUNNER}.metrics.logits._num_nans_kernel": logprobs.num_nans,
    f"{BUDGET}._update_committed_marker_cache_kernel": (
        thinking_budget.update_committed_marker_cache
    ),
    f"{BUDGET}._thinking_budget_kernel": thinking_budget.thinking_budget,
    f"{HYBRID}._scatter_num_accepted_kernel": states.scatter_num_accepted,
    f"{HYBRID}._fill_num_accepted_kernel": states.fill_num_accepted,
}


# Kernels of models' own files, which only processes with such a model import.
OF_MODELS: dict[str, Callable[..., Any]] = {
    "vllm.model_executor.models.qwen3_vl._bilinear_pos_embed_kernel": layers.bilinear_pos_embed,
    f"{MINIMAX}._minimax_qk_var_kernel": layers.minimax_qk_var,
    f"{MINIMAX}._minimax_rms_apply_kernel": layers.minimax_rms_apply,
}


@cache
def register() -> None:
    """Gives the table to vLLM, once per process; vLLM calls it instead of launching kernels."""
    _register(STAND_INS)


def register_for_models() -> None:
    """Gives vLLM the stand-ins of kernels in files that have been imported by now, once each."""
    from vllm.triton_utils.dispatcher import KernelOverride

    def is_launched(name: str) -> bool:
        module, _, kernel = name.rpartition(".")
        found = getattr(sys.modules.get(module), kernel, None)
        return found is not None and not isinstance(found, KernelOverride)

    _register({name: each for name, each in OF_MODELS.items() if is_launched(name)})


def _register(stand_ins: Mapping[str, Callable[..., Any]]) -> None:
    if not stand_ins:
        return
    from vllm.triton_utils.dispatcher import register_kernels  # imports modules of the runner

    with warnings.catch_warnings():  # the function scans all modules, deprecated names included
        warnings.simplefilter("ignore", FutureWarning)
        register_kernels(stand_ins)
