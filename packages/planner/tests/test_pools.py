"""The number of engines for a load, from two dry-run reports."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci.meta.__main__ import main
from vllm_davinci.planner.errors import DryRunError
from vllm_davinci.planner.pools import Load, plan

MS = 10**9


def report(*steps: tuple[list[int], int], dp: int = 1, devices: int = 1) -> dict[str, Any]:
    """Makes a report with these steps (tokens, ms) and a cache of 100 bytes per token."""
    return {
        "modelled": True,
        "world_size": devices,
        "decode_tokens": 1,
        "layout": {"data_parallel_size": dp, "pipeline_parallel_size": 1},
        "memory": {"cache_bytes": 400_000, "cache_tokens": 4000},
        "steps": [{"tokens": tokens, "modelled": {"host_ps": ms * MS}} for tokens, ms in steps],
    }


# 1000 tokens take 100 ms; the decode step beside them does not count.
PREFILL = report(([1000], 100), ([1], 10))
# 10 tokens take 20 ms; the last, smaller batch does not count.
DECODE = report(([500] * 10, 900), ([1] * 10, 20), ([1] * 10, 20), ([1], 15))


def test_each_pool_has_as_many_engines_as_its_tokens_need():
    # Load: 30 x 1000 prompt tokens/s, 10,000 per engine; 30 x 100 later tokens/s, 500 per engine.
    pools = plan(PREFILL, DECODE, Load(30, 1000, 101, 1.0))
    assert (pools.prefill.engines, pools.decode.engines) == (3, 6)
    assert (pools.prefill.tokens_per_second, pools.decode.tokens_per_second) == (10_000, 500)
    assert (pools.prefill.busy, pools.decode.busy) == (1.0, 1.0)
    # Each request takes 100 steps of 20 ms.
    assert pools.decode_requests == pytest.approx(60)
    assert (pools.decode_batch, pools.cache_requests) == (10, 3)
    assert pools.transfer_bytes == 100_000
    assert pools.transfer_bytes_per_second == 3_000_000


def test_lower_utilization_needs_more_engines():
    pools = plan(PREFILL, DECODE, Load(30, 1000, 101, 0.75))
    assert (pools.prefill.engines, pools.decode.engines) == (4, 8)
    assert pools.decode.busy == pytest.approx(0.75)


def test_data_parallel_ranks_are_one_engine():
    wide = report(([1] * 10, 20), dp=4, devices=8)
    pools = plan(PREFILL, wide, Load(30, 1000, 101, 1.0))
    assert pools.decode.engines == 2  # 2000 tokens/s per engine
    assert (pools.decode.devices, pools.decode_batch) == (8, 40)
    # A rank's two devices each have a part of every token.
    assert pools.transfer_bytes == 200_000


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (report(([1], 5)), DECODE, "--prefill report has no prefill step"),
        (PREFILL, report(([500], 5)), "--decode report has no decode step"),
    ],
)
def test_a_report_without_the_needed_steps_is_refused(prefill, decode, message):
    with pytest.raises(DryRunError, match=message):
        plan(prefill, decode, Load(1, 1000, 10, 1.0))


@pytest.mark.parametrize("change", [(0, 1, 1, 1), (1, -1, 1, 1), (1, 1, 1, 1.5), (1, 1, 1, 0)])
def test_an_invalid_load_is_refused(change):
    with pytest.raises(DryRunError, match=r"is not valid\. Expected a number above 0"):
        Load(*change)


def test_the_command_answers_from_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = {"prefill": PREFILL, "decode": DECODE}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    arguments = ["pools", "--requests-per-second=30", "--prompt-tokens=1000", "--output-tokens=101"]
    arguments += [f"--{name}={tmp_path / name}" for name in files]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "All times are modelled" in told
    assert "holds fewer requests" in told
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefill"]["engines"] == 4
    (tmp_path / "decode").write_text("{}")
    assert main(arguments) == 2
    assert "is not a dry-run report" in capsys.readouterr().err
