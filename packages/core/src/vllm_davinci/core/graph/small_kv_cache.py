"""A KV cache of few blocks, for steps that run before the real one is there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from vllm_davinci.core.graph.ranks import least_of_all_ranks


class RunnerWithCache(Protocol):
    """Stands for what makes and frees such a cache of vLLM's runner."""

    vllm_config: VllmConfig

    def _init_minimal_kv_cache_for_profiling(self) -> None: ...
    def _cleanup_profiling_kv_cache(self) -> None: ...


@contextmanager
def small_kv_cache(runner: RunnerWithCache) -> Iterator[bool]:
    """A KV cache of few blocks meanwhile; False where a rank has no room for one, as then it has
    none for a real one. Every rank calls it."""
    try:
        with set_current_vllm_config(runner.vllm_config):
            runner._init_minimal_kv_cache_for_profiling()
        is_there = True
    except torch.OutOfMemoryError:
        is_there = False
    try:
        yield least_of_all_ranks(is_there) > 0
    finally:
        runner._cleanup_profiling_kv_cache()
