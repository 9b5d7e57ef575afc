"""The plugin's options: one typed model, the only reader of vLLM's `additional_config`."""

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from vllm_davinci.core.errors import RELEASE, ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Keys that vLLM 0.29 itself puts into additional_config (config/vllm.py).
KEYS_OF_VLLM = frozenset({"gdn_prefill_backend", "kda_prefill_backend"})


def _digits_to_int(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class _Options(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


class GraphConfig(_Options):
    """Whole-model decode graph. The key's name is historical."""

    enabled: bool = False
    """Capture decode steps and replay them. Excludes --enforce-eager."""
    use_cached_graph: bool = False
    """Reuse a graph that an earlier run stored under the same shape key."""
    use_cached_kv_cache_bytes: bool = False
    """Reuse the recorded KV cache size. Needs use_cached_graph."""
    graph_batch_sizes: tuple[int, ...] = Field(default=(), strict=False)
    """Padded decode sizes, in requests."""
    graph_batch_sizes_init: bool = False
    """Derive the sizes. Excludes graph_batch_sizes."""
    enable_multistream_mla: bool = False
    """Run the vector work of MLA beside its matrix work, in steps of decodes alone.
    Works without graph mode."""
    enable_multistream_moe: bool = False
    """Run shared experts beside routed ones. Works without graph mode."""
    enable_view_optimize: bool = True
    """Fold views when compiling."""
    enable_kv_nz: bool = False
    """Blocked (NZ) layout of the latent KV cache."""
    enable_super_kernel: bool = False
    """Fuse consecutive kernels. Needs enabled and enable_multistream_moe."""


class SchedulerOptions(BaseModel):
    """Prefill-first scheduler. Further keys override SchedulerConfig fields of their names."""

    model_config = ConfigDict(
        extra="allow", strict=True, frozen=True, use_attribute_docstrings=True
    )

    enabled: bool = False
    """Schedule whole prompts before decodes."""


class DualBatchConfig(_Options):
    """Dual-batch overlap: one ubatch computes while the other communicates."""

    enabled: bool = False
    """Split steps that gain from it."""
    num_ubatches: int = Field(
        default=2, ge=2, validation_alias=AliasChoices("num_ubatches", "num_micro_batches")
    )
    """Parts a step is split into."""
    min_total_tokens_to_split: int = Field(default=256, ge=0)
    """Steps with fewer scheduled tokens stay whole."""
    min_prefill_tokens_to_split: int = Field(default=64, ge=0)
    """Steps with fewer prefill tokens stay whole."""
    imbalance_ratio: float = Field(default=0.1, ge=0, le=1)
    """How far from the middle a cut may be, as a share of the step's tokens."""
    split: Literal["request", "token"] = "request"
    """Cut between requests only, or also inside one."""
    decode: bool = False
    """Split steps without a prefill too."""
    min_decode_tokens_to_split: int = Field(default=32, ge=0)
    """Steps without a prefill and with fewer tokens stay whole."""
    token_alignment: int = Field(default=1, ge=1)
    """Cuts are at multiples of so many tokens. Needs split = "token"."""


class SequenceParallelConfig(_Options):
    """Sequence parallelism of tensor-parallel ranks between attention and MLP."""

    enabled: bool = True
    """Use it in models whose definition is sequence parallel (vllm-davinci-models)."""
    min_tokens: int = Field(default=256, ge=1)
    """Steps with fewer tokens all-reduce: two small collectives take longer than one."""


class DavinciConfig(_Options):
    """Every key of `--additional-config`."""

    torchair_graph_config: GraphConfig = GraphConfig()
    """Whole-model decode graph."""
    ascend_scheduler_config: SchedulerOptions = SchedulerOptions()
    """Prefill-first scheduler."""
    dbo: DualBatchConfig = DualBatchConfig()
    """Dual-batch overlap."""
    overlap: Literal["auto", "off", "published", "lean"] | None = None
    """The schedule as a whole: nothing, the published one, the one with fewer reductions, or a
    choice for this engine, whose reasons are logged. Not set: the single options say."""
    sequence_parallel: SequenceParallelConfig = SequenceParallelConfig()
    """Sequence parallelism of tensor-parallel ranks between attention and MLP."""
    expert_tensor_parallel_size: Annotated[int, BeforeValidator(_digits_to_int)] = Field(
        default=0, ge=0
    )
    """Ranks that share one expert. 0 chooses automatically: as many as share a tensor. With
    --enable-expert-parallel experts are whole: it stands for 1, and a larger value is refused."""
    expert_map_path: str | None = None
    """JSON file with a static placement of experts."""
    moe_communication: Literal["auto", "all_gather", "multicast", "all_to_all", "fused"] = "auto"
    """How tokens reach their experts' ranks; auto chooses for each step and logs the reason."""
    dynamic_eplb: bool = False
    """Balance experts while serving."""
    num_iterations_eplb_update: int = Field(default=400, gt=0)
    """Steps between two updates of the placement."""
    num_wait_worker_iterations: int = Field(default=30, gt=0)
    """Steps to wait for the placement's computation."""
    gate_eplb: bool = False
    """Collect expert loads in the gate."""
    chunked_prefill_for_mla: bool = False
    """Fused operator for chunked prefill of MLA: always used, whatever this says."""
    kv_cache_dtype: Literal["int8"] | None = None
    """Store the KV cache quantized."""
    enable_weight_nz_layout: bool = False
    """Cast quantized weights to the NZ layout."""
    enable_prefill_optimizations: bool = False
    """DeepSeek's prefill operators."""
    enable_compiled_operators: bool = True
    """Launch whole stages with the operators of vllm-davinci-kernels, where it is installed."""
    enable_cpu_binding: bool = False
    """Bind each worker's threads to cores near its device."""
    lmhead_tp_size: int = -1
    """Tensor parallel size of the LM head alone; -1 uses the model's."""
    refresh: bool = False
    """Read the options anew although an engine exists. Accepted; they always are."""


# Keys of torchair_graph_config that mean something without graph mode.
WITHOUT_GRAPHS = (
    "enabled",
    "enable_view_optimize",
    "enable_multistream_mla",
    "enable_multistream_moe",
)

# Older spelling -> path of the key that replaced it.
ALIASES: dict[str, tuple[str, ...]] = {
    "enable_graph_mode": ("torchair_graph_config", "enabled"),
    "init_torchair_graph_batch_sizes": ("torchair_graph_config", "graph_batch_sizes_init"),
}

# Older keys that stand for nothing a release can turn on.
RETIRED: dict[str, str] = {
    "enable_inter_dp_scheduling": "it never had an effect",
    "trace_recompiles": "nothing is compiled without graph mode",
}

# Keys whose feature is not in this release -> what they ask for. Their defaults are accepted.
NOT_AVAILABLE: dict[str, str] = {
    "torchair_graph_config.enabled": "graph mode",
    "torchair_graph_config.enable_view_optimize": "graph mode",
    "ascend_scheduler_config.enabled": "the prefill-first scheduler",
    "dynamic_eplb": "dynamic expert balancing",
    "num_iterations_eplb_update": "dynamic expert balancing",
    "num_wait_worker_iterations": "dynamic expert balancing",
    "gate_eplb": "dynamic expert balancing",
    "kv_cache_dtype": "a quantized KV cache",
    "enable_prefill_optimizations": "DeepSeek's prefill operators",
    "enable_cpu_binding": "CPU binding",
    "lmhead_tp_size": "a tensor parallel size of the LM head alone",
}


def get_config(vllm_config: "VllmConfig") -> DavinciConfig:
    """The options of an engine. Raises what parse_config raises."""
    return parse_config(vllm_config.additional_config)


def parse_config(additional_config: Any) -> DavinciConfig:
    """Options from the value of `--additional-config`.

    additional_config: a mapping of JSON values, or None
    Raises ConfigurationError for an unknown key (naming the nearest known one), an ill-typed
    value, a contradiction, and a feature that this release does not have.
    """
    options = _without_aliases(_mapping(additional_config))
    try:
        config = DavinciConfig.model_validate(options)
    except ValidationError as error:
        raise ConfigurationError("; ".join(_explain(error, options))) from None
    if contradictions := list(_contradictions(config)):
        raise ConfigurationError("; ".join(contradictions))
    if unavailable := list(_unavailable(config)):
        raise ConfigurationError("; ".join(unavailable))
    return config


def retired_keys(additional_config: Any) -> dict[str, str]:
    """Keys in use that are accepted without effect or under an older name -> what to know."""
    used = _mapping(additional_config)
    notes = {
        key: f"is an older spelling of {'.'.join(path)}"
        for key, path in ALIASES.items()
        if key in used
    }
    notes |= {key: f"has no effect: {why}" for key, why in RETIRED.items() if key in used}
    return notes


def non_default_options(config: DavinciConfig) -> dict[str, Any]:
    """Dotted key -> value for every option that differs from its default."""
    return dict(_differences(config, DavinciConfig(), ()))


def _mapping(additional_config: Any) -> dict[str, Any]:
    if additional_config is None:
        return {}
    if not isinstance(additional_config, Mapping):
        raise ConfigurationError(
            f"additional_config is a {type(additional_config).__name__}, and must be a JSON "
            "object: --additional-config '{\"dbo\": {}}'."
        )
    return {key: value for key, value in additional_config.items() if key not in KEYS_OF_VLLM}


def _without_aliases(used: dict[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in used.items() if key not in ALIASES}
    for key in RETIRED:
        if key in options and not isinstance(options.pop(key), bool):
            raise ConfigurationError(
                f"additional_config key {key!r} is {used[key]!r} ({type(used[key]).__name__}): "
                "expected a bool."
            )
    for key, (section, name) in ALIASES.items():
        if key not in used:
            continue
        inner = options.get(section, {})
        if not isinstance(inner, Mapping):
            continue  # the model reports the section's type
        if name in inner and inner[name] != used[key]:
            raise ConfigurationError(
                f"additional_config sets {key!r} to {used[key]!r} and its replacement "
                f"'{section}.{name}' to {inner[name]!r}. Remove {key!r}."
            )
        options[section] = {**inner, name: used[key]}
    return options


def _explain(error: ValidationError, options: dict[str, Any]) -> Iterator[str]:
    for detail in error.errors():
        location = [str(part) for part in detail["loc"]]
        key = ".".join(location)
        if detail["type"] == "extra_forbidden":
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


def _expectation(message: str) -> str:
    return message.replace("Input should be", "expected").rstrip(".")


def _known_keys(sections: list[str]) -> list[str]:
    model: type[BaseModel] = DavinciConfig
    for section in sections:
        inner = model.model_fields[section].annotation
        assert isinstance(inner, type)
        model = inner
    top_level = [*ALIASES, *RETIRED] if model is DavinciConfig else []
    return [*model.model_fields, *top_level]


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
        if name not in scheduler_keys:
            nearest = difflib.get_close_matches(name, scheduler_keys, n=1, cutoff=0)[0]
            yield (
                f"additional_config has no key 'ascend_scheduler_config.{name}'. "
                f"Did you mean 'ascend_scheduler_config.{nearest}'?"
            )
    if scheduler.model_extra and not scheduler.enabled:
        names = ", ".join(scheduler.model_extra)
        yield f"ascend_scheduler_config sets {names} and is not enabled: remove them"


# Schedule -> dotted key -> the value that it stands for.
SCHEDULES: dict[str, dict[str, bool]] = {
    "off": {
        "dbo.enabled": False,
        "torchair_graph_config.enable_multistream_mla": False,
        "torchair_graph_config.enable_multistream_moe": False,
        "sequence_parallel.enabled": False,
    },
    "published": {
        "dbo.enabled": True,
        "torchair_graph_config.enable_multistream_mla": True,
        "torchair_graph_config.enable_multistream_moe": True,
        "sequence_parallel.enabled": False,
    },
    "lean": {
        "dbo.enabled": True,
        "torchair_graph_config.enable_multistream_mla": True,
        "torchair_graph_config.enable_multistream_moe": True,
        "sequence_parallel.enabled": True,
    },
}


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
