"""Overlap decisions reach the metrics endpoint of the front end."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from prometheus_client import REGISTRY
from vllm.config import DeviceConfig, VllmConfig
from vllm.plugins import STAT_LOGGER_PLUGINS_GROUP, load_plugins_by_group

from vllm_davinci.core.config.resolution import resolve
from vllm_davinci.core.ubatch import metrics
from vllm_davinci.core.ubatch.decisions import Counts
from vllm_davinci.core.ubatch.metrics import CountReceiver, CountSender, OverlapStatLogger

LIMIT_S = 20


@pytest.fixture
def config(vllm_config: VllmConfig) -> VllmConfig:
    made = VllmConfig(device_config=DeviceConfig(device="npu"))
    made.additional_config = {"dbo": {"enabled": True}}
    resolve(made)
    return made


@pytest.fixture
def stat_logger(config: VllmConfig) -> Iterator[OverlapStatLogger]:
    metrics._counter.cache_clear()
    made = OverlapStatLogger(config, [0, 1])
    yield made
    close(made)
    REGISTRY.unregister(metrics._counter())


@pytest.fixture
def new_sender(config: VllmConfig) -> Iterator[Callable[[], CountSender]]:
    """One with the configuration as it is then."""
    with ExitStack() as senders:
        yield lambda: senders.enter_context(closing(CountSender(config)))


def close(stat_logger: OverlapStatLogger) -> None:
    assert stat_logger._receiver is not None
    stat_logger._receiver.close()


def assert_counted(expected: float, reason: str, engine: str = "0") -> None:
    labels = {"engine": engine, "reason": reason}
    deadline = time.monotonic() + LIMIT_S
    while True:
        value = REGISTRY.get_sample_value("davinci:overlap_decisions_total", labels)
        if value == expected:
            return
        assert time.monotonic() < deadline, f"{reason} is {value} after {LIMIT_S} s"
        time.sleep(0.01)


def test_totals_of_a_worker_become_a_counter(
    new_sender: Callable[[], CountSender], config: VllmConfig, stat_logger: OverlapStatLogger
):
    send = new_sender()
    send({"split": 2, "few_tokens": 1})
    send({"split": 3, "few_tokens": 1})
    assert_counted(3, "split")
    assert_counted(1, "few_tokens")
    send({"split": 3, "few_tokens": 5})
    assert_counted(5, "few_tokens")
    assert_counted(3, "split")


def test_dp_ranks_are_counted_apart(
    new_sender: Callable[[], CountSender], config: VllmConfig, stat_logger: OverlapStatLogger
):
    new_sender()({"split": 2})
    config.parallel_config.data_parallel_index = 1
    new_sender()({"split": 7})
    assert_counted(2, "split", "0")
    assert_counted(7, "split", "1")


@pytest.mark.parametrize("message", [b"{", b"\xff", b"[]", b"{}", b'{"engine": 0, "counts": 1}'])
def test_a_message_that_cannot_be_read_leaves_the_counting_as_it_was(
    message: bytes,
    new_sender: Callable[[], CountSender],
    config: VllmConfig,
    stat_logger: OverlapStatLogger,
):
    with closing(metrics._new_socket()) as stranger:
        stranger.connect(metrics._address(config))
        stranger.send(message)
    new_sender()({"split": 6})
    assert_counted(6, "split")


def test_a_worker_does_not_mind_that_nobody_listens(
    new_sender: Callable[[], CountSender], config: VllmConfig
):
    metrics._counter.cache_clear()
    send = new_sender()
    for count in range(100):
        send({"split": count})
    received = []
    receiver = CountReceiver(config, lambda engine, counts: received.append(counts["split"]))
    begin, num_sent = time.monotonic(), 100
    while not received and time.monotonic() < begin + LIMIT_S:
        send({"split": num_sent})
        num_sent += 1
    receiver.close()
    for count in range(num_sent, num_sent + 100):
        send({"split": count})
    assert received
    assert received == sorted(received)
    assert set(received) <= set(range(100, num_sent))


def test_a_worker_finds_a_front_end_that_starts_again(
    new_sender: Callable[[], CountSender], config: VllmConfig
):
    send = new_sender()
    for newest in (1, 2):
        received = threading.Event()
        receiver = CountReceiver(config, lambda engine, counts: received.set())  # noqa: B023
        send({"split": newest})
        send({"split": newest})  # the first one finds that the front end before has gone
        assert received.wait(LIMIT_S)
        receiver.close()


def test_a_second_front_end_leaves_the_counting_to_the_first(
    new_sender: Callable[[], CountSender], config: VllmConfig, stat_logger: OverlapStatLogger
):
    second = OverlapStatLogger(config, [0, 1])
    assert second._receiver is None
    new_sender()({"split": 4})
    # Only the second one has requests, so that only it is told of steps.
    second.record(None, None)
    assert_counted(4, "split")


def test_a_front_end_with_a_configuration_of_its_own_hears_the_workers(
    new_sender: Callable[[], CountSender], config: VllmConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/tmp/chosen-by-vllm" + "-long" * 30)
    received: queue.Queue[tuple[int, Counts]] = queue.Queue()
    receiver = CountReceiver(config, lambda *message: received.put(message))
    config.instance_id = "another"
    new_sender()({"split": 1})
    assert received.get(timeout=LIMIT_S) == (0, {"split": 1})
    receiver.close()


def test_nothing_is_counted_when_overlap_is_off(config: VllmConfig):
    config.additional_config = {}
    resolve(config)
    OverlapStatLogger(config, [0]).record(None, None)
    CountReceiver(config, lambda engine, counts: None).close()  # its address is free


def test_vllm_finds_the_plugin():
    assert OverlapStatLogger in load_plugins_by_group(STAT_LOGGER_PLUGINS_GROUP).values()
