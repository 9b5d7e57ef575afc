"""A KV cache of few blocks, for steps that run before the real one is allocated."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
from vllm.v1.core.kv_cache_planning import get_kv_cache_groups_from_builder

from vllm_davinci.core.graph.ranks import least_of_all_ranks


class RunnerWithCache(Protocol):
    """The members of vLLM's runner that create and free such a cache."""

    vllm_config: VllmConfig

    def get_kv_cache_spec(self) -> dict[str, Any]: ...
    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False) -> None: ...
    def _init_minimal_kv_cache_for_profiling(self) -> None: ...
    def _cleanup_profiling_kv_cache(self) -> None: ...


@contextmanager
def small_kv_cache(runner: RunnerWithCache, num_tokens: int = 0) -> Iterator[bool]:
    """A temporary KV cache of few blocks. Yields False if a rank has too little memory for it, and
    so for the real one. Every rank calls it.

    num_tokens: tokens of a step that uses the cache; 0: enough blocks for a decode of each request
    """
    try:
        with set_current_vllm_config(runner.vllm_config):
            if num_tokens:
                _initialize(runner, num_tokens)
            else:
                runner._init_minimal_kv_cache_for_profiling()
        is_there = True
    except torch.OutOfMemoryError:
        is_there = False
    try:
        yield least_of_all_ranks(is_there) > 0
    finally:
        runner._cleanup_profiling_kv_cache()


def _initialize(runner: RunnerWithCache, num_tokens: int) -> None:
    """vLLM's initialization, with a slot per token: operators that write slots refuse fewer."""
    config = runner.vllm_config
    builder = get_kv_cache_config_builder(config)
    groups = get_kv_cache_groups_from_builder(builder, config, runner.get_kv_cache_spec())
    block_size = min((each.kv_cache_spec.block_size for each in groups), default=1)
    small = builder.get_kv_cache_config_from_groups(
        config, groups, num_blocks=num_tokens // block_size + 1
    )
    runner.initialize_kv_cache(small, is_profiling=True)
    config.cache_config.num_gpu_blocks = small.num_blocks
