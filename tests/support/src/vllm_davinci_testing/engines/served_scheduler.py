"""A prefill-first scheduler, with a model that always answers with the same token."""

from collections import deque
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MODEL = Path(__file__).parents[5] / "checkpoints" / "tiny_llama"
BLOCK = 128
TOKEN = 7


class Served:
    """A scheduler, and a model that answers each request with the same token.

    steps: number of scheduled tokens by request, for each step
    """

    def __init__(self, blocks: int, **options: Any) -> None:
        section = {"enabled": True, **options.pop("section", {})}
        given = {"max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 4}
        self.config = engine_config(section, **{**given, **options})
        self.config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.steps: list[dict[str, int]] = []
        self.tokens: dict[str, int] = {}
        self.reasons: dict[str, FinishReason] = {}
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._depth = 2 if self.config.scheduler_config.async_scheduling else 1
        init_none_hash(sha256)

    def add(
        self, name: str, prompt: int | list[int], max_tokens: int = 8, **options: Any
    ) -> Request:
        ids = [len(self.tokens) + 11] * prompt if isinstance(prompt, int) else prompt
        request = Request(
            name,
            ids,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
            **options,
        )
        self.tokens[name] = 0
        self.scheduler.add_request(request)
        return request

    def step(self, throttle_prefills: bool = False) -> dict[str, int]:
        """Schedules a step, and processes the output of the oldest step."""
        output = self.scheduler.schedule(throttle_prefills)
        names = list(output.num_scheduled_tokens)
        sampled = [
            [] if self.scheduler.requests[name].is_prefill_chunk else [TOKEN] for name in names
        ]
        of_model = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            pooler_output=[],
        )
        self._in_flight.append((output, of_model))
        self.steps.append(dict(output.num_scheduled_tokens))
        if len(self._in_flight) == self._depth:
            self.settle()
        return self.steps[-1]

    def settle(self) -> None:
        for outputs in self.scheduler.update_from_output(*self._in_flight.popleft()).values():
            for output in outputs.outputs:
                self._take(output)

    def _take(self, output: EngineCoreOutput) -> None:
        self.tokens[output.request_id] += len(output.new_token_ids)
        if output.finish_reason is not None:
            self.reasons[output.request_id] = output.finish_reason

    def waiting(self) -> list[str]:
        queues = [*self.scheduler.kv_holding_waiting, *self.scheduler.waiting]
        return [request.request_id for request in queues]

    def run(self, most: int = 500) -> None:
        """Runs steps until no request is left."""
        for _ in range(most):
            if self.scheduler.has_unfinished_requests():
                self.step()
            elif self._in_flight:
                self.settle()
            else:
                return
        raise AssertionError(f"not done after {most} steps: {self.steps[-3:]}")


def engine_config(section: dict[str, Any], **options: Any) -> VllmConfig:
    return EngineArgs(
        model=str(MODEL),
        hf_overrides={"max_position_embeddings": 2048},
        additional_config={"ascend_scheduler_config": section},
        **options,
    ).create_engine_config()
