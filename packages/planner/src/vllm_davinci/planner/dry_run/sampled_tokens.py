"""Tokens of a dry-run's steps; a computing device would return the counts."""

from collections.abc import Mapping

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput

from vllm_davinci.core.runner.speculation import ComputedTokens


class SampledTokens:
    """Tokens that a step's requests get. The model accepts all drafts; each token is 0."""

    def __init__(self) -> None:
        self._prefill_lens: dict[str, int] = {}

    def of_step(self, step: SchedulerOutput) -> dict[str, list[int]]:
        """Tokens by request; none for a request still in its prompt."""
        for name in step.finished_req_ids:
            self._prefill_lens.pop(name, None)
        cached = step.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request in step.scheduled_new_reqs:
            tokens = request.prefill_token_ids or request.prompt_token_ids or []
            self._prefill_lens[request.req_id] = len(tokens)
            computed[request.req_id] = request.num_computed_tokens
        return {
            name: self._of_request(name, computed[name], scheduled)
            for name, scheduled in step.num_scheduled_tokens.items()
        }

    def _of_request(self, name: str, computed: int, scheduled: int) -> list[int]:
        missing = self._prefill_lens[name] - computed
        if missing <= 0:
            return [0] * scheduled
        return [0] if scheduled >= missing else []


class StepOutput(AsyncModelRunnerOutput):
    """Waits for a step's output as vLLM does, and puts its tokens in."""

    def __init__(self, output: AsyncModelRunnerOutput, tokens: Mapping[str, list[int]]) -> None:
        self._output, self._tokens = output, tokens

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        output.sampled_token_ids = [self._tokens[name] for name in output.req_ids]
        return output

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        return self._output.get_kv_connector_output()


def output_of_last_stage(tokens: Mapping[str, list[int]]) -> ModelRunnerOutput:
    """The output of a pipeline's last stage, which is a phantom. Waits for this rank's device."""
    torch.accelerator.synchronize()
    names = list(tokens)
    places = {name: place for place, name in enumerate(names)}
    return ModelRunnerOutput(names, places, list(tokens.values()))


class AcceptedDrafts(ComputedTokens):
    """Counts of a step whose drafts are all accepted; the host waits for them as on a chip.

    scheduled: tokens of each request of the newest step
    """

    scheduled: Mapping[str, int]

    def settle(self, slots: np.ndarray) -> None:
        """Only waits: the scheduler's counts already assume that drafts are accepted."""
        if self._copied is not None:
            super().of(slots)

    def of(self, slots: np.ndarray) -> np.ndarray:
        super().of(slots)
        names = [self._states.index_to_req_id[slot] for slot in slots]
        added = np.array([self.scheduled[name] for name in names], dtype=np.int32)
        counts: np.ndarray = self._states.num_computed_tokens_np[slots] + added
        return counts
