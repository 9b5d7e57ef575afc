"""additional_config: accepted values, and texts of errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.config.other_keys import OTHER_KEYS
from vllm_davinci.core.config.parsing import (
    KEYS_OF_VLLM,
    given_options,
    non_default_options,
    parse_config,
)
from vllm_davinci.core.config.row import Refused, Row
from vllm_davinci.core.config.table import json_schema, table
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci_testing.engines.split_settings import PUBLISHED

REFUSED = [row for row in OTHER_KEYS if isinstance(row.fate, Refused)]
ALL_KEYS = [row.key for row in table() if row not in REFUSED]


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
    misspelt = f"{key}q"
    with pytest.raises(ConfigurationError, match=f"Did you mean '{key}'") as caught:
        parse_config(nested(misspelt, 1))
    assert repr(misspelt) in str(caught.value)


@given(st.text(min_size=1, max_size=30).filter(lambda key: all(key != row.key for row in table())))
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
def test_an_ill_typed_value_is_an_error_with_key_value_and_type(key, value, expected):
    with pytest.raises(ConfigurationError) as caught:
        parse_config(nested(key, value))
    message = str(caught.value)
    assert repr(key) in message
    assert repr(value) in message
    assert type(value).__name__ in message
    assert expected in message


@pytest.mark.parametrize("whole", ["{}", 3, ["dbo"]])
def test_options_that_are_not_an_object_are_an_error(whole: object):
    with pytest.raises(ConfigurationError, match="must be a JSON object"):
        parse_config(whole)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.key)
def test_a_refused_key_says_why_and_what_to_do(row: Row):
    assert isinstance(row.fate, Refused)
    with pytest.raises(
        ConfigurationError, match=r"not available in vllm-davinci-core 0\.1: "
    ) as got:
        parse_config(nested(row.key, 7))
    told = f"{row.key!r} = 7 is refused: {row.fate.because}. {row.fate.instead}."
    assert told in str(got.value)
    if row.default is not ...:
        assert parse_config(nested(row.key, row.default)) == DavinciConfig()


def test_advice_names_keys_that_are_not_refused():
    refused = {row.key for row in REFUSED}
    for row in OTHER_KEYS:
        words = {word.strip(",;.") for word in row.fate.told().split()}
        assert not words & refused, row


def test_every_row_reads_as_a_sentence():
    keys = [row.key for row in table()]
    assert len(set(keys)) == len(keys)
    for row in table():
        assert row.meaning[0].isupper(), row
        assert row.meaning.endswith("."), row


def test_the_schema_has_every_key_with_its_fate():
    schema = json_schema()
    for row in table():
        section = schema
        *path, name = row.key.split(".")
        for each in path:
            reference = section["properties"][each]["$ref"]
            section = schema["$defs"][reference.rpartition("/")[2]]
        described = section["properties"][name]
        if row in REFUSED:
            assert described.get("const", ...) == row.default
        if row in OTHER_KEYS:
            assert row.fate.told() in described["description"]
        else:
            assert " ".join(described["description"].split()) == " ".join(row.meaning.split())


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
            "enable_super_kernel = true needs enable_multistream_moe",
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
def test_graph_sizes_that_are_not_integers_are_an_error(sizes: list[object]):
    with pytest.raises(ConfigurationError, match=r"graph_batch_sizes\.0' is .*valid integer"):
        parse_config({"torchair_graph_config": {"enabled": True, "graph_batch_sizes": sizes}})


def notes_of(options: dict[str, object]) -> dict[str, str]:
    """Returns, for each current key, the note's text after the key."""
    told = (note.rstrip(".").split("'") for note in given_options(options).notes())
    return {key: rest.strip() for _, key, rest in told}


def test_sizes_of_graphs_without_graph_mode_are_a_note_under_the_older_name():
    published = dict(PUBLISHED)
    assert parse_config(published) == DavinciConfig(expert_tensor_parallel_size=1)
    assert notes_of(published)["init_torchair_graph_batch_sizes"] == (
        "has no effect: torchair_graph_config.enabled is false"
    )
    published["enable_graph_mode"] = True
    assert parse_config(published).torchair_graph_config.graph_batch_sizes_init
    with pytest.raises(ConfigurationError, match="expected a valid bool"):
        parse_config({"init_torchair_graph_batch_sizes": 1})


def test_older_spellings_are_accepted_and_reported_with_their_replacement():
    options = {
        "enable_graph_mode": False,
        "trace_recompiles": True,
        "enable_inter_dp_scheduling": True,
        "dbo": {"num_micro_batches": 2},
    }
    assert parse_config(options) == DavinciConfig()
    notes = notes_of(options)
    assert "torchair_graph_config.enabled" in notes["enable_graph_mode"]
    assert "dbo.num_ubatches" in notes["dbo.num_micro_batches"]
    assert "has no effect" in notes["trace_recompiles"]
    assert "has no effect" in notes["enable_inter_dp_scheduling"]


def test_an_older_spelling_and_its_replacement_may_have_equal_values():
    config = parse_config({"dbo": {"num_micro_batches": 3, "num_ubatches": 3}})
    assert config.dbo.num_ubatches == 3
    assert "num_micro_batches" not in str(DavinciConfig.model_json_schema())


def test_options_cannot_be_changed_after_parsing():
    config = parse_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.overlap = "off"  # type: ignore[misc]
