"""Overlap decisions appear at the front end's metrics endpoint."""

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from vllm.config import DeviceConfig, VllmConfig
from vllm.plugins import STAT_LOGGER_PLUGINS_GROUP, load_plugins_by_group
from vllm.v1.metrics.prometheus import get_prometheus_registry
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_davinci.core.components import worker_metrics
from vllm_davinci.core.components.worker_metrics import SHARED_DIRECTORY
from vllm_davinci.core.features.resolution import resolve
from vllm_davinci.core.ubatch import metrics
from vllm_davinci.core.ubatch.metrics import AcceptanceWatch, CountWriter, OverlapStatLogger


@pytest.fixture
def config(
    vllm_config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[VllmConfig]:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    monkeypatch.delenv(SHARED_DIRECTORY, raising=False)
    made = VllmConfig(device_config=DeviceConfig(device="npu"), instance_id="abcde")
    made.additional_config = {"dbo": {"enabled": True}}
    resolve(made)
    yield made
    assert not list(tmp_path.glob("vllm-davinci-*")), "a server removes what it made"


@pytest.fixture
def stat_logger(config: VllmConfig) -> Iterator[OverlapStatLogger]:
    made = OverlapStatLogger(config, [0, 1])
    yield made
    made.close()


def counted(registry: CollectorRegistry | None = None) -> dict[str, float]:
    """Returns the value of each set of labels, as reported by the endpoint."""
    text = generate_latest(registry or get_prometheus_registry()).decode()
    lines = [line for line in text.splitlines() if line.startswith("davinci:overlap_decisions_t")]
    return {line[line.index("{") : line.index("}") + 1]: float(line.split()[-1]) for line in lines}


def test_totals_of_a_worker_become_a_counter(config: VllmConfig, stat_logger: OverlapStatLogger):
    write = CountWriter(config)
    assert counted() == {}
    write({"split": 2, "few_tokens": 1})
    write({"split": 3, "few_tokens": 1})
    assert counted() == {'{engine="0",reason="split"}': 3, '{engine="0",reason="few_tokens"}': 1}


def test_dp_ranks_are_counted_apart(config: VllmConfig, stat_logger: OverlapStatLogger):
    CountWriter(config)({"split": 2})
    config.parallel_config.data_parallel_index = 1
    CountWriter(config)({"split": 7})
    assert counted() == {'{engine="0",reason="split"}': 2, '{engine="1",reason="split"}': 7}


def test_a_worker_works_without_a_reading_server(config: VllmConfig):
    write = CountWriter(config)
    write({"split": 1})
    stat_logger = OverlapStatLogger(config, [0])
    write({"split": 2})
    assert counted() == {'{engine="0",reason="split"}': 2}
    stat_logger.close()
    write({"split": 3})
    assert counted() == {}


def test_the_directory_is_the_servers_users_alone(config, stat_logger, tmp_path):
    (directory,) = tmp_path.glob("vllm-davinci-*")
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_writable_by_others_is_not_used(config, tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(metrics.logger, "warning", lambda text, *_: told.append(text))
    monkeypatch.setattr(worker_metrics.logger, "warning_once", lambda text, *_: told.append(text))
    planted = worker_metrics.own_directory(config)
    planted.mkdir()
    planted.chmod(0o777)
    OverlapStatLogger(config, [0])
    CountWriter(config)({"split": 1})
    assert not list(planted.iterdir())
    assert counted() == {}
    assert len(told) == 2, told
    planted.rmdir()


@contextmanager
def at_most(limited: int, most: int) -> Iterator[None]:
    """Sets a limit of this process (resource.RLIMIT_...) in this context."""
    before = resource.getrlimit(limited)
    resource.setrlimit(limited, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limited, before)


def test_a_step_does_not_fail_where_no_file_can_be_opened_or_grow(config, stat_logger, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(worker_metrics.logger, "warning", lambda text, cause: told.append(cause))
    without_descriptors, without_room = CountWriter(config), CountWriter(config)
    with at_most(resource.RLIMIT_NOFILE, 0):
        without_descriptors({"split": 1})
    without_descriptors({"split": 2})
    assert counted() == {}
    without_room({"split": 3})
    with at_most(resource.RLIMIT_FSIZE, 1 << 16):  # the file's first size
        without_room({f"reason{number}": 1 for number in range(2000)})
    without_room({"split": 4})
    assert counted()['{engine="0",reason="split"}'] == 3
    assert [type(cause) for cause in told] == [OSError, OSError], told


def test_several_api_servers_share_vllms_directory(config, tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv(SHARED_DIRECTORY, str(shared))
    OverlapStatLogger(config, [0])
    CountWriter(config)({"split": 4})
    assert counted() == {'{engine="0",reason="split"}': 4}


def test_nothing_is_made_when_overlap_is_off(config: VllmConfig, tmp_path: Path):
    config.additional_config = {}
    resolve(config)
    OverlapStatLogger(config, [0]).record(None, None)
    assert not list(tmp_path.iterdir())


def test_vllm_finds_the_plugin():
    assert OverlapStatLogger in load_plugins_by_group(STAT_LOGGER_PLUGINS_GROUP).values()


# A warning appears if no draft is ever accepted.


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(
        metrics.logger, "warning", lambda text, *arguments: said.append(text % arguments)
    )
    assert isinstance(metrics.logger, logging.Logger)
    return said


def step(drafts: int, accepted: int) -> SpecDecodingStats:
    stats = SpecDecodingStats.new(2)
    for number in range(drafts):
        stats.observe_draft(2, min(2, max(0, accepted - 2 * number)))
    return stats


def test_a_thousand_rejected_drafts_are_reported_once(warnings: list[str]):
    watch = AcceptanceWatch()
    for _ in range(99):
        watch.record(step(10, 0))
    watch.record(None)
    assert warnings == []
    for _ in range(99):
        watch.record(step(10, 0))
    (said,) = warnings
    assert "none of 1000 drafts was accepted" in said and "another model" in said


def test_one_accepted_token_is_enough(warnings: list[str]):
    watch = AcceptanceWatch()
    watch.record(step(10, 1))
    for _ in range(300):
        watch.record(step(10, 0))
    assert warnings == []


def test_the_logger_that_vllm_loads_watches(vllm_config: VllmConfig, warnings: list[str]):
    logger = OverlapStatLogger(VllmConfig(device_config=DeviceConfig(device="npu")), [0])
    stats: Any = SimpleNamespace(spec_decoding_stats=step(1000, 0))
    logger.record(None, None)
    logger.record(stats, None, engine_idx=0)
    assert len(warnings) == 1
