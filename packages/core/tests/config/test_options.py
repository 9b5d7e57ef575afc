"""additional_config: what is accepted, and what the errors say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci.core.config.aliases import ALIASES, REPLACED, RETIRED, older_keys
from vllm_davinci.core.config.options import DavinciConfig, DualBatchConfig, GraphConfig
from vllm_davinci.core.config.parsing import (
    KEYS_OF_VLLM,
    NOT_AVAILABLE,
    non_default_options,
    parse_config,
)
from vllm_davinci.core.errors import ConfigurationError

ALL_KEYS = [
    *DavinciConfig.model_fields,
    *ALIASES,
    *RETIRED,
    *(f"torchair_graph_config.{name}" for name in GraphConfig.model_fields),
    *(f"dbo.{name}" for name in DualBatchConfig.model_fields),
    "ascend_scheduler_config.enabled",
]


def nested(dotted: str, value: object) -> dict[str, object]:
    *sections, name = dotted.split(".")
    options: dict[str, object] = {name: value}
    for section in reversed(sections):
        options = {section: options}
    return options


@pytest.mark.parametrize("nothing", [None, {}])
def test_no_options_give_the_defaults(nothing: object):
    config = parse_config(nothing)
    assert config == DavinciConfig()
    assert non_default_options(config) == {}


def test_every_default_of_the_reference_is_accepted_when_written_out():
    written = DavinciConfig().model_dump()
    assert parse_config(written) == DavinciConfig()


def test_keys_that_vllm_adds_itself_are_exempt():
    assert parse_config(dict.fromkeys(KEYS_OF_VLLM, "triton")) == DavinciConfig()


def test_tuning_a_feature_that_is_off_is_accepted():
    config = parse_config({"dbo": {"min_total_tokens_to_split": 512, "split": "token"}})
    assert config.dbo.min_total_tokens_to_split == 512
    assert non_default_options(config) == {
        "dbo.min_total_tokens_to_split": 512,
        "dbo.split": "token",
    }


@pytest.mark.parametrize("key", ALL_KEYS)
def test_a_misspelt_key_is_an_error_that_names_the_right_one(key: str):
    misspelt = key[:-1] + "qq"
    with pytest.raises(ConfigurationError, match=f"Did you mean '{key}'") as caught:
        parse_config(nested(misspelt, 1))
    assert repr(misspelt) in str(caught.value)


@given(st.text(min_size=1, max_size=30).filter(lambda key: key not in ALL_KEYS))
def test_any_unknown_key_is_an_error_that_names_a_known_one(key: str):
    if key in KEYS_OF_VLLM:
        return
    with pytest.raises(ConfigurationError, match="Did you mean"):
        parse_config({key: 0})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("dbo.enabled", "yes", "bool"),
        ("dbo.enabled", 1, "bool"),
        ("dbo.split", "middle", "'request' or 'token'"),
        ("dbo.imbalance_ratio", 1.5, "less than or equal to 1"),
        ("dbo.num_ubatches", 1, "greater than or equal to 2"),
        ("dbo.min_total_tokens_to_split", 1.5, "integer"),
        ("dbo", True, "dictionary or instance of DualBatchConfig"),
        ("torchair_graph_config", [], "dictionary"),
        ("expert_tensor_parallel_size", "four", "integer"),
        ("expert_map_path", 3, "string"),
        ("kv_cache_dtype", "fp8", "'int8'"),
        ("lmhead_tp_size", None, "integer"),
        ("lmhead_tp_size", -2, "greater than or equal to -1"),
        ("torchair_graph_config.graph_batch_sizes", 24, "expected a list of integers"),
        ("torchair_graph_config.graph_batch_sizes", "24", "expected a list of integers"),
        ("enable_inter_dp_scheduling", "true", "bool"),
        ("refresh", 0, "bool"),
        ("weight_prefetch_config.max_bytes", 0, "greater than 0"),
        ("weight_prefetch_config.prefetch_ratio.moe.gate_up", 1.5, "less than or equal to 1"),
        ("weight_prefetch_config.prefetch_ratio.attn.o", "1", "number"),
    ],
)
def test_an_ill_typed_value_is_an_error_with_key_value_and_type(
    key: str, value: object, expected: str
):
    with pytest.raises(ConfigurationError) as caught:
        parse_config(nested(key, value))
    message = str(caught.value)
    assert repr(key) in message
    assert repr(value) in message
    assert type(value).__name__ in message
    assert expected in message


@pytest.mark.parametrize("whole", ["{}", 3, ["dbo"]])
def test_options_that_are_no_object_are_an_error(whole: object):
    with pytest.raises(ConfigurationError, match="must be a JSON object"):
        parse_config(whole)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dynamic_eplb", True),
        ("num_iterations_eplb_update", 10),
        ("num_wait_worker_iterations", 10),
        ("gate_eplb", True),
        ("kv_cache_dtype", "int8"),
    ],
)
def test_a_feature_this_release_lacks_is_refused_by_name(key: str, value: object):
    with pytest.raises(ConfigurationError, match=r"not available in vllm-davinci-core 0\.1: "):
        parse_config(nested(key, value))


def test_every_top_level_option_either_works_or_is_refused():
    """A new option must be put into one of the tables, so that none is ignored in silence."""
    works = {
        "dbo",
        "torchair_graph_config",
        "ascend_scheduler_config",
        "refresh",
        "chunked_prefill_for_mla",
        "enable_weight_nz_layout",
        "expert_tensor_parallel_size",
        "expert_map_path",
        "sequence_parallel",
        "weight_prefetch_config",
        "moe_communication",
        "overlap",
        "enable_compiled_operators",
        "enable_prefill_optimizations",
        "enable_cpu_binding",
        "lmhead_tp_size",
    }
    refused = {key for key in NOT_AVAILABLE if "." not in key}
    assert set(DavinciConfig.model_fields) == works | refused


@pytest.mark.parametrize("digits", [16, "16"])
def test_expert_tensor_parallel_size_may_be_a_string_of_digits(digits: object):
    config = parse_config({"expert_tensor_parallel_size": digits})
    assert config.expert_tensor_parallel_size == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torchair_graph_config": {"use_cached_graph": True}}, "only when graph mode is enabled"),
        ({"torchair_graph_config": {"graph_batch_sizes": [8]}}, "only when graph mode is enabled"),
        ({"torchair_graph_config": {"graph_batch_sizes_init": True}}, "only when graph mode is en"),
        (
            {"torchair_graph_config": {"enable_super_kernel": True}},
            "only when graph mode is enabled",
        ),
        (
            {"torchair_graph_config": {"enabled": True, "enable_super_kernel": True}},
            "enable_super_kernel needs enable_multistream_moe",
        ),
        (
            {"torchair_graph_config": {"enabled": True, "use_cached_kv_cache_bytes": True}},
            "needs use_cached_graph",
        ),
        (
            {
                "torchair_graph_config": {
                    "enabled": True,
                    "graph_batch_sizes_init": True,
                    "graph_batch_sizes": [8],
                }
            },
            "excludes graph_batch_sizes",
        ),
        ({"ascend_scheduler_config": {"policy": "fcfs"}}, "policy and is not enabled"),
        (
            {"enable_graph_mode": True, "torchair_graph_config": {"enabled": False}},
            "Remove 'enable_graph_mode'",
        ),
        (
            {"dbo": {"num_micro_batches": 3, "num_ubatches": 2}},
            r"'dbo.num_micro_batches' to 3 and .* 'dbo.num_ubatches' to 2",
        ),
    ],
)
def test_contradicting_options_are_an_error(options: dict[str, object], message: str):
    with pytest.raises(ConfigurationError, match=message):
        parse_config(options)


@pytest.mark.parametrize("sizes", [["8"], [8.0], [True], [None]])
def test_graph_sizes_that_are_no_integers_are_an_error(sizes: list[object]):
    with pytest.raises(ConfigurationError, match=r"graph_batch_sizes\.0' is .*valid integer"):
        parse_config({"torchair_graph_config": {"enabled": True, "graph_batch_sizes": sizes}})


@pytest.mark.parametrize("key", REPLACED)
def test_a_key_of_another_release_is_answered_with_today_s(key: str):
    options = nested(key, 1)
    if key.startswith("ascend_scheduler_config."):
        options["ascend_scheduler_config"]["enabled"] = True  # type: ignore[index]
    with pytest.raises(ConfigurationError) as caught:
        parse_config(options)
    assert f"has no key {key!r} in this release. Use {REPLACED[key]}" in str(caught.value)


def test_replacements_name_keys_that_exist():
    for key, today in REPLACED.items():
        assert key not in ALL_KEYS
        first = today.split()[0].rstrip(",:")
        assert first in ALL_KEYS or first.startswith(("-", "nothing", "ascend_scheduler")), today


def test_sizes_of_graphs_without_graph_mode_are_a_note_under_the_older_name():
    published = {
        "expert_tensor_parallel_size": 1,
        "enable_inter_dp_scheduling": True,
        "init_torchair_graph_batch_sizes": True,
        "trace_recompiles": True,
        "ascend_scheduler_config": {},
        "enable_graph_mode": False,
    }
    assert parse_config(published) == DavinciConfig(expert_tensor_parallel_size=1)
    assert older_keys(published)["init_torchair_graph_batch_sizes"] == (
        "has no effect: torchair_graph_config.enabled is false"
    )
    published["enable_graph_mode"] = True
    assert parse_config(published).torchair_graph_config.graph_batch_sizes_init
    with pytest.raises(ConfigurationError, match="expected a bool"):
        parse_config({"init_torchair_graph_batch_sizes": 1})


def test_older_spellings_are_accepted_and_reported_with_their_replacement():
    options = {
        "enable_graph_mode": False,
        "trace_recompiles": True,
        "enable_inter_dp_scheduling": True,
        "dbo": {"num_micro_batches": 2},
    }
    assert parse_config(options) == DavinciConfig()
    notes = older_keys(options)
    assert "torchair_graph_config.enabled" in notes["enable_graph_mode"]
    assert "dbo.num_ubatches" in notes["dbo.num_micro_batches"]
    assert "has no effect" in notes["trace_recompiles"]
    assert "has no effect" in notes["enable_inter_dp_scheduling"]


def test_an_older_spelling_beside_its_replacement_may_say_the_same():
    config = parse_config({"dbo": {"num_micro_batches": 3, "num_ubatches": 3}})
    assert config.dbo.num_ubatches == 3
    assert "num_micro_batches" not in str(DavinciConfig.model_json_schema())


def test_options_cannot_be_changed_after_parsing():
    config = parse_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.refresh = True  # type: ignore[misc]
