"""Dual-batch overlap: engines that cannot split, and messages about options."""

from typing import Any

import pytest
from vllm.config import DeviceConfig, VllmConfig

from vllm_davinci.core import components
from vllm_davinci.core.config.options import DavinciConfig, DualBatchConfig
from vllm_davinci.core.errors import ComponentError, ConfigurationError
from vllm_davinci.core.features.dual_batch import FEATURES
from vllm_davinci.core.features.feature import Engine


def config(**parallel: Any) -> VllmConfig:
    made = VllmConfig(device_config=DeviceConfig(device="npu"))
    for name, value in parallel.items():
        setattr(made.parallel_config, name, value)
    return made


ON = DualBatchConfig(enabled=True)


def check_overlap(vllm_config: VllmConfig, options: DualBatchConfig) -> list[str]:
    """Returns the warnings of an engine with these options."""
    engine = Engine(vllm_config, DavinciConfig(dbo=options))
    for row in FEATURES:
        if row.settle is not None and row.is_asked(engine):
            row.settle(engine)
    return engine.warnings


def test_without_the_package_the_error_names_it(vllm_config, monkeypatch):
    monkeypatch.setattr(components, "stream_scheduler", lambda: None)
    with pytest.raises(ComponentError, match="pip install vllm-davinci-multistream"):
        check_overlap(config(tensor_parallel_size=2), ON)
    assert check_overlap(config(), DualBatchConfig()) == []


def test_more_ubatches_than_tokens_are_refused(vllm_config: VllmConfig):
    asked = config(tensor_parallel_size=2)
    asked.scheduler_config.max_num_batched_tokens = 3
    with pytest.raises(ConfigurationError, match="num_ubatches = 4 is too large"):
        check_overlap(asked, DualBatchConfig(enabled=True, num_ubatches=4))


def test_steps_that_are_never_split_are_reported(vllm_config: VllmConfig):
    assert check_overlap(config(tensor_parallel_size=2), ON) == []
    (alone,) = check_overlap(config(), ON)
    assert "one rank computes each layer alone" in alone
    few = config(tensor_parallel_size=2)
    few.scheduler_config.max_num_batched_tokens = 128
    (never,) = check_overlap(few, ON)
    assert "no step with a prefill will be split" in never
