"""Graph mode: which steps replay captured graphs, their sizes, and the reasons."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_davinci.core.config.options import GRAPHS
from vllm_davinci.core.config.parsing import get_config, is_resolved
from vllm_davinci.core.errors import RELEASE, ConfigurationError
from vllm_davinci.core.features.feature import Engine, Feature
from vllm_davinci.core.graph.sizes import Sizes, doubling_sizes, graph_batch_sizes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SIZES = "torchair_graph_config.graph_batch_sizes"

NO_PIECES = (
    "piecewise graphs need a compiled model, or vLLM's own pieces, which only CUDA captures; "
    "decode steps can be captured whole: -cc.cudagraph_mode=FULL_DECODE_ONLY"
)
PREFILLS_EAGER = (
    "only decode steps are captured: attention of prefills has other shapes in every step"
)
# Methods that draft only where text repeats: few steps have all drafts, which a graph needs.
LOOKED_UP = ("ngram", "suffix")


def choose_graph_mode(vllm_config: "VllmConfig") -> None:
    """Sets vLLM's graph mode and capture sizes if the user has not.

    Called before vLLM derives other values from them. Raises ConfigurationError for a contradiction
    between vLLM's options and `additional_config`.
    """
    from vllm.config import CUDAGraphMode  # vLLM imports this module first

    if is_resolved(vllm_config):
        return  # a server's engine derives its configuration again, from the values chosen here
    compilation = vllm_config.compilation_config
    asked = get_config(vllm_config).torchair_graph_config
    model = vllm_config.model_config
    is_eager = model is not None and model.enforce_eager
    if asked.enabled:
        if is_eager:
            raise ConfigurationError(
                "can't enable graph mode and eager mode at the same time: additional_config sets "
                f"{GRAPHS}, and --enforce-eager is given. Remove one of the two."
            )
        if compilation.cudagraph_mode == CUDAGraphMode.NONE:
            raise ConfigurationError(
                f"additional_config sets {GRAPHS}, and -cc.cudagraph_mode is NONE. Remove one of "
                "the two."
            )
        # A drafter's configuration is a copy of its model's, including the sizes chosen there.
        given = compilation.cudagraph_capture_sizes
        if asked.graph_batch_sizes and given not in (None, chosen_sizes(vllm_config).sizes):
            raise ConfigurationError(
                f"Graph sizes are given twice: additional_config sets {SIZES} to "
                f"{list(asked.graph_batch_sizes)}, and --cudagraph-capture-sizes is "
                f"{given}. Remove one of the two."
            )
    if compilation.cudagraph_mode is None:
        is_on = asked.enabled or reason_against_graphs(vllm_config) is None
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY if is_on else CUDAGraphMode.NONE
    if (
        compilation.cudagraph_mode != CUDAGraphMode.NONE
        and compilation.cudagraph_capture_sizes is None
        and model is not None
    ):
        compilation.cudagraph_capture_sizes = chosen_sizes(vllm_config).sizes
        compilation.max_cudagraph_capture_size = None  # vLLM uses the largest


def reason_against_graphs(
    vllm_config: "VllmConfig", environ: Mapping[str, str] = os.environ
) -> str | None:
    """Why graph mode is off by default on this engine; None if it is on.

    Graphs make an engine faster if its device waits for launches, and on a virtual NPU, whose
    operators compete with launches for the processor.
    """
    model = vllm_config.model_config
    if model is None:
        return "no model is given"
    if model.runner_type == "pooling":
        return "a pooling model does not decode"
    if blocked := _blocking_variable(environ):
        return f"{blocked} is set"
    return None


def chosen_sizes(vllm_config: "VllmConfig") -> Sizes:
    """Graph sizes in tokens, for users who give vLLM none."""
    asked = get_config(vllm_config).torchair_graph_config
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    query_len = 1 + vllm_config.num_speculative_tokens
    tp_size = parallel.tensor_parallel_size
    requests: list[int] = list(asked.graph_batch_sizes)
    if not asked.enabled:
        most = vllm_config.compilation_config.max_cudagraph_capture_size
        max_requests = scheduler.max_num_seqs
        if most is not None:
            max_requests = max(1, min(max_requests, most // query_len))
        sizes = [size * query_len for size in doubling_sizes(1, max_requests)]
        limit = scheduler.max_num_batched_tokens
        return Sizes([size for size in sizes if size <= limit] or [min(sizes)], [])
    return graph_batch_sizes(
        requests,
        asked.graph_batch_sizes_init,
        max_num_seqs=scheduler.max_num_seqs,
        query_len=query_len,
        tp_size=tp_size,
        rounds_to_tp=parallel.enable_expert_parallel and tp_size > 1,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )


def settle(engine: Engine, environ: Mapping[str, str] = os.environ) -> None:
    """Restricts vLLM's graph mode to what this release supports. Idempotent.

    Raises ConfigurationError for settings of torch_npu that prevent capture.
    """
    from vllm.config import CUDAGraphMode  # vLLM imports this module first

    if engine.model is not None:
        engine.warnings.extend(_notes(engine))
    compilation = engine.vllm.compilation_config
    mode = compilation.cudagraph_mode
    wanted, reason = CUDAGraphMode.FULL_DECODE_ONLY, PREFILLS_EAGER
    if mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE):
        reason = f"not available in {RELEASE}: {NO_PIECES}"
    if mode == CUDAGraphMode.PIECEWISE:
        wanted = CUDAGraphMode.NONE
    else:
        _check_environment(environ)
    engine.set(compilation, "cudagraph_mode", wanted, reason)


def _notes(engine: Engine) -> list[str]:
    """Notes on graphs that will be rarely used, or differ from what was requested."""
    asked = engine.config.torchair_graph_config
    notes = list(chosen_sizes(engine.vllm).notes) if asked.enabled else []
    speculative = engine.vllm.speculative_config
    if speculative is not None and speculative.method in LOOKED_UP:
        notes.append(
            f"--speculative-config: drafts of '{speculative.method}' are often fewer than "
            f"{speculative.num_speculative_tokens}, and a graph replays only steps in which every "
            "request has all of them. The others are eager: --enforce-eager starts without "
            "capturing graphs."
        )
    return notes


# Variables of torch_npu -> the value that prevents capture, and why.
BLOCKING = {
    "ASCEND_LAUNCH_BLOCKING": ("1", "the host would wait after each launch"),
    "TASK_QUEUE_ENABLE": ("2", "launches would be prepared on another thread"),
}


def _blocking_variable(environ: Mapping[str, str]) -> str | None:
    names = [name for name, (value, _) in BLOCKING.items() if environ.get(name) == value]
    return names[0] if names else None


def _check_environment(environ: Mapping[str, str]) -> None:
    name = _blocking_variable(environ)
    if name is None:
        return
    value, why = BLOCKING[name]
    raise ConfigurationError(
        f"{name}={value} excludes graph mode: {why}, which no capture allows. Unset it, or "
        "start with --enforce-eager."
    )


def has_graphs(engine: Engine) -> bool:
    """True if vLLM's graph mode is on."""
    mode = engine.vllm.compilation_config.cudagraph_mode
    return mode is not None and mode.name != "NONE"


FEATURES = (Feature("-cc.cudagraph_mode", "graphs of decode steps", has_graphs, settle=settle),)
