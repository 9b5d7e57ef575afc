"""Values of vLLM's configuration that every engine on an NPU needs."""

import os

from vllm import envs

from vllm_davinci.core import components
from vllm_davinci.core.config.registered_names import PREFIX, REPLACED
from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS
from vllm_davinci.core.errors import RELEASE
from vllm_davinci.core.features.feature import Engine, Feature, is_always

SHUTDOWN_LIMIT_S = 15


def settle(engine: Engine) -> None:
    """Sets the values that the NPU needs."""
    from vllm.config import CompilationMode, CUDAGraphMode  # vLLM imports this module first

    _set_parallel(engine)
    _set_variables(engine)
    load_config = engine.vllm.load_config
    if load_config.load_format in REPLACED:
        load_config.load_format = f"{PREFIX}{load_config.load_format}"

    compilation = engine.vllm.compilation_config
    why = f"not available in {RELEASE}: compilation"
    engine.set(compilation, "mode", CompilationMode.NONE, why)
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        compilation.cudagraph_capture_sizes = []
        compilation.max_cudagraph_capture_size = 0
    compilation.compile_sizes = []
    passes = compilation.pass_config
    for name in ("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant", "fuse_allreduce_rms"):
        setattr(passes, name, False)
    _set_attention(engine)


def _set_attention(engine: Engine) -> None:
    model, attention = engine.model, engine.vllm.attention_config
    has_heads_of_two_sizes = model is not None and model.hf_text_config.model_type.startswith(
        "gemma4"
    )
    if has_heads_of_two_sizes and getattr(attention.backend, "name", None) == "TRITON_ATTN":
        why = "vLLM turns it on for heads of different sizes; an NPU's backend serves them"
        engine.set(attention, "backend", None, why)
    cache = engine.vllm.cache_config
    if cache.user_specified_block_size and cache.block_size % BLOCK_SIZE_TOKENS:
        why = f"the attention operator works with blocks of {BLOCK_SIZE_TOKENS} tokens"
        engine.set(cache, "block_size", BLOCK_SIZE_TOKENS, why)


def _set_parallel(engine: Engine) -> None:
    parallel = engine.vllm.parallel_config
    if parallel.worker_cls == "auto":
        parallel.worker_cls = "vllm_davinci.core.worker.NPUWorker"
    parallel.disable_custom_all_reduce = True  # CUDA's
    if parallel.use_sequence_parallel_moe:
        # vLLM's models read padding in a step of one token, because they do not treat it as
        # sequence parallel. This value causes that; it has no other effect on an NPU.
        engine.set(
            parallel,
            "all2all_backend",
            "flashinfer_nvlink_two_sided",
            "the old value turns on vLLM's sequence-parallel experts, which are wrong for one "
            "token; moe_communication sets the dispatch method",
        )
    if parallel.data_parallel_size > 1:
        engine.set(
            parallel,
            "disable_nccl_for_dp_synchronization",
            True,
            "if ranks agreed on a step through the device, the host would wait in every step",
        )
        if (
            parallel.distributed_executor_backend == "external_launcher"
            or not envs.VLLM_ENABLE_V1_MULTIPROCESSING
        ):
            engine.set(
                engine.vllm.scheduler_config,
                "async_scheduling",
                False,
                "with it, offline ranks without requests would wait in steps in which the others "
                "only fetch results",
            )


def _set_variables(engine: Engine) -> None:
    """Sets vLLM's environment variables for the processes of this engine."""
    # vLLM forks by default, which saves imports in every process. An NPU context does not survive a
    # fork.
    if not components.can_fork():
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # 5 s, vLLM's default, are not enough to close a device, or several ranks on few cores. A
    # process killed too early leaves shared memory behind.
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(SHUTDOWN_LIMIT_S))

    if engine.config.torchair_graph_config.use_cached_kv_cache_bytes:
        os.environ["VLLM_ENABLE_STARTUP_PLAN"] = "1"


FEATURES = (
    Feature("", "settings of an NPU", is_always, settle=settle, after=("-cc.cudagraph_mode",)),
)
