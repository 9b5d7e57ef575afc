"""After a signal, a server answers its requests and ends in time, whatever its engine does."""

import signal
import time
from pathlib import Path

import pytest

from vllm_davinci_testing.engines.server_process import ForkedServer, ServerProcess, shared_memory
from vllm_davinci_testing.engines.signalled_server import signalled_server

# Time limits from the signal, as docs/guides/ending.md promises.
ANSWERED_WITHIN_S = 3.0
ENDS_WITHIN_S = 15.0
AT_ONCE_S = 3.0
TERMINAL, SUPERVISOR = (signal.SIGINT, True), (signal.SIGTERM, False)


@pytest.mark.parametrize(
    ("kind", "options", "signalled"),
    [
        pytest.param(ForkedServer, (), TERMINAL, id="one_rank"),
        *(
            pytest.param(kind, options, signalled, id=name, marks=pytest.mark.thorough)
            for name, kind, options, signalled in (
                ("one_rank_spawned", ServerProcess, (), SUPERVISOR),
                ("two_ranks", ForkedServer, ("-tp=2",), SUPERVISOR),
                ("two_ranks_spawned", ServerProcess, ("-tp=2",), TERMINAL),
                ("two_engines", ForkedServer, ("-dp=2", "--api-server-count=1"), SUPERVISOR),
                ("two_engines_and_servers", ServerProcess, ("-dp=2",), SUPERVISOR),
                ("two_engines_in_terminal", ServerProcess, ("-dp=2",), TERMINAL),
            )
        ),
    ],
)
def test_a_signal_in_a_long_step_answers_all_requests_and_ends_the_server(
    kind, options, signalled, tiny_llama, tmp_path
):
    with signalled_server(kind, tiny_llama, tmp_path, *options) as ending:
        server = ending.server
        ending.open_requests()
        held = shared_memory(server.processes())
        at_s = ending.signal(*signalled)
        took_s = ending.wait_for_end() - at_s
        assert took_s < ENDS_WITHIN_S, server.tail()
        assert server.process.returncode == 0, server.tail()
        for request in ending.requests:
            assert request.ended_at_s - at_s < ANSWERED_WITHIN_S, (request, server.tail())
            assert "shutting down" in request.text, request
            assert request.status == (200 if request.is_stream else 503)
            assert request.text.endswith("data: [DONE]\n\n") is request.is_stream
        assert not list(ending.sockets.iterdir())
        if kind is ServerProcess:  # forks share the fork server's tracker, which continues
            assert not [path for path in held if path.exists()]
        assert "Traceback" not in server.log_text(), server.tail()


@pytest.mark.thorough
def test_a_second_interrupt_ends_the_server_at_once(tiny_llama: Path, tmp_path: Path):
    options = ("--shutdown-timeout=60",)
    with signalled_server(ForkedServer, tiny_llama, tmp_path, *options) as ending:
        ending.open_requests()
        ending.signal(*TERMINAL)
        time.sleep(1)
        assert ending.server.process.poll() is None, ending.server.tail()
        at_s = ending.signal(*TERMINAL)
        assert ending.wait_for_end() - at_s < AT_ONCE_S, ending.server.tail()
        assert ending.server.process.returncode == 128 + signal.SIGINT
        assert not list(ending.sockets.iterdir())
