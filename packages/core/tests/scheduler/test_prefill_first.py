"""The prefill-first scheduler on vLLM's own requests, queues and KV cache manager.

A cache block holds 128 tokens; prompts are given by their number of tokens.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from vllm_davinci_testing.engines.served_scheduler import BLOCK, Served


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def serve(request: pytest.FixtureRequest) -> Callable[..., Served]:
    """Makes a scheduler. Tests run with and without asynchronous scheduling."""

    def make(blocks: int = 100, **options: Any) -> Served:
        return Served(blocks, async_scheduling=request.param, **options)

    return make


def test_prompts_come_first_and_decodes_in_steps_of_their_own(serve: Callable[..., Served]):
    served = serve()
    served.add("a", 100)
    served.add("b", 200)
    assert served.step() == {"a": 100, "b": 200}
    assert served.step() == {"a": 1, "b": 1}
    served.add("c", 50)
    assert served.step() == {"c": 50}
    served.add("d", 60)
    assert served.step() == {"d": 60}
    assert served.step() == dict.fromkeys("abcd", 1)
    served.run()
    assert served.tokens == dict.fromkeys("abcd", 8)
    assert set(served.reasons.values()) == {FinishReason.LENGTH}


def test_a_prompt_that_does_not_fit_into_a_step_keeps_its_place(serve: Callable[..., Served]):
    served = serve()
    for name, tokens in [("a", 300), ("b", 400), ("c", 200), ("d", 450)]:
        served.add(name, tokens)
    assert served.step() == {"a": 300, "c": 200}
    assert served.waiting() == ["b", "d"]
    assert served.step() == {"b": 400}
    assert served.step() == {"d": 450}
    assert served.step() == dict.fromkeys("acbd", 1)


def test_no_more_requests_run_than_there_are_slots(serve: Callable[..., Served]):
    served = serve(max_num_seqs=2)
    for name in "abc":
        served.add(name, 10, max_tokens=3)
    assert served.step() == {"a": 10, "b": 10}
    assert served.step() == {"a": 1, "b": 1}
    served.run()
    first = [list(step) for step in served.steps].index(["c"])
    assert all("c" not in step for step in served.steps[:first])
    assert served.tokens == dict.fromkeys("abc", 3)


def test_below_the_watermark_a_prompt_is_passed_over(serve: Callable[..., Served]):
    # 20 blocks: one is never assigned and 4 are reserved, so 19 are free.
    served = serve(21, section={"watermark": 0.2}, max_num_batched_tokens=2048)
    served.add("a", 10 * BLOCK)
    assert served.step() == {"a": 10 * BLOCK}
    served.add("b", 8 * BLOCK)  # 10 blocks are free: 2 would be left
    served.add("c", 5 * BLOCK)  # 5 are left
    assert served.step() == {"c": 5 * BLOCK}
    assert served.waiting() == ["b"]


def test_alone_a_prompt_may_have_the_whole_cache(serve: Callable[..., Served]):
    served = serve(9, section={"watermark": 0.5}, max_num_batched_tokens=2048)
    served.add("a", 8 * BLOCK)
    assert served.step() == {"a": 8 * BLOCK}


def test_without_blocks_the_choice_ends(serve: Callable[..., Served]):
    served = serve(11, section={"watermark": 0.0}, max_num_batched_tokens=2048)
    served.add("a", 6 * BLOCK - 10)
    served.step()
    served.add("b", 5 * BLOCK)
    served.add("c", 10)
    assert served.step() == {"a": 1}
    assert served.waiting() == ["b", "c"]


def test_a_decode_without_a_block_preempts_the_last_request(serve: Callable[..., Served]):
    served = serve(7, max_num_batched_tokens=2048, enable_prefix_caching=False)
    served.add("a", 3 * BLOCK, max_tokens=BLOCK)
    served.add("b", 3 * BLOCK, max_tokens=4)
    assert served.step() == {"a": 3 * BLOCK, "b": 3 * BLOCK}
    assert served.step() == {"a": 1}  # takes a block that b had
    assert served.waiting() == ["b"]
    served.run()
    assert served.tokens == {"a": BLOCK, "b": 4}
    again = [step["b"] for step in served.steps[1:] if step.get("b", 0) > 1]
    assert again == [3 * BLOCK + 1]  # recomputes prompt and output as a whole


def test_a_preempted_request_longer_than_a_step_resumes_in_chunks(serve):
    served = serve(9, max_num_batched_tokens=4 * BLOCK, enable_prefix_caching=False)
    served.add("a", 3 * BLOCK + 100, max_tokens=BLOCK)
    served.add("b", 4 * BLOCK - 20, max_tokens=60)
    served.run()
    assert served.tokens == {"a": BLOCK, "b": 60}
    preempted = {name for step in served.steps[2:] for name, count in step.items() if count > 1}
    (name,) = preempted
    parts = [step[name] for step in served.steps[2:] if step.get(name, 0) > 1]
    assert parts[0] == 4 * BLOCK
    assert all(list(step) == [name] for step in served.steps[2:] if step.get(name, 0) > 1)


def test_a_prompt_that_fits_no_step_ends_at_once(serve, caplog):
    served = serve()
    served.add("a", 513)
    served.add("b", 512)
    served.run()
    assert served.tokens == {"a": 0, "b": 8}
    assert served.reasons["a"] == FinishReason.LENGTH
    assert all("a" not in step for step in served.steps)
    assert not served.scheduler.requests


def test_alone_it_ends_too(serve: Callable[..., Served]):
    served = serve()
    served.add("a", 600)
    served.run(6)
    assert served.reasons == {"a": FinishReason.LENGTH}


def test_a_prompt_that_no_cache_holds_ends_at_once(serve: Callable[..., Served]):
    served = serve(4, max_num_batched_tokens=2048)
    served.add("a", 3 * BLOCK + 1)
    served.add("b", 2 * BLOCK)
    served.run()
    assert served.tokens == {"a": 0, "b": 8}


def test_what_the_prefix_cache_holds_is_no_token_of_the_step(serve: Callable[..., Served]):
    served = serve()
    prefix = [5] * 3 * BLOCK
    served.add("a", [*prefix, *[6] * 10], max_tokens=1)
    served.run()
    served.add("b", 300)
    served.add("c", [*prefix, *[8] * 20])
    assert served.step() == {"b": 300, "c": 20}


def test_a_throttled_step_decodes_where_it_can(serve: Callable[..., Served]):
    served = serve()
    served.add("a", 100)
    served.step()
    served.step()
    served.add("b", 50)
    assert served.step(throttle_prefills=True) == {"a": 1}
    assert served.waiting() == ["b"]
    assert served.step() == {"b": 50}


def test_between_prefills_are_steps_of_decodes_where_that_is_asked_for(serve):
    served = serve(prefill_schedule_interval=3)
    served.add("a", 100)
    assert served.step() == {"a": 100}
    served.add("b", 50)
    assert [served.step() for _ in range(3)] == [{"a": 1}, {"a": 1}, {"b": 50}]
    served.run()
    assert served.tokens == {"a": 8, "b": 8}


def test_a_paused_engine_admits_no_request(serve: Callable[..., Served]):
    served = serve()
    served.add("a", 100)
    served.step()
    served.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    served.add("b", 50)
    assert served.step() == {"a": 1}
    served.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert served.step() == {"b": 50}


def test_a_streaming_session_keeps_its_blocks_and_continues_in_a_pause(serve):
    served = serve()
    served.add("a", 100, max_tokens=2, resumable=True)
    for _ in range(4):
        served.step()
    assert served.tokens["a"] == 2
    held = {request.request_id for request in served.scheduler.deferred_waiting}
    assert held == set(served.waiting()) == {"a"}
    assert served.step() == {}
    served.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    served.add("b", 50)
    assert served.step() == {}
    served.add("a", 30, max_tokens=2, resumable=True)  # follows 100 tokens and an answer of two
    assert next(each for each in [served.step(), served.step()] if each).keys() == {"a"}
    served.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    served.add("a", 30, max_tokens=2, resumable=True)
    served.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert any("b" in served.step() for _ in range(4))


def test_aborted_requests_leave_the_queue(serve: Callable[..., Served]):
    served = serve()
    for name, tokens in [("a", 400), ("b", 400), ("c", 100)]:
        served.add(name, tokens)
    served.step()
    served.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert served.waiting() == []
    served.run()
    assert served.tokens == {"a": 8, "b": 0, "c": 8}


@pytest.mark.parametrize("seed", range(8))
def test_any_load_is_served(seed: int, serve: Callable[..., Served]):
    """Each step is of one kind and within the budget, and every request gets its tokens."""
    generator = random.Random(seed)
    served = serve(generator.randint(14, 30), max_num_batched_tokens=1024, max_num_seqs=6)
    wanted: dict[str, int] = {}
    for number in range(40):
        if generator.random() < 0.5:
            name = str(number)
            wanted[name] = generator.randint(1, 200)
            prompt = generator.choice([generator.randint(1, 1000), generator.randint(1, 60)])
            served.add(name, prompt, wanted[name])
        for _ in range(generator.randint(0, 3)):
            served.step()
    served.run(20_000)
    assert served.tokens == wanted
    computed: dict[str, int] = {}
    for step in served.steps:
        assert sum(step.values()) <= 1024
        assert len(step) <= 6
        # A prompt of one token looks like a decode, and so does a prompt with all but its last
        # token cached.
        assert len({count > 1 for name, count in step.items() if name in computed}) <= 1 or (
            min(step.values()) == 1
        )
        for name, count in step.items():
            computed[name] = computed.get(name, 0) + count
