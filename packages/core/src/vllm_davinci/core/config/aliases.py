"""Keys of `additional_config` from other releases of Ascend plugins: served, told of, answered."""

from collections.abc import Mapping
from typing import Any

from vllm_davinci.core.errors import ConfigurationError

# Older key -> the one that replaced it, with dots between section and name.
ALIASES: dict[str, str] = {
    "enable_graph_mode": "torchair_graph_config.enabled",
    "init_torchair_graph_batch_sizes": "torchair_graph_config.graph_batch_sizes_init",
    "dbo.num_micro_batches": "dbo.num_ubatches",
}

# Older keys that stand for nothing a release can turn on.
RETIRED: dict[str, str] = {
    "enable_inter_dp_scheduling": "it never had an effect",
    "trace_recompiles": "nothing is compiled; the log lists graphs when they are captured",
}

# The alias of a key that is an error without graph mode. Itself it is not: published commands give
# it together with enable_graph_mode = false.
SIZES_ALIAS = "init_torchair_graph_batch_sizes"
SIZES_NOTE = "has no effect: torchair_graph_config.enabled is false"

# Keys that are gone or never were here -> what to write today.
REPLACED: dict[str, str] = {
    "enable_dbo": "dbo.enabled",
    "enable_kv_nz": "torchair_graph_config.enable_kv_nz",
    "enable_multistream_mla": "torchair_graph_config.enable_multistream_mla",
    "enable_multistream_moe": "torchair_graph_config.enable_multistream_moe",
    "enable_multistream_shared_expert": "torchair_graph_config.enable_multistream_moe",
    "multistream_overlap_shared_expert": "torchair_graph_config.enable_multistream_moe",
    "torchair_graph_config.enable_multistream_shared_expert": (
        "torchair_graph_config.enable_multistream_moe"
    ),
    "torchair_graph_batch_sizes": "torchair_graph_config.graph_batch_sizes",
    "graph_batch_sizes": "torchair_graph_config.graph_batch_sizes",
    "graph_batch_sizes_init": "torchair_graph_config.graph_batch_sizes_init",
    "use_cached_graph": "torchair_graph_config.use_cached_graph",
    "use_cached_kv_cache_bytes": "torchair_graph_config.use_cached_kv_cache_bytes",
    "lmhead_tensor_parallel_size": "lmhead_tp_size",
    "max_num_batched_tokens": "--max-num-batched-tokens of vLLM",
    "max_num_seqs": "--max-num-seqs of vLLM",
    "torchair_graph_config.mode": "nothing: graphs are captured, and nothing is compiled",
    "torchair_graph_config.enable_frozen_parameter": (
        "nothing: a captured graph reads its weights where they lie"
    ),
    "ascend_compilation_config": "-cc.cudagraph_mode of vLLM",
    "xlite_graph_config": "-cc.cudagraph_mode of vLLM",
    "enable_npugraph_ex": "-cc.cudagraph_mode of vLLM",
    "eplb_config": "dynamic_eplb, num_iterations_eplb_update and num_wait_worker_iterations",
    "enable_shared_expert_dp": "overlap, which decides how shared experts are reduced",
    "ascend_scheduler_config.num_scheduler_steps": (
        "--async-scheduling of vLLM, which no longer has steps of several tokens"
    ),
    "ascend_scheduler_config.delay_factor": "nothing: vLLM no longer delays prompts",
    "ascend_scheduler_config.max_num_partial_prefills": (
        "ascend_scheduler_config.enable_chunked_prefill, with vLLM's own scheduler"
    ),
    "ascend_scheduler_config.max_long_partial_prefills": (
        "ascend_scheduler_config.enable_chunked_prefill, with vLLM's own scheduler"
    ),
    "ascend_scheduler_config.enable_pd_transfer": "--kv-transfer-config of vLLM",
    "ascend_scheduler_config.decode_max_num_seqs": "--max-num-seqs of vLLM",
}

_ABSENT = object()


def canonical(additional_config: Any) -> dict[str, Any]:
    """The same options under today's keys. What is given stays as it is.

    additional_config: a mapping of JSON values, or None
    Raises ConfigurationError for any other type, for an older key whose value differs from that of
    its replacement, and for a retired key that is no bool.
    """
    if additional_config is None:
        return {}
    if not isinstance(additional_config, Mapping):
        raise ConfigurationError(
            f"additional_config is a {type(additional_config).__name__}, and must be a JSON "
            "object: --additional-config '{\"dbo\": {}}'."
        )
    options = dict(additional_config)
    for key in RETIRED:
        value = options.pop(key, True)
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"additional_config key {key!r} is {value!r} ({type(value).__name__}): "
                "expected a bool."
            )
    if _is_sizes_alias_without_graphs(options):
        if not isinstance(options[SIZES_ALIAS], bool):
            raise ConfigurationError(
                f"additional_config key {SIZES_ALIAS!r} is {options[SIZES_ALIAS]!r} "
                f"({type(options[SIZES_ALIAS]).__name__}): expected a bool."
            )
        del options[SIZES_ALIAS]
    for alias, key in ALIASES.items():
        value, replacement = _value(options, alias), _value(options, key)
        if value is _ABSENT:
            continue
        if replacement not in (_ABSENT, value):
            raise ConfigurationError(
                f"additional_config sets {alias!r} to {value!r} and its replacement {key!r} to "
                f"{replacement!r}. Remove {alias!r}."
            )
        options = _moved(options, alias, key, value)
    return options


def older_keys(additional_config: Any) -> dict[str, str]:
    """Keys in use that are accepted without effect or under an older name -> what to know."""
    if not isinstance(additional_config, Mapping):
        return {}
    notes = {
        alias: f"is an older spelling of {key}"
        for alias, key in ALIASES.items()
        if _value(additional_config, alias) is not _ABSENT
    }
    if _is_sizes_alias_without_graphs(additional_config):
        notes[SIZES_ALIAS] = SIZES_NOTE
    return notes | {
        key: f"has no effect: {why}" for key, why in RETIRED.items() if key in additional_config
    }


def key_in_use(additional_config: Mapping[str, Any], key: str) -> str:
    """The spelling of an option that the user chose, today's key if none."""
    used = (alias for alias, today in ALIASES.items() if today == key)
    given = (each for each in used if _value(additional_config, each) is not _ABSENT)
    return key if _value(additional_config, key) is not _ABSENT else next(given, key)


def _is_sizes_alias_without_graphs(options: Mapping[str, Any]) -> bool:
    enabled = (_value(options, "torchair_graph_config.enabled"), options.get("enable_graph_mode"))
    return SIZES_ALIAS in options and True not in enabled


def _value(options: Mapping[str, Any], key: str) -> Any:
    value: Any = options
    for name in key.split("."):
        value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
    return value


def _moved(options: dict[str, Any], alias: str, key: str, value: Any) -> dict[str, Any]:
    """Copies of the options, with a value under `key` instead of `alias`."""
    *sections, name = alias.split(".")
    moved = dict(options)
    if sections:
        (section,) = sections
        moved[section] = {each: of for each, of in options[section].items() if each != name}
    else:
        del moved[name]
    section, name = key.split(".")
    inner = moved.get(section, {})
    if isinstance(inner, Mapping):  # else the typed model reports the section's type
        moved[section] = {**inner, name: value}
    return moved
