"""A warning appears if no draft is ever accepted."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import DeviceConfig, VllmConfig
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_davinci.core.ubatch import acceptance
from vllm_davinci.core.ubatch.acceptance import AcceptanceWatch
from vllm_davinci.core.ubatch.metrics import OverlapStatLogger


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(
        acceptance.logger, "warning", lambda text, *arguments: said.append(text % arguments)
    )
    assert isinstance(acceptance.logger, logging.Logger)
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
