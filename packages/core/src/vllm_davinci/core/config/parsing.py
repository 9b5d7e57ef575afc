"""Options from the value of vLLM's `additional_config`: parsed once, then carried with it."""

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from vllm_davinci.core.config.aliases import ALIASES, REPLACED, RETIRED, canonical
from vllm_davinci.core.config.options import (
    SCHEDULES,
    DavinciConfig,
    GraphConfig,
    SchedulerOptions,
)
from vllm_davinci.core.config.origins import Change, Origin
from vllm_davinci.core.errors import RELEASE, ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Keys that vLLM itself puts into additional_config (config/vllm.py).
KEYS_OF_VLLM = frozenset({"gdn_prefill_backend", "kda_decode_backend", "kda_prefill_backend"})

# Keys of torchair_graph_config that mean something where it is not `enabled`; graphs may be on
# without it.
WITHOUT_GRAPHS = (
    "enabled",
    "on_capture_failure",
    "enable_view_optimize",
    "enable_multistream_mla",
    "enable_multistream_moe",
)

# Keys whose feature is not in this release -> what they ask for. Their defaults are accepted.
NOT_AVAILABLE: dict[str, str] = {
    "torchair_graph_config.enable_kv_nz": "a KV cache in the NZ layout",
    "dynamic_eplb": "dynamic expert balancing",
    "num_iterations_eplb_update": "dynamic expert balancing",
    "num_wait_worker_iterations": "dynamic expert balancing",
    "gate_eplb": "dynamic expert balancing",
    "kv_cache_dtype": "a quantized KV cache",
}


class ResolvedOptions(dict[str, Any]):
    """`additional_config` of an engine whose options are resolved, with their typed form.

    origins: of those that are no defaults, by dotted key
    changes: of vLLM's configuration, which the platform makes afterwards

    A dictionary, because vLLM hashes and reads `additional_config` as one; it travels to worker
    processes with vLLM's configuration, so that no layer parses again. Not to be changed.
    """

    def __init__(
        self, options: Mapping[str, Any], config: DavinciConfig, origins: Mapping[str, Origin]
    ) -> None:
        super().__init__(options)
        self.config = config
        self.origins = origins
        self.changes: list[Change] = []


def get_config(vllm_config: "VllmConfig") -> DavinciConfig:
    """The options of an engine.

    Parses those that the platform has not resolved, and raises what parse_config raises then.
    """
    additional = vllm_config.additional_config
    return additional.config if is_resolved(vllm_config) else parse_config(additional)


def get_origins(vllm_config: "VllmConfig") -> Mapping[str, Origin]:
    """Dotted key -> where its value comes from, for options that are no defaults."""
    additional = vllm_config.additional_config
    return additional.origins if isinstance(additional, ResolvedOptions) else {}


def get_changes(vllm_config: "VllmConfig") -> list[Change]:
    """The platform's changes of vLLM's configuration; more can be added to them."""
    additional = vllm_config.additional_config
    return additional.changes if isinstance(additional, ResolvedOptions) else []


def is_resolved(vllm_config: "VllmConfig") -> bool:
    """Whether this plugin's platform has resolved the options of an engine."""
    return isinstance(vllm_config.additional_config, ResolvedOptions)


def parse_config(additional_config: Any) -> DavinciConfig:
    """Options from the value of `--additional-config`.

    additional_config: a mapping of JSON values, or None
    Raises ConfigurationError for an unknown key (naming the nearest known one), an ill-typed
    value, a contradiction, and a feature that this release does not have.
    """
    options = {
        key: value for key, value in canonical(additional_config).items() if key not in KEYS_OF_VLLM
    }
    try:
        config = DavinciConfig.model_validate(options)
    except ValidationError as error:
        raise ConfigurationError("; ".join(_explain(error, options))) from None
    if contradictions := list(_contradictions(config)):
        raise ConfigurationError("; ".join(contradictions))
    if unavailable := list(_unavailable(config)):
        raise ConfigurationError("; ".join(unavailable))
    return config


def non_default_options(config: DavinciConfig) -> dict[str, Any]:
    """Dotted key -> value for every option that differs from its default."""
    return dict(_differences(config, DavinciConfig(), ()))


def given_options(config: BaseModel, path: tuple[str, ...] = ()) -> list[str]:
    """Dotted keys that were given, whatever their values."""
    found: list[str] = []
    for name in (*type(config).model_fields, *(config.model_extra or {})):
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            found += given_options(value, (*path, name))
        elif name in config.model_fields_set:
            found.append(".".join((*path, name)))
    return found


def _explain(error: ValidationError, options: dict[str, Any]) -> Iterator[str]:
    for detail in error.errors():
        location = [str(part) for part in detail["loc"]]
        key = ".".join(location)
        if detail["type"] == "extra_forbidden" and key in REPLACED:
            yield _replaced(key)
        elif detail["type"] == "extra_forbidden":
            known = _known_keys(location[:-1])
            nearest = difflib.get_close_matches(location[-1], known, n=1, cutoff=0)
            hint = ".".join([*location[:-1], nearest[0]])
            yield f"additional_config has no key {key!r}. Did you mean {hint!r}?"
        else:
            value = detail["input"]
            yield (
                f"additional_config key {key!r} is {value!r} ({type(value).__name__}): "
                f"{_expectation(detail['msg'])}."
            )


def _replaced(key: str) -> str:
    return f"additional_config has no key {key!r} in this release. Use {REPLACED[key]}"


def _expectation(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message.replace("Input should be", "expected").rstrip(".")


def _known_keys(sections: list[str]) -> list[str]:
    model: type[BaseModel] = DavinciConfig
    for section in sections:
        inner = model.model_fields[section].annotation
        assert isinstance(inner, type)
        model = inner
    paths = [alias.split(".") for alias in (*ALIASES, *RETIRED)]
    return [*model.model_fields, *(path[-1] for path in paths if path[:-1] == sections)]


def _contradictions(config: DavinciConfig) -> Iterator[str]:
    graph = config.torchair_graph_config
    if not graph.enabled:
        for name in GraphConfig.model_fields:
            if name in WITHOUT_GRAPHS:
                continue
            if getattr(graph, name) != GraphConfig.model_fields[name].default:
                yield f"torchair_graph_config.{name} is valid only when graph mode is enabled"
    if graph.use_cached_kv_cache_bytes and not graph.use_cached_graph:
        yield "torchair_graph_config.use_cached_kv_cache_bytes needs use_cached_graph"
    if graph.enable_super_kernel and not graph.enable_multistream_moe:
        yield "torchair_graph_config.enable_super_kernel needs enable_multistream_moe"
    if graph.graph_batch_sizes_init and graph.graph_batch_sizes:
        yield "torchair_graph_config.graph_batch_sizes_init excludes graph_batch_sizes: set one"
    if config.dbo.token_alignment > 1 and config.dbo.split != "token":
        yield (
            f"dbo.token_alignment = {config.dbo.token_alignment} is for cuts inside requests, and "
            f"dbo.split is {config.dbo.split!r}: set dbo.split to 'token', or remove the alignment"
        )
    yield from _against_schedule(config)
    scheduler = config.ascend_scheduler_config
    scheduler_keys = [*SchedulerOptions.model_fields, *_scheduler_fields()]
    for name in scheduler.model_extra or ():
        if (key := f"ascend_scheduler_config.{name}") in REPLACED:
            yield _replaced(key)
        elif name not in scheduler_keys:
            nearest = difflib.get_close_matches(name, scheduler_keys, n=1, cutoff=0)[0]
            yield (
                f"additional_config has no key 'ascend_scheduler_config.{name}'. "
                f"Did you mean 'ascend_scheduler_config.{nearest}'?"
            )
    if scheduler.model_extra and not scheduler.enabled:
        names = ", ".join(scheduler.model_extra)
        yield f"ascend_scheduler_config sets {names} and is not enabled: remove them"


def _against_schedule(config: DavinciConfig) -> Iterator[str]:
    for key, meant in SCHEDULES.get(config.overlap or "", {}).items():
        section, name = key.split(".")
        options = getattr(config, section)
        value = getattr(options, name)
        if name in options.model_fields_set and value != meant:
            yield (
                f"overlap = {config.overlap!r} stands for {key} = {json.dumps(meant)}, and "
                f"additional_config sets it to {json.dumps(value)}: remove one of the two"
            )


def _scheduler_fields() -> list[str]:
    from vllm.config import SchedulerConfig  # vllm.config is what imports the platform, and this

    return [field.name for field in dataclasses.fields(SchedulerConfig)]


def _unavailable(config: DavinciConfig) -> Iterator[str]:
    for key, value in non_default_options(config).items():
        feature = NOT_AVAILABLE.get(key)
        if feature is not None:
            yield (
                f"not available in {RELEASE}: {feature}, which additional_config key {key!r} = "
                f"{json.dumps(value, default=list)} asks for. Remove the key"
            )


def _differences(
    config: BaseModel, defaults: BaseModel, path: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    for name in type(config).model_fields:
        value, default = getattr(config, name), getattr(defaults, name)
        if isinstance(value, BaseModel):
            yield from _differences(value, default, (*path, name))
        elif value != default:
            yield ".".join((*path, name)), value
