"""`vllm-davinci explain`: explains a server by its metrics, and a step by the engine's policy."""

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from vllm_davinci.meta import explain
from vllm_davinci.meta.__main__ import main
from vllm_davinci.meta.errors import ServerError
from vllm_davinci.meta.server_metrics import acceptance, decision_counts, metrics_text
from vllm_davinci_testing.processes.forked import run_command

MODULE = "vllm_davinci.meta"
MODEL = Path(__file__).parents[3] / "checkpoints" / "tiny_llama"
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 1.0
# TYPE davinci:overlap_decisions_total counter
davinci:overlap_decisions_total{engine="0",reason="no_prefill"} 90.0
davinci:overlap_decisions_total{engine="0",reason="split"} 9.0
davinci:overlap_decisions_total{engine="0",reason="no_cut"} 1.0
davinci:overlap_decisions_created{engine="0",reason="split"} 1.7e+09
"""

SPECULATING = """\
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 200.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 30.0
"""


@pytest.fixture
def serve() -> Iterator[Callable[[str], str]]:
    """Serves `text` as /metrics; returns the address."""
    servers = []

    def start(text: str) -> str:
        class Metrics(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments: object) -> None:
                """Logs nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
        Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server_s_counts_are_read_from_its_metrics(serve: Callable[[str], str]):
    expected = {("0", "no_prefill"): 90, ("0", "split"): 9, ("0", "no_cut"): 1}
    for address in (serve(METRICS), serve(METRICS) + "/metrics"):
        text = metrics_text(address)
        assert decision_counts(text) == expected
        assert acceptance(text) is None


def test_accepted_drafts_are_reported_by_position(serve, capsys):
    assert main(["explain", serve(SPECULATING)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "90 of 200 drafts were accepted (45%), 1.90 tokens" in told
    assert "by position: 60%, 30%." in told and "check --speculative-config" not in told
    vain = SPECULATING.replace("60.0", "0.0").replace("30.0", "0.0").replace("90.0", "0.0")
    assert main(["explain", serve(vain)]) == 0
    assert "check --speculative-config" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", "--json", serve(SPECULATING)]) == 0
    assert json.loads(capsys.readouterr().out)["drafts"]["by_position"] == [60, 30]


def test_a_server_without_counts_is_distinguished_from_another_program(serve, capsys):
    assert main(["explain", serve("vllm:num_requests_running 1.0\n")]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "no overlap decisions and no drafts: both are off there" in told
    with pytest.raises(ServerError, match="is not a vLLM server"):
        metrics_text(serve("hello"))
    with pytest.raises(ServerError, match=r"gives no metrics: .*refused"):
        metrics_text("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://localhost:9", "--tokens", "4"], "a URL takes no step"),
        (["http://localhost:9"], "Name the address of a running"),
        (["model"], "describe the step"),
        (["./missing", "--tokens", "4"], "./missing is not a directory"),
        (["model", "--tokens", "4", "5", "--requests", "2"], "--requests repeats one number"),
        (["model", "--tokens", "0"], "must be at least 1"),
    ],
)
def test_bad_input_is_answered_before_anything_is_loaded(arguments, message, capsys):
    assert main(["explain", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err


def test_reasons_of_a_server_include_advice(serve: Callable[[str], str]):
    done = run_command(MODULE, "explain", serve(METRICS), COLUMNS="120")
    assert done.status == 0, done.stderr
    assert "9 of 100 steps were split" in done.stdout
    assert "90 (90%)" in done.stdout
    assert "dbo.decode = true" in done.stdout


def test_a_step_is_explained_for_an_engine_with_more_devices_than_this_host():
    step = (MODEL, "--tokens", "200", "100", "--json", "--")
    options = ("--tensor-parallel-size=2", "--enable-dbo")
    done = run_command(MODULE, "explain", *step, *options, VNPU_DEVICES="1")
    assert done.status == 0, done.stderr
    answer = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert (answer["reason"], answer["part_tokens"]) == ("no_cut", [300])
    assert answer["options"]["dbo.split"] == "request"
    assert 'dbo.split = "token"' in answer["explanation"]["change"]


@pytest.mark.nightly("planning")
def test_a_step_that_is_split_is_explained_too():
    options = ("--tensor-parallel-size=4", "--enable-dbo")
    step = (str(MODEL), "--tokens", "200", "200", "--json", "--", *options)
    done = run_command(MODULE, "explain", *step)
    assert done.status == 0, done.stderr
    assert json.loads(done.stdout[done.stdout.index("{\n") :])["reason"] == "split"


def test_a_wrong_option_of_the_engine_is_named():
    options = ("--enable-dbo", '--additional-config={"dbo": {"enabled": false}}')
    done = run_command(MODULE, "explain", str(MODEL), "--tokens", "9", "--", *options)
    assert done.status == 1
    assert "--enable-dbo asks for dbo.enabled = True" in done.stderr
    assert "Traceback" not in done.stderr


def test_times_of_other_schedules_are_printed():
    told = explain._told_durations({"split, fused": 8.0, "whole, all_gather": 10.0})
    assert told == "split, fused: 8.0 ms; whole, all_gather: 10.0 ms (+25%)"
    assert not explain._told_durations({})
