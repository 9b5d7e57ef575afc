"""vLLM's V2 sampler, without launches that change nothing."""

from typing import Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_davinci.core.runner.buffers import take_over_tables
from vllm_davinci.core.triton_kernels.verification import keep_greedy


class NPUSampler(Sampler):
    """Samples the same tokens as vLLM's sampler. For plain greedy requests only takes the
    argmax."""

    _counts: torch.Tensor  # [2, most requests] int32: ones, and zeros

    @classmethod
    def taking_over(cls, sampler: Sampler) -> "NPUSampler":
        """Converts the object to this class, with tables that are copied only if changed."""
        sampler.__class__ = cls
        assert isinstance(sampler, cls)
        take_over_tables(sampler)
        states = sampler.req_states
        ones = torch.ones((1, states.max_num_reqs), dtype=torch.int32, device=states.device)
        sampler._counts = torch.cat([ones, torch.zeros_like(ones)])
        return sampler

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        slots = input_batch.idx_mapping_np
        if logits.shape[0] != len(slots) or not self._takes_greatest(slots):
            return super().__call__(logits, input_batch)
        num_sampled, num_rejected = self._counts[:, : len(slots)].unbind()
        counts = counts_of_plain_step(input_batch)
        if not counts.all():
            num_sampled = counts.pin_memory().to(logits.device, non_blocking=True)
        return SamplerOutput(
            sampled_token_ids=logits.argmax(dim=-1, keepdim=True),
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _takes_greatest(self, slots: np.ndarray) -> bool:
        """True if every request's token is its greatest logit, and nothing else is requested."""
        return not (
            self.needs_logits_processing[slots].any()
            or self.sampling_states.temperature.np[slots].any()
            or self.compute_nans
            or self.return_sampling_mask
            or self.trace_replay_state is not None
            or self.get_logprobs_dims(slots) is not None
        )

    def apply_sampling_params(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        *args: Any,
        skip_top_k_top_p: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """vLLM's method, with top-k and top-p by torch operators. Returns [rows, vocabulary]."""
        slots = expanded_idx_mapping, idx_mapping, idx_mapping_np
        processed: torch.Tensor = super().apply_sampling_params(
            logits, *slots, *args, skip_top_k_top_p=True, **kwargs
        )
        if skip_top_k_top_p:
            return processed
        top_k, top_p, _ = self.sampling_states.get_top_k_top_p(
            expanded_idx_mapping, idx_mapping_np, processed.shape[-1]
        )
        if top_k is None and top_p is None:
            return processed
        limited: torch.Tensor = apply_top_k_top_p_pytorch(processed, top_k, top_p)
        return limited

    def _sample_random(
        self,
        processed_logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        has_topp_only_rows: bool,
        use_fused_sampler: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sampled tokens [rows] int64, and the logits from which they were drawn."""
        if not self.sampling_states.temperature.np[idx_mapping_np].any():
            return processed_logits.argmax(dim=-1), processed_logits
        if top_k is not None or top_p is not None:
            processed_logits = apply_top_k_top_p_pytorch(processed_logits, top_k, top_p)
        sampled = gumbel_sample(
            processed_logits,
            expanded_idx_mapping,
            self.sampling_states.temperature.gpu,
            self.sampling_states.seeds.gpu,
            pos,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.use_fp64_gumbel,
        )
        return sampled, processed_logits


def counts_of_plain_step(batch: InputBatch) -> torch.Tensor:
    """Tokens that each request gets in a step without drafts, [num_reqs] int32 on the host: one,
    unless it is still in its prompt."""
    lengths = batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs]
    return torch.from_numpy((lengths >= batch.prefill_len_np).astype(np.int32))


class NPURejectionSampler(RejectionSampler):
    """vLLM's verification of drafts, in few launches if all requests sample greedily.

    A greedy request's token is the greatest logit, and a draft is accepted if it is that token.
    """

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns logits after all options, tokens [num_reqs, drafts + 1] int64, and each request's
        number of tokens, [num_reqs] int32."""
        slots = expanded_idx_mapping, idx_mapping, idx_mapping_np
        rows = expanded_local_pos, seq_lens_upper_bound_np
        temperatures = self.sampler.sampling_states.temperature.np
        if temperatures[idx_mapping_np].any() or self.synthetic_conditional_rates is not None:
            verified: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = super()._verify(
                logits,
                draft_logits,
                draft_sampled,
                pos,
                cu_num_logits,
                idx_mapping,
                idx_mapping_np,
                expanded_idx_mapping,
                *rows,
                verify_draft_sampled,
            )
            return verified
        processed = self.sampler.apply_sampling_params(logits, *slots, pos, draft_sampled, *rows)
        most = self.num_speculative_steps
        return processed, *keep_greedy(processed, verify_draft_sampled, cu_num_logits, most)
