"""The configuration that an engine runs with: every value, who decided it, and why."""

import os
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from vllm_davinci.core.config.graph_mode import ENABLED, SIZES, reason_against_graphs
from vllm_davinci.core.config.origins import Origin, Source
from vllm_davinci.core.config.parsing import get_changes, get_config, get_origins
from vllm_davinci.core.config.scheduler import SECTION, is_prefill_first

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Setting(NamedTuple):
    """One value. key: dotted for options of `additional_config`, else vLLM's name"""

    key: str
    value: Any
    source: Source
    reason: str


def option_settings(vllm_config: "VllmConfig") -> list[Setting]:
    """Every option of `additional_config`, as layers and models read it."""
    origins = get_origins(vllm_config)
    return [
        Setting(key, value, *origins.get(key, Origin(Source.DEFAULT)))
        for key, value in _flat(get_config(vllm_config), ())
    ]


def vllm_settings(
    vllm_config: "VllmConfig",
    flags: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
) -> list[Setting]:
    """Values of vLLM's configuration that an NPU, the model or an option can decide.

    flags: vLLM's options that were given: name of the field -> as it was typed
    """
    compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    values: dict[str, tuple[Any, Origin]] = {
        "cudagraph_mode": (compilation.cudagraph_mode, _graph_origin(vllm_config)),
        "cudagraph_capture_sizes": (
            compilation.cudagraph_capture_sizes,
            _sizes_origin(vllm_config),
        ),
        "compilation mode": (compilation.mode, Origin(Source.RELEASE)),
        "scheduler_cls": (scheduler.scheduler_cls, Origin(Source.DEFAULT, "vLLM's own")),
        "async_scheduling": (scheduler.async_scheduling, Origin(Source.DEFAULT)),
        "max_num_seqs": (scheduler.max_num_seqs, Origin(Source.DEFAULT)),
        "max_num_batched_tokens": (scheduler.max_num_batched_tokens, Origin(Source.DEFAULT)),
        "watermark": (scheduler.watermark, Origin(Source.DEFAULT)),
        "block_size": (cache.block_size, Origin(Source.CHIP, "blocks that attention works with")),
        "enable_prefix_caching": (cache.enable_prefix_caching, Origin(Source.DEFAULT)),
        "worker_cls": (parallel.worker_cls, Origin(Source.RELEASE)),
        "all2all_backend": (parallel.all2all_backend, Origin(Source.DEFAULT)),
        "load_format": (vllm_config.load_config.load_format, Origin(Source.DEFAULT)),
    }
    model = vllm_config.model_config
    if model is not None:
        values |= {
            "dtype": (str(model.dtype).removeprefix("torch."), Origin(Source.MODEL)),
            "quantization": (model.quantization, Origin(Source.MODEL, "of the checkpoint")),
            "max_model_len": (model.max_model_len, Origin(Source.MODEL)),
        }
    method = "VLLM_WORKER_MULTIPROC_METHOD"
    values[method] = (
        environ.get(method, "fork"),
        Origin(Source.CHIP, "whether the device survives a fork"),
    )
    changes = {change.name: change for change in get_changes(vllm_config)}
    overridden = get_config(vllm_config).ascend_scheduler_config.model_extra or {}
    found = []
    for name, (value, origin) in values.items():
        if name in flags:
            origin = Origin(Source.FLAG, flags[name])
        if name in overridden:
            origin = Origin(Source.ADDITIONAL_CONFIG, f"{SECTION}.{name}")
        elif name == "watermark" and is_prefill_first(vllm_config) and name not in flags:
            origin = Origin(Source.RELEASE, f"{SECTION}.enabled")
        if name in changes:
            change = changes[name]
            asked = f"; asked for {_shown(change.before)}: {flags[name]}" if name in flags else ""
            origin = Origin(Source.RELEASE, change.reason + asked)
            if name == "scheduler_cls":
                origin = Origin(Source.ADDITIONAL_CONFIG, change.reason)
        found.append(Setting(name, _shown(value), *origin))
    return found


def _graph_origin(vllm_config: "VllmConfig") -> Origin:
    if vllm_config.model_config is not None and vllm_config.model_config.enforce_eager:
        return Origin(Source.FLAG, "--enforce-eager")
    if get_config(vllm_config).torchair_graph_config.enabled:
        return Origin(Source.ADDITIONAL_CONFIG, ENABLED)
    against = reason_against_graphs(vllm_config)
    return Origin(Source.DEFAULT, against or "decode steps gain from graphs")


def _sizes_origin(vllm_config: "VllmConfig") -> Origin:
    if not vllm_config.compilation_config.cudagraph_capture_sizes:
        return Origin(Source.DEFAULT, "no graphs")
    asked = get_config(vllm_config).torchair_graph_config
    if asked.graph_batch_sizes:
        return Origin(Source.ADDITIONAL_CONFIG, SIZES)
    if asked.graph_batch_sizes_init:
        return Origin(Source.ADDITIONAL_CONFIG, f"{SIZES}_init")
    if asked.enabled:
        return Origin(Source.ADDITIONAL_CONFIG, f"{ENABLED}: one, and --max-num-seqs")
    return Origin(Source.DEFAULT, "doubling up to --max-num-seqs")


def _flat(config: BaseModel, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name in (*type(config).model_fields, *(config.model_extra or {})):
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from _flat(value, (*path, name))
        else:
            yield ".".join((*path, name)), value


def _shown(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value
