"""Which of vLLM's warnings are left out, and that they are still vLLM's."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import pytest

from vllm_davinci.core.log import WITHOUT_MEANING_HERE, leave_out_what_means_nothing

WARNINGS = [(name, text) for name, texts in WITHOUT_MEANING_HERE.items() for text in texts]


@pytest.fixture
def vllm_logs(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """vLLM's loggers hand nothing on to the root, where pytest listens."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(("name", "text"), WARNINGS)
def test_a_warning_without_meaning_here_is_left_out(
    name: str, text: str, vllm_logs: pytest.LogCaptureFixture
):
    leave_out_what_means_nothing()
    leave_out_what_means_nothing()
    logging.getLogger(name).warning(text + ", and so on.")
    logging.getLogger(name).warning("another one")
    assert vllm_logs.messages == ["another one"]


def test_a_warning_about_a_user_s_scheduler_stays(vllm_logs: pytest.LogCaptureFixture):
    leave_out_what_means_nothing()
    logger = logging.getLogger("vllm.config.scheduler")
    logger.warning("Using custom scheduler class %s. And so on.", "vllm_davinci.core.x.Scheduler")
    logger.warning("Using custom scheduler class %s. And so on.", "mine.Scheduler")
    assert vllm_logs.messages == ["Using custom scheduler class mine.Scheduler. And so on."]


@pytest.mark.parametrize(("name", "text"), WARNINGS)
def test_vllm_has_that_warning(name: str, text: str):
    file = importlib.import_module(name).__file__
    assert file is not None
    assert text in Path(file).read_text(encoding="utf-8")
