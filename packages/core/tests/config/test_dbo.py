"""Dual-batch overlap: every way to ask for it, and what contradicts it."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig

from vllm_davinci.core import components
from vllm_davinci.core.config.dbo import THRESHOLDS, check_overlap, gather_requests
from vllm_davinci.core.config.options import DualBatchConfig
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.errors import ComponentError, ConfigurationError


def config(**parallel: Any) -> VllmConfig:
    additional = parallel.pop("additional_config", {})
    made = VllmConfig(device_config=DeviceConfig(device="npu"))
    made.additional_config = additional
    for name, value in parallel.items():
        setattr(made.parallel_config, name, value)
    return made


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
def test_flags_of_vllm_become_options_and_are_reset(
    flags: dict[str, Any], options: dict[str, Any], vllm_config: VllmConfig
):
    asked = config(**flags)
    notes = gather_requests(asked, {}).notes
    expected = DualBatchConfig().model_copy(update=options)
    assert get_config(asked).dbo == expected
    assert not asked.parallel_config.use_ubatching
    for field, (default, _) in THRESHOLDS.items():
        assert getattr(asked.parallel_config, field) == default
    assert len(notes) == len(options)
    assert all(note.startswith("--") for note in notes)
    assert gather_requests(asked, {}).notes == []
    assert get_config(asked).dbo == expected


def test_the_defaults_of_the_thresholds_are_those_of_vllm():
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
def test_a_flag_that_contradicts_an_option_names_both(
    flags: dict[str, Any], dbo: dict[str, Any], vllm_config: VllmConfig
):
    (name,) = dbo
    with pytest.raises(
        ConfigurationError, match=rf"--.* asks for dbo\..* dbo\.{name} to .*Remove one"
    ):
        gather_requests(config(**flags, additional_config={"dbo": dbo}), {})


@pytest.mark.parametrize("name", ["num_ubatches", "num_micro_batches"])
def test_a_flag_and_an_option_may_say_the_same(name: str, vllm_config: VllmConfig):
    asked = config(ubatch_size=3, additional_config={"dbo": {name: 3}})
    gather_requests(asked, {})
    assert get_config(asked).dbo == DualBatchConfig(enabled=True, num_ubatches=3)


@pytest.mark.parametrize("variable", ["VLLM_ASCEND_ENABLE_DBO", "VLLM_ENABLE_DBO"])
def test_variables_of_earlier_plugins_turn_it_on(variable: str, vllm_config: VllmConfig):
    asked = config()
    (note,) = gather_requests(asked, {variable: "1"}).notes
    assert variable in note
    assert get_config(asked).dbo.enabled
    for value in ("0", ""):
        asked = config()
        assert gather_requests(asked, {variable: value}).notes == []
        assert not get_config(asked).dbo.enabled
    with pytest.raises(ConfigurationError, match=f"{variable}='yes' is not valid"):
        gather_requests(config(), {variable: "yes"})


def test_an_option_wins_over_a_variable_and_the_conflict_is_told(vllm_config: VllmConfig):
    asked = config(additional_config={"dbo": {"enabled": False}})
    (note,) = gather_requests(asked, {"VLLM_ASCEND_ENABLE_DBO": "1"}).notes
    assert "has no effect" in note
    assert not get_config(asked).dbo.enabled


def test_other_options_are_kept(vllm_config: VllmConfig):
    asked = config(enable_dbo=True, additional_config={"refresh": True, "dbo": {"split": "token"}})
    gather_requests(asked, {})
    assert asked.additional_config == {"refresh": True, "dbo": {"split": "token", "enabled": True}}


ON = DualBatchConfig(enabled=True)


def test_without_the_package_the_error_names_it(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(components, "stream_scheduler", lambda: None)
    with pytest.raises(ComponentError, match="pip install vllm-davinci-multistream"):
        check_overlap(config(tensor_parallel_size=2), ON)
    assert check_overlap(config(), DualBatchConfig()) == []


def test_speculative_decoding_is_refused_with_its_method(vllm_config: VllmConfig):
    asked = config(tensor_parallel_size=2)
    asked.speculative_config = SimpleNamespace(method="deepseek_mtp")
    with pytest.raises(ConfigurationError, match=r"method 'deepseek_mtp'.*Remove dbo\.enabled"):
        check_overlap(asked, ON)
    assert check_overlap(asked, DualBatchConfig()) == []


def test_more_parts_than_a_step_can_have_tokens_are_refused(vllm_config: VllmConfig):
    asked = config(tensor_parallel_size=2)
    asked.scheduler_config.max_num_batched_tokens = 3
    with pytest.raises(ConfigurationError, match="num_ubatches = 4 parts"):
        check_overlap(asked, DualBatchConfig(enabled=True, num_ubatches=4))


def test_what_will_never_be_split_is_told(vllm_config: VllmConfig):
    assert check_overlap(config(tensor_parallel_size=2), ON) == []
    (alone,) = check_overlap(config(), ON)
    assert "one rank computes each layer alone" in alone
    few = config(tensor_parallel_size=2)
    few.scheduler_config.max_num_batched_tokens = 128
    (never,) = check_overlap(few, ON)
    assert "no step with a prefill will be split" in never
