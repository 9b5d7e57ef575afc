"""Log-probabilities of prompts on the V2 runner, each under the adapter of its request."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

from vllm_davinci.core.lora.adapter_manager import NPUWorkerLoRAManager


class AdaptersPromptLogprobs(PromptLogprobsWorker):
    """vLLM's worker, run once for each adapter of the requests that want log-probabilities.

    adapters: the model's; requests: has the adapter of each request
    """

    adapters: NPUWorkerLoRAManager
    requests: LoraState
    uses_prompt_logprobs: np.ndarray  # vLLM's, by slot

    @classmethod
    def taking_over(
        cls, worker: PromptLogprobsWorker, adapters: NPUWorkerLoRAManager, requests: LoraState
    ) -> "AdaptersPromptLogprobs":
        """Converts the object to this class."""
        worker.__class__ = cls
        assert isinstance(worker, cls)
        worker.adapters, worker.requests = adapters, requests
        return worker

    def compute_prompt_logprobs(
        self,
        logits_fn: Any,
        hidden_states: Any,
        input_batch: InputBatch,
        all_token_ids: Any,
        num_computed_tokens: Any,
        prompt_lens: Any,
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        wanted = self.uses_prompt_logprobs
        ids = self.requests.lora_ids
        try:
            for adapter in self._adapters(wanted[input_batch.idx_mapping_np], input_batch):
                self.uses_prompt_logprobs = wanted & (ids == adapter)
                with self.adapters.logits_of(adapter):
                    found |= super().compute_prompt_logprobs(
                        logits_fn,
                        hidden_states,
                        input_batch,
                        all_token_ids,
                        num_computed_tokens,
                        prompt_lens,
                    )
        finally:
            self.uses_prompt_logprobs = wanted
        return found

    def compute_prompt_token_id_logprobs(
        self, logits_fn: Any, hidden_states: Any, input_batch: InputBatch, prompt_lens: Any
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        wanted = np.array([name in self.token_id_scores for name in input_batch.req_ids])
        for adapter in self._adapters(wanted, input_batch):
            with self._scores_of(adapter, input_batch), self.adapters.logits_of(adapter):
                found |= super().compute_prompt_token_id_logprobs(
                    logits_fn, hidden_states, input_batch, prompt_lens
                )
        return found

    def _adapters(self, wanted: np.ndarray, batch: InputBatch) -> list[int]:
        """The adapters of the wanted requests; 0 for none."""
        ids: list[int] = np.unique(self.requests.lora_ids[batch.idx_mapping_np[wanted]]).tolist()
        return ids

    @contextmanager
    def _scores_of(self, adapter: int, batch: InputBatch) -> Iterator[None]:
        """Inside, only the step's requests with this adapter are scored."""
        ids = self.requests.lora_ids[batch.idx_mapping_np]
        others = {
            name: self.token_id_scores.pop(name)
            for name, each in zip(batch.req_ids, ids, strict=True)
            if each != adapter and name in self.token_id_scores
        }
        try:
            yield
        finally:
            self.token_id_scores |= others
