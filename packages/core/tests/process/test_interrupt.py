"""Who handles Ctrl-C, and which wait it is repeated for."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from vllm_davinci.core.process import interrupt

ENTRY = ("program.py", "<module>")
POLL = ("zmq/sugar/poll.py", "poll")
CLIENT = ("/somewhere/vllm/v1/engine/core_client.py", "__init__")


@pytest.fixture(autouse=True)
def _python_handles_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_still_an_interrupt():
    interrupt.let_interrupts_end_the_start()
    interrupt.let_interrupts_end_the_start()
    assert signal.getsignal(signal.SIGINT) is interrupt.interrupt
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_the_program_stays():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt.let_interrupts_end_the_start()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("stack", "waits"),
    [
        ([POLL, POLL, CLIENT, ENTRY], True),
        ([POLL, ("vllm/v1/engine/utils.py", "wait_for_engine_startup"), CLIENT, ENTRY], False),
        ([("vllm/v1/engine/core_client.py", "__call__"), CLIENT, ENTRY], False),
        ([POLL, POLL], False),
        ([ENTRY], False),
        ([], False),
    ],
    ids=["second_wait", "first_wait", "cleaning_up", "another_poll", "running", "ended"],
)
def test_only_the_second_wait_is_interrupted_again(stack: list[tuple[str, str]], waits: bool):
    assert interrupt.waits_for_ready_engine(stack) is waits
