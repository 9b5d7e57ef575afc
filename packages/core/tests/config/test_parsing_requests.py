"""vLLM's flags and other plugins' variables become options, unless the options are given."""

from typing import Any

import pytest
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig

from vllm_davinci.core.config.options import DualBatchConfig
from vllm_davinci.core.config.parsing import THRESHOLDS, get_config
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.resolution import resolve

ALL_GATHER = "VLLM_ENABLE_FUSED_EXPERTS_ALLGATHER_EP"
ALL_TO_ALL = "VLLM_ASCEND_ENABLE_MOE_ALL2ALL_SEQ"


def config(additional_config: dict[str, Any] | None = None, **parallel: Any) -> VllmConfig:
    made = VllmConfig(device_config=DeviceConfig(device="npu"))
    made.additional_config = additional_config or {}
    for name, value in parallel.items():
        setattr(made.parallel_config, name, value)
    return made


def notes(asked: VllmConfig, environ: dict[str, str] | None = None) -> list[str]:
    """Returns notes on flags and variables; test_overlap.py has impossible overlap options."""
    return [note for note in resolve(asked, environ or {}).warnings if "sequence" not in note]


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ({"enable_dbo": True}, {"enabled": True}),
        ({"ubatch_size": 3}, {"enabled": True, "num_ubatches": 3}),
        ({"enable_dbo": True, "ubatch_size": 1}, {"enabled": True}),
        ({"dbo_prefill_token_threshold": 300}, {"min_total_tokens_to_split": 300}),
        ({"dbo_decode_token_threshold": 8}, {"min_decode_tokens_to_split": 8}),
        ({}, {}),
    ],
)
def test_flags_of_vllm_become_options_and_are_reset(flags, options, vllm_config):
    asked = config(**flags)
    told = notes(asked)
    expected = DualBatchConfig().model_copy(update=options)
    assert get_config(asked).dbo == expected
    assert not asked.parallel_config.use_ubatching
    for field, (default, _) in THRESHOLDS.items():
        assert getattr(asked.parallel_config, field) == default
    assert len(told) == len(options)
    assert all(note.startswith("--") for note in told)
    assert notes(asked) == []
    assert get_config(asked).dbo == expected


def test_the_defaults_of_the_thresholds_equal_those_of_vllm():
    for field, (default, _) in THRESHOLDS.items():
        assert getattr(ParallelConfig(), field) == default


@pytest.mark.parametrize(
    ("flags", "dbo"),
    [
        ({"enable_dbo": True}, {"enabled": False}),
        ({"ubatch_size": 3}, {"num_ubatches": 2}),
        ({"ubatch_size": 3}, {"num_micro_batches": 2}),
        ({"dbo_prefill_token_threshold": 300}, {"min_total_tokens_to_split": 256}),
    ],
)
def test_a_flag_that_contradicts_an_option_names_both(flags, dbo, vllm_config):
    (name,) = dbo
    with pytest.raises(
        ConfigurationError, match=rf"--.* asks for dbo\..* dbo\.{name} to .*Remove one"
    ):
        notes(config({"dbo": dbo}, **flags))


@pytest.mark.parametrize("name", ["num_ubatches", "num_micro_batches"])
def test_a_flag_and_an_option_may_have_equal_values(name: str, vllm_config: VllmConfig):
    asked = config({"dbo": {name: 3}}, ubatch_size=3)
    notes(asked)
    assert get_config(asked).dbo == DualBatchConfig(enabled=True, num_ubatches=3)


@pytest.mark.parametrize("variable", ["VLLM_ASCEND_ENABLE_DBO", "VLLM_ENABLE_DBO"])
def test_variables_of_earlier_plugins_turn_it_on(variable: str, vllm_config: VllmConfig):
    asked = config()
    (note,) = notes(asked, {variable: "1"})
    assert variable in note
    assert get_config(asked).dbo.enabled
    for value in ("0", ""):
        asked = config()
        assert notes(asked, {variable: value}) == []
        assert not get_config(asked).dbo.enabled
    with pytest.raises(ConfigurationError, match=f"{variable}='yes' is not valid"):
        notes(config(), {variable: "yes"})


def test_an_option_overrides_a_variable_and_the_conflict_is_reported(vllm_config: VllmConfig):
    asked = config({"dbo": {"enabled": False}})
    (note,) = notes(asked, {"VLLM_ASCEND_ENABLE_DBO": "1"})
    assert "has no effect" in note
    assert not get_config(asked).dbo.enabled


def test_other_options_are_unchanged(vllm_config: VllmConfig):
    asked = config({"lmhead_tp_size": 1, "dbo": {"split": "token"}}, enable_dbo=True)
    notes(asked)
    expected = {"lmhead_tp_size": 1, "dbo": {"split": "token", "enabled": True}}
    assert asked.additional_config == expected


@pytest.mark.parametrize(
    ("variable", "method"),
    [(ALL_GATHER, "all_gather"), (ALL_TO_ALL, "all_to_all"), ("VLLM_ENABLE_MC2", "fused")],
)
def test_variables_of_earlier_plugins_become_the_option(variable, method, vllm_config):
    asked = config({})
    (note,) = notes(asked, {variable: "1"})
    assert f"{variable}=1 is served as moe_communication = {method!r}" in note
    assert get_config(asked).moe_communication == method
    assert notes(asked, {variable: "1"}) == []


def test_a_method_wins_over_a_variable(vllm_config: VllmConfig):
    asked = config({"moe_communication": "multicast"})
    (note,) = notes(asked, {ALL_TO_ALL: "1"})
    assert "has no effect: additional_config sets moe_communication = 'multicast'" in note
    assert get_config(asked).moe_communication == "multicast"


@pytest.mark.parametrize("value", ["", "0"])
def test_a_variable_without_a_request_changes_nothing(value: str, vllm_config: VllmConfig):
    asked = config({})
    assert notes(asked, {ALL_TO_ALL: value}) == []
    assert get_config(asked).moe_communication == "auto"


def test_variables_that_contradict_each_other_or_do_not_parse_are_errors(vllm_config: VllmConfig):
    with pytest.raises(ConfigurationError, match="ask for different values of moe_communication"):
        notes(config({}), {ALL_GATHER: "1", ALL_TO_ALL: "1"})
    with pytest.raises(ConfigurationError, match=f"{ALL_TO_ALL}='yes' is not valid"):
        notes(config({}), {ALL_TO_ALL: "yes"})
