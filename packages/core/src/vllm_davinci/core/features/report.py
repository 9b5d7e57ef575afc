"""Every value that an engine runs with, its source and reason."""

import os
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from vllm_davinci.core.config.environment_variables import OTHER_VARIABLES
from vllm_davinci.core.config.options import GRAPHS
from vllm_davinci.core.config.parsing import flat, get_config, get_settings
from vllm_davinci.core.config.setting import Setting, Source, last_by_key
from vllm_davinci.core.config.table import table
from vllm_davinci.core.features.feature import Engine
from vllm_davinci.core.features.graphs import SIZES, reason_against_graphs
from vllm_davinci.core.features.prefill_first import SECTION, is_prefill_first
from vllm_davinci.core.features.registry import named

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM's limit of graph sizes, in tokens.
MOST = "max_cudagraph_capture_size"


def option_settings(vllm_config: "VllmConfig") -> list[Setting]:
    """All options, as layers and models read them, then other keys and variables in use."""
    decided = last_by_key(get_settings(vllm_config))
    values = dict(flat(get_config(vllm_config)))
    options = [
        decided.get(key, Setting(key, value, Source.DEFAULT))._replace(value=value)
        for key, value in values.items()
    ]
    others = {row.key for row in (*table(), *OTHER_VARIABLES)} - {*values}
    return [*options, *(setting for key, setting in decided.items() if key in others)]


def feature_settings(
    vllm_config: "VllmConfig", flags: Mapping[str, str] = MappingProxyType({})
) -> list[Setting]:
    """Features that the engine uses, each with the flag that requests it.

    flags: vLLM's options as given: field name -> the text typed
    """
    settings = [*option_settings(vllm_config), *vllm_settings(vllm_config, flags)]
    decided = {setting.key: setting for setting in settings}
    features = []
    for row in named(Engine(vllm_config, get_config(vllm_config))):
        source = Source.FLAG if row.flag else Source.MODEL
        if (value := decided.get(row.flag.removeprefix("-cc."))) is not None:
            source = value.source
        features.append(Setting(row.title, True, source, row.flag))
    return features


def vllm_settings(
    vllm_config: "VllmConfig", flags: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> list[Setting]:
    """Values of vLLM's configuration that an NPU, the model or an option can decide.

    flags: vLLM's options as given: field name -> the text typed
    """
    compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    method, load_format = "VLLM_WORKER_MULTIPROC_METHOD", vllm_config.load_config.load_format
    settings = [
        _graph_mode(vllm_config),
        _graph_sizes(vllm_config, flags),
        Setting("compilation mode", compilation.mode, Source.RELEASE),
        Setting("scheduler_cls", scheduler.scheduler_cls, Source.DEFAULT, "vLLM's own"),
        Setting("async_scheduling", scheduler.async_scheduling, Source.DEFAULT),
        Setting("max_num_seqs", scheduler.max_num_seqs, Source.DEFAULT),
        Setting("max_num_batched_tokens", scheduler.max_num_batched_tokens, Source.DEFAULT),
        Setting("watermark", scheduler.watermark, Source.DEFAULT),
        Setting("block_size", cache.block_size, Source.CHIP, "the attention operator's block size"),
        Setting("enable_prefix_caching", cache.enable_prefix_caching, Source.DEFAULT),
        Setting("worker_cls", parallel.worker_cls, Source.RELEASE),
        Setting("all2all_backend", parallel.all2all_backend, Source.DEFAULT),
        Setting("load_format", load_format, Source.DEFAULT),
    ]
    model = vllm_config.model_config
    if model is not None:
        settings += [
            Setting("dtype", str(model.dtype).removeprefix("torch."), Source.MODEL),
            Setting("quantization", model.quantization, Source.MODEL, "of the checkpoint"),
            Setting("max_model_len", model.max_model_len, Source.MODEL),
        ]
    start = environ.get(method, "spawn")
    source = Source.DEFAULT if start == "spawn" else Source.VARIABLE
    settings.append(
        Setting(method, start, source, "of `vllm serve`; Python programs fork if they can")
    )
    decided = last_by_key(get_settings(vllm_config))
    return [_decided(setting, vllm_config, flags, decided) for setting in settings]


def _decided(
    setting: Setting,
    vllm_config: "VllmConfig",
    flags: Mapping[str, str],
    decided: Mapping[str, Setting],
) -> Setting:
    """The setting with its source: an option, this release or a flag."""
    name, value, source, reason = setting
    if name in decided:
        _, _, source, reason = decided[name]
        reason += f"; asked for: {flags[name]}" if name in flags else ""
    elif name in (get_config(vllm_config).ascend_scheduler_config.model_extra or {}):
        source, reason = Source.ADDITIONAL_CONFIG, f"{SECTION}.{name}"
    elif name in flags:
        source, reason = Source.FLAG, flags[name]
    elif name == "watermark" and is_prefill_first(vllm_config):
        source, reason = Source.RELEASE, f"{SECTION}.enabled"
    return Setting(name, value.name if isinstance(value, Enum) else value, source, reason)


def _graph_mode(vllm_config: "VllmConfig") -> Setting:
    source, reason = Source.ADDITIONAL_CONFIG, GRAPHS
    if vllm_config.model_config is not None and vllm_config.model_config.enforce_eager:
        source, reason = Source.FLAG, "--enforce-eager"
    elif not get_config(vllm_config).torchair_graph_config.enabled:
        source = Source.DEFAULT
        reason = reason_against_graphs(vllm_config) or "decode steps gain from graphs"
    mode = vllm_config.compilation_config.cudagraph_mode
    return Setting("cudagraph_mode", mode, source, reason)


def _graph_sizes(vllm_config: "VllmConfig", flags: Mapping[str, str]) -> Setting:
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes
    asked = get_config(vllm_config).torchair_graph_config
    source, reason = Source.ADDITIONAL_CONFIG, SIZES
    if not sizes:
        source, reason = Source.DEFAULT, "no graphs"
    elif asked.graph_batch_sizes_init:
        reason = f"{SIZES}_init"
    elif not asked.enabled:
        source, reason = Source.DEFAULT, "doubling up to --max-num-seqs"
        if MOST in flags:
            source, reason = Source.FLAG, f"doubling up to {flags[MOST]}"
    elif not asked.graph_batch_sizes:
        reason = f"{GRAPHS}: one, and --max-num-seqs"
    return Setting("cudagraph_capture_sizes", sizes, source, reason)
