"""Makes engines for benchmarks of decode steps: a batch of short requests with one graph."""

import os
from collections.abc import Callable
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process

from vllm import LLM, SamplingParams


def decode_engine(model: str, num_requests: int, **options: Any) -> LLM:
    """Makes an engine for decode steps. options: added to, or replacing, these options of vLLM's
    LLM
    """
    own: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_seqs": num_requests,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 256 << 20,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [num_requests],
        },
    }
    return LLM(model, **{**own, **options})


def runner_of(llm: LLM) -> Any:
    """Returns the model runner of an in-process engine."""
    worker = llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def wrap_forwards(runner: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps what runs the model in a step: its forward, or a graph's replay."""
    graphs = getattr(runner, "cudagraph_manager", None)  # vLLM's CPU backend has none
    for owner, name in ((runner.get_model(), "forward"), (graphs, "run_fullgraph")):
        if owner is not None:
            setattr(owner, name, wrap(getattr(owner, name)))


def replay_graphs(runner: Any, are_replayed: bool) -> None:
    """Makes steps replay graphs or run eagerly, by hiding graphs from vLLM's manager."""
    runner.cudagraph_manager._graphs_captured = are_replayed


def decode_requests(num_requests: int, num_steps: int) -> tuple[list[Any], SamplingParams]:
    """Makes requests that greedily continue four-token prompts, one token per step."""
    prompts = [{"prompt_token_ids": [5 + request % 40] * 4} for request in range(num_requests)]
    sampling = SamplingParams(
        temperature=0, max_tokens=num_steps, ignore_eos=True, detokenize=False
    )
    return prompts, sampling
