"""Log-probabilities of prompts, each with the adapter of its request."""

from collections.abc import Callable
from typing import Any

from vllm_davinci.core.lora.adapter_manager import NPUWorkerLoRAManager


def prompt_logprobs(
    runner: Any, adapters: NPUWorkerLoRAManager, compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Computes the step's prompt log-probabilities, one request at a time.

    runner:  vLLM's model runner; `num_prompt_logprobs` maps requests to numbers of
             log-probabilities
    compute: vLLM's own computation, for the requests in `num_prompt_logprobs`
    """
    wanted = runner.num_prompt_logprobs
    found: dict[str, Any] = {}
    for request, number in list(wanted.items()):
        row = runner.input_batch.req_id_to_index.get(request)
        if row is None:
            continue  # preempted
        runner.num_prompt_logprobs = {request: number}
        with adapters.logits_of(int(runner.input_batch.request_lora_mapping[row])):
            found |= compute()
        if not runner.num_prompt_logprobs:
            del wanted[request]
    runner.num_prompt_logprobs = wanted
    return found
