"""vLLM's scheduler in another order: whole prompts first, decodes in steps without prefills."""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)


class PrefillFirstScheduler(Scheduler):
    """Chooses the waiting requests that vLLM's scheduler sees in a step; the rest is vLLM's.

    A step prefills or decodes. It prefills while a waiting request fits: its whole prompt, without
    the cached prefix, into the step's tokens, and its blocks into the cache. Requests that do not
    fit into this step's tokens, or would take the cache below the watermark, are skipped and keep
    their position; the first request without free blocks ends the choice. Otherwise the step
    decodes, and a decode without a block preempts the last running request, as in vLLM.

    Only a preempted request may be prefilled in chunks, if prompt and output together exceed the
    maximum tokens of a step. A prompt that is too long by itself ends with reason "length".
    """

    waiting: Any
    kv_holding_waiting: Any
    deferred_waiting: set[Request]
    prefill_capacity_bound: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._too_long: set[str] = set()  # ids of requests to end in this step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        is_deferred = (
            (throttle_prefills or self._is_within_interval())
            and not self.prefill_capacity_bound
            and any(not request.is_prefill_chunk for request in self.running)
        )
        waiting = [*self.kv_holding_waiting, *self.waiting]
        admitted = [] if is_deferred else self._admissible(waiting)
        continued = any(request.is_prefill_chunk for request in self.running)
        if admitted or (continued and not is_deferred):
            self._hold(request for request in self.running if not request.is_prefill_chunk)
        self._show(admitted)
        output = super().schedule(throttle_prefills)
        self._requeue(waiting)
        if not is_deferred:
            num_waiting = len(self.waiting) + len(self.kv_holding_waiting)
            self.prefill_capacity_bound = num_waiting > len(self.deferred_waiting)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        ended = self.finish_requests(self._too_long, RequestStatus.FINISHED_IGNORED)
        self._too_long.clear()
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        for request in ended:
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs

    # --- which requests --------------------------------------------------------------------

    def _is_within_interval(self) -> bool:
        """True if vLLM defers prefills in this step (--prefill-schedule-interval)."""
        steps = self.num_executed_steps + 1 - self.last_prefill_step
        return bool(steps < self.local_prefill_interval)

    def _admissible(self, waiting: Iterable[Request]) -> list[Request]:
        """The waiting requests that this step prefills, in order."""
        if self._pause_state == PauseState.PAUSED_ALL:
            return []
        if self._pause_state == PauseState.PAUSED_NEW:
            waiting = [each for each in waiting if self._holds_kv_blocks(each)]
        slots = self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input
        tokens = self.max_num_scheduled_tokens - sum(
            min(_missing(request), self.max_num_scheduled_tokens)
            for request in self.running
            if request.is_prefill_chunk
        )
        blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        adapters: set[int] = set()
        chosen: list[Request] = []
        for request in waiting:
            if len(chosen) >= slots or tokens <= 0:
                break
            if not self._is_ready(request) or not self._has_room_for_adapter(request, adapters):
                continue
            if self._is_too_long(request):
                self._too_long.add(request.request_id)
                continue
            computed, needed_blocks = self._computed_and_needed(request)
            new_tokens = request.num_tokens - computed
            if request.num_preemptions and new_tokens > self.max_num_scheduled_tokens:
                new_tokens = self.max_num_scheduled_tokens  # size of the first of several chunks
            if new_tokens > tokens:
                continue
            if needed_blocks > blocks:
                break
            is_first = not self.running and not chosen  # vLLM gives it the whole cache
            if not is_first and needed_blocks + self.kv_cache_manager.watermark_blocks > blocks:
                continue
            chosen.append(request)
            tokens -= new_tokens
            blocks -= needed_blocks
            if request.lora_request:
                adapters.add(request.lora_request.lora_int_id)
        return chosen

    def _is_ready(self, request: Request) -> bool:
        """True if the request waits for nothing else: a grammar, remote KV, output in flight."""
        return self._handle_blocked_waiting_request(request) and bool(
            request.num_stale_output_tokens <= 0 or request.drop_stale_output
        )

    def _has_room_for_adapter(self, request: Request, adapters: set[int]) -> bool:
        if self.lora_config is None or request.lora_request is None:
            return True
        return (
            request.lora_request.lora_int_id in adapters
            or len(adapters) < self.lora_config.max_loras
        )

    def _is_too_long(self, request: Request) -> bool:
        """True if a prompt can never be prefilled. Logs the reason."""
        if request.num_preemptions or request.num_computed_tokens:
            return False
        limits = {
            "--max-num-batched-tokens": self.max_num_scheduled_tokens,
            "--max-model-len": self.max_model_len,
        }
        name = min(limits, key=lambda each: limits[each])
        if request.num_tokens > limits[name]:
            why = f"{name} is {limits[name]}, and prompts are prefilled in one step"
        elif self._blocks_for(request, self.kv_cache_manager.empty_kv_cache_blocks, 0) >= (
            self.kv_cache_manager.block_pool.num_gpu_blocks  # one of which is never allocated
        ):
            why = f"the KV cache has {self.kv_cache_manager.block_pool.num_gpu_blocks} blocks"
        else:
            return False
        if request.request_id not in self._too_long:
            logger.warning(
                "Request %s ends without output: its prompt has %d tokens, %s. Raise the limit, "
                "or set ascend_scheduler_config.enable_chunked_prefill.",
                request.request_id,
                request.num_tokens,
                why,
            )
        return True

    def _computed_and_needed(self, request: Request) -> tuple[int, int]:
        """Number of the request's cached tokens, and of the blocks that its other tokens need."""
        computed_blocks = self.kv_cache_manager.empty_kv_cache_blocks
        computed = request.num_computed_tokens
        if computed == 0:
            computed_blocks, computed, _, _ = self._get_local_prefix_cache_hit(request)
        return computed, self._blocks_for(request, computed_blocks, computed)

    def _blocks_for(self, request: Request, computed_blocks: Any, computed: int) -> int:
        """Number of free blocks that admitting a request takes, counted as in allocate_slots."""
        needed = self.kv_cache_manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=min(request.num_tokens + self.num_lookahead_tokens, self.max_model_len),
            new_computed_blocks=computed_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=computed,
            num_local_computed_tokens=computed,
            num_tokens_main_model=request.num_tokens,
        )
        return int(needed)

    # --- what vLLM's scheduler sees ----------------------------------------------------------

    def _hold(self, requests: Iterable[Request]) -> None:
        """Excludes running requests from the next scheduled step."""
        for request in requests:
            request.next_decode_eligible_step = self.current_step + 2

    def _show(self, waiting: Iterable[Request]) -> None:
        """Sets the waiting requests; those with blocks come first, as vLLM prefers them."""
        holding, others = FCFSRequestQueue(), FCFSRequestQueue()
        for request in waiting:
            (holding if self._holds_kv_blocks(request) else others).append(request)
        self.kv_holding_waiting, self.waiting = holding, others

    def _requeue(self, waiting: list[Request]) -> None:
        """Returns requests that were not admitted to the queue, after those preempted now."""
        seen = set(waiting)
        preempted = [request for request in self.waiting if request not in seen]
        left = [request for request in waiting if request.status != RequestStatus.RUNNING]
        self._show([*preempted, *left])
        self.deferred_waiting = {
            each for each in left if self._is_blocked_waiting_status(each.status)
        }


class AsyncPrefillFirstScheduler(PrefillFirstScheduler, AsyncScheduler):
    """Like PrefillFirstScheduler, with asynchronous scheduling: chooses while a step runs."""


def _missing(request: Request) -> int:
    """Number of tokens to compute before a request can decode."""
    return int(request.num_tokens - request.num_computed_tokens)
