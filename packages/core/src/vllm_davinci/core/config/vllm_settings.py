"""Values of vLLM's configuration that an NPU needs."""

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_davinci.core import components
from vllm_davinci.core.config.both_ways import keep_together
from vllm_davinci.core.config.graph_mode import settle_graph_mode
from vllm_davinci.core.config.load_formats import PREFIX, REPLACED
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.setting import Setting, Source, shown
from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS
from vllm_davinci.core.errors import RELEASE

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

SHUTDOWN_LIMIT_S = 15


def set_for_npu(vllm_config: "VllmConfig") -> list[Setting]:
    """Sets the values that the NPU needs. Returns those that it changed, with the reasons."""
    from vllm.config import CompilationMode, CUDAGraphMode  # vLLM imports this module first

    changes: list[Setting] = []
    change = partial(_change, changes)
    _set_parallel(vllm_config.parallel_config, change)
    _set_variables(vllm_config)
    load_config = vllm_config.load_config
    if load_config.load_format in REPLACED:
        load_config.load_format = f"{PREFIX}{load_config.load_format}"

    compilation = vllm_config.compilation_config
    change(compilation, "mode", CompilationMode.NONE, f"not available in {RELEASE}: compilation")
    changes += settle_graph_mode(vllm_config)
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        compilation.cudagraph_capture_sizes = []
        compilation.max_cudagraph_capture_size = 0
    compilation.compile_sizes = []
    passes = compilation.pass_config
    for name in ("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant", "fuse_allreduce_rms"):
        setattr(passes, name, False)

    _keep_attention_backend(vllm_config, change)
    keep_together(vllm_config, change)
    model = vllm_config.model_config
    if model is not None and model.is_encoder_decoder:
        why = "vLLM finds no prefixes of what an encoder has seen"
        change(vllm_config.cache_config, "enable_prefix_caching", False, why)

    cache_config = vllm_config.cache_config
    if cache_config.user_specified_block_size and cache_config.block_size % BLOCK_SIZE_TOKENS:
        change(
            cache_config,
            "block_size",
            BLOCK_SIZE_TOKENS,
            f"the attention operator works with blocks of {BLOCK_SIZE_TOKENS} tokens",
        )
    return changes


def _change(changes: list[Setting], holder: Any, name: str, value: Any, reason: str) -> None:
    """Sets a value and notes it in `changes` where it was another one."""
    old = getattr(holder, name)
    if old != value:
        setattr(holder, name, value)
        replaced = f"instead of {shown(old)}: {reason}"
        changes.append(Setting(name, value, Source.RELEASE, replaced))


def _keep_attention_backend(
    vllm_config: "VllmConfig", change: Callable[[Any, str, Any, str], None]
) -> None:
    """Leaves the choice to the platform where vLLM has taken Triton's for heads of two sizes."""
    model, attention = vllm_config.model_config, vllm_config.attention_config
    if model is None or not model.hf_text_config.model_type.startswith("gemma4"):
        return
    if attention.backend is not None and attention.backend.name == "TRITON_ATTN":
        why = "vLLM takes it for layers whose heads differ in size; an NPU's backend serves them"
        change(attention, "backend", None, why)


def _set_parallel(parallel: "ParallelConfig", change: Callable[[Any, str, Any, str], None]) -> None:
    if parallel.worker_cls == "auto":
        parallel.worker_cls = "vllm_davinci.core.worker.NPUWorker"
    parallel.disable_custom_all_reduce = True  # CUDA's
    if parallel.use_sequence_parallel_moe:
        # vLLM's models take a step of one token for one that is not sequence parallel, and read
        # padding. That follows from this value; no other use of it reaches an NPU.
        change(
            parallel,
            "all2all_backend",
            "flashinfer_nvlink_two_sided",
            "the old value turns on vLLM's sequence-parallel experts, which are wrong for one "
            "token; how tokens reach experts is moe_communication's matter",
        )
    if parallel.data_parallel_size > 1:
        change(
            parallel,
            "disable_nccl_for_dp_synchronization",
            True,
            "ranks that agree on a step on the device have the host wait for it in every step",
        )


def _set_variables(vllm_config: "VllmConfig") -> None:
    """Sets the environment variables of vLLM that processes of this engine read."""
    # vLLM forks by default, which saves the imports of every process. An NPU context does not
    # survive it.
    if not components.can_fork():
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # A device that closes, and several ranks on few cores, need longer than vLLM's 5 s. What is
    # killed leaves shared memory behind.
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(SHUTDOWN_LIMIT_S))

    if get_config(vllm_config).torchair_graph_config.use_cached_kv_cache_bytes:
        os.environ["VLLM_ENABLE_STARTUP_PLAN"] = "1"
