"""vLLM's irrelevant warnings are suppressed; all others still appear."""

import importlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_davinci.core import log
from vllm_davinci.core.log import (
    END_S,
    NOT_AT_THE_END,
    WITHOUT_MEANING_HERE,
    leave_out_what_means_nothing,
)

WARNINGS = [(name, text) for name, texts in WITHOUT_MEANING_HERE.items() for text in texts]
OF_THE_END = [(name, text) for name, (text, _) in NOT_AT_THE_END.items()]


@pytest.fixture
def vllm_logs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """After configuration, vLLM's loggers pass nothing to the root logger, where pytest listens."""
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(("name", "text"), WARNINGS)
def test_an_irrelevant_warning_is_suppressed(name, text, vllm_logs):
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


@pytest.mark.parametrize(("name", "text"), OF_THE_END)
@pytest.mark.parametrize("seconds_since_the_end_began", [None, 1.0, END_S + 1])
def test_an_engines_end_is_not_reported_while_its_program_ends(
    seconds_since_the_end_began, name, text, vllm_logs, monkeypatch
):
    leave_out_what_means_nothing()
    # vLLM waits before it kills a process, and logs late that another thread saw an engine end.
    is_told = seconds_since_the_end_began is None or (
        seconds_since_the_end_began > END_S and "killing" in text
    )
    if seconds_since_the_end_began is not None:
        monkeypatch.setattr(log, "_end_began_at", time.time() - seconds_since_the_end_began)
    logging.getLogger(name).warning("%s", "another one")
    logging.getLogger(name).warning(text)
    assert vllm_logs.messages == ["another one", *([text] if is_told else [])]


@pytest.mark.parametrize(("name", "text"), WARNINGS + OF_THE_END)
def test_vllm_has_that_warning(name: str, text: str):
    file = importlib.import_module(name).__file__
    assert file is not None
    assert text in Path(file).read_text(encoding="utf-8")


def test_long_work_logs_its_start_and_progress(monkeypatch, vllm_logs):
    monkeypatch.setattr(log, "SAYS_EVERY_S", 0.01)
    vllm_logs.set_level(logging.INFO, "vllm")
    logger = log.init_logger("vllm_davinci.core.worker")
    with log.progress(logger, "The profile run"):
        deadline = time.monotonic() + 30
        while len(vllm_logs.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    first, second, *_ = vllm_logs.messages
    assert first == "The profile run begins."
    assert second.startswith("The profile run continues: 0 s")
    vllm_logs.clear()
    with log.progress(logger, "The profile run", is_said=False):
        pass
    assert not vllm_logs.messages
