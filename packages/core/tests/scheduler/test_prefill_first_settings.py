"""The scheduler that a configuration gets, and what its options override."""

import pytest

from vllm_davinci.core.scheduler.prefill_first import (
    AsyncPrefillFirstScheduler,
    PrefillFirstScheduler,
)
from vllm_davinci_testing.engines.served_scheduler import Served, engine_config


def test_async_scheduling_decides_the_class():
    for is_asynchronous, kind in [
        (False, PrefillFirstScheduler),
        (True, AsyncPrefillFirstScheduler),
    ]:
        assert type(Served(9, async_scheduling=is_asynchronous).scheduler) is kind


# --- the choice of the scheduler -----------------------------------------------------------


def test_chunked_prefill_in_the_section_leaves_vllm_s_scheduler():
    section = {"enabled": True, "enable_chunked_prefill": True, "max_num_seqs": 3}
    config = engine_config(section)
    assert config.scheduler_config.scheduler_cls is None
    assert config.scheduler_config.max_num_seqs == 3
    assert config.scheduler_config.watermark == 0


def test_keys_override_vllm_s_fields_and_the_watermark_has_another_default():
    section = {"enabled": True, "max_num_batched_tokens": 4096, "max_num_seqs": 5}
    config = engine_config(section, max_num_seqs=7, max_model_len=1024).scheduler_config
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (4096, 5)
    assert config.watermark == 0.01
    assert engine_config({"enabled": True}, watermark=0.2).scheduler_config.watermark == 0.2


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        ({"policy": "priority"}, {}, "--scheduling-policy priority .*whole prompts"),
        ({}, {"scheduling_policy": "priority"}, "--scheduling-policy priority .*not supported"),
        ({"policy": "lifo"}, {}, "'ascend_scheduler_config.policy' is 'lifo'"),
        ({"max_num_seqs": "many"}, {}, r"max_num_seqs' is 'many' \(str\)"),
        ({"max_num_seqs": 0}, {}, "greater than or equal to 1"),
        ({"max_num_seqs": 99}, {"max_num_batched_tokens": 64}, "does not fit the model"),
        ({"scheduler_cls": "mine.Scheduler"}, {}, "Remove the key"),
        ({"long_prefill_token_threshold": 64}, {}, "--long-prefill-token-threshold 64 "),
        ({"async_scheduling": True}, {"async_scheduling": False}, "--no-async-scheduling"),
        ({}, {"scheduler_cls": "mine.Scheduler"}, "--scheduler-cls mine.Scheduler "),
        ({"max_num_sequences": 4}, {}, "Did you mean 'ascend_scheduler_config.max_num_seqs'"),
        ({"num_scheduler_steps": 8}, {}, "no longer has steps of several tokens"),
    ],
)
def test_unsupported_settings_end_the_configuration(section, options, message):
    with pytest.raises(ValueError, match=message):
        engine_config({"enabled": True, **section}, **options)
