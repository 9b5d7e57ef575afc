"""Overlap decisions reach the metrics endpoint of the front end."""

from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY
from vllm.config import DeviceConfig, VllmConfig
from vllm.plugins import STAT_LOGGER_PLUGINS_GROUP, load_plugins_by_group

from vllm_davinci.core.overlap import metrics
from vllm_davinci.core.overlap.metrics import CountReceiver, CountSender, OverlapStatLogger


@pytest.fixture
def config(vllm_config: VllmConfig) -> VllmConfig:
    made = VllmConfig(device_config=DeviceConfig(device="npu"))
    made.additional_config = {"dbo": {"enabled": True}}
    return made


@pytest.fixture
def stat_logger(config: VllmConfig) -> Iterator[OverlapStatLogger]:
    metrics._counter.cache_clear()
    yield OverlapStatLogger(config, [0, 1])
    REGISTRY.unregister(metrics._counter())


def counted(reason: str, engine: str = "0") -> float | None:
    labels = {"engine": engine, "reason": reason}
    return REGISTRY.get_sample_value("davinci:overlap_decisions_total", labels)


def test_totals_of_a_worker_become_a_counter(config: VllmConfig, stat_logger: OverlapStatLogger):
    send = CountSender(config)
    stat_logger.record(None, None)
    send({"split": 2, "few_tokens": 1})
    send({"split": 3, "few_tokens": 1})
    stat_logger.record(None, None)
    assert (counted("split"), counted("few_tokens")) == (3, 1)
    send({"split": 3, "few_tokens": 5})
    stat_logger.record(None, None, engine_idx=0)
    assert (counted("split"), counted("few_tokens")) == (3, 5)


def test_replicas_are_counted_apart(config: VllmConfig, stat_logger: OverlapStatLogger):
    send = CountSender(config)
    send({"split": 2})
    config.parallel_config.data_parallel_index = 1
    CountSender(config)({"split": 7})
    stat_logger.record(None, None)
    assert (counted("split", "0"), counted("split", "1")) == (2, 7)


def test_a_worker_does_not_mind_that_nobody_listens(config: VllmConfig):
    send = CountSender(config)
    for count in range(100):
        send({"split": count})
    receiver = CountReceiver(config)
    for count in range(100, 2000):
        send({"split": count})  # more than the queue of a socket holds
    assert receiver.received()[0]["split"] >= 100
    assert receiver.received() == {}


def test_a_second_front_end_leaves_the_counting_to_the_first(
    config: VllmConfig, stat_logger: OverlapStatLogger
):
    second = OverlapStatLogger(config, [0, 1])
    CountSender(config)({"split": 4})
    second.record(None, None)
    stat_logger.record(None, None)
    assert counted("split") == 4


def test_a_front_end_with_a_configuration_of_its_own_hears_the_workers(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/tmp/chosen-by-vllm" + "-long" * 30)
    receiver = CountReceiver(config)
    config.instance_id = "another"
    CountSender(config)({"split": 1})
    assert receiver.received() == {0: {"split": 1}}


def test_nothing_is_counted_when_overlap_is_off(config: VllmConfig):
    config.additional_config = {}
    OverlapStatLogger(config, [0]).record(None, None)
    CountReceiver(config)  # its address is free


def test_vllm_finds_the_plugin():
    assert OverlapStatLogger in load_plugins_by_group(STAT_LOGGER_PLUGINS_GROUP).values()
