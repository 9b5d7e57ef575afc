"""Kernels are tasks of their streams, in each schedule and for the race detector."""

from pathlib import Path

import pytest

from vllm_davinci_testing.processes.forked import run_together

PROGRAM = Path(__file__).with_name("programs") / "two_streams.py"


def lines(text: str) -> list[int]:
    return [n for n, line in enumerate(PROGRAM.read_text().split("\n"), 1) if text in line]


def output_of(kind: str, tmp_path: Path, **variables: str) -> str:
    own = {"KIND": kind, "TRITON_CACHE_DIR": str(tmp_path), **variables}
    [ended] = run_together([PROGRAM], [own])
    assert ended.status == 0, ended.output[-3000:]
    return ended.output


def test_a_stream_that_does_not_wait_races(tmp_path: Path):
    text = output_of("unordered", tmp_path, VNPU_RACES="report")
    assert "race on" in text and "scale_kernel on stream" in text
    assert "by program (" in text
    for line in lines("tl.load(x_ptr + lanes)")[:1] + lines("<- launch"):
        assert f"{PROGRAM}:{line}" in text


@pytest.mark.parametrize("kind", ["ordered", "apart"])
def test_kernels_that_are_ordered_or_use_other_memory_do_not(kind: str, tmp_path: Path):
    assert "races 0" in output_of(kind, tmp_path, VNPU_RACES="report", VNPU_SCHEDULE="fuzz:3")


def test_programs_that_use_each_others_elements_race(tmp_path: Path):
    text = output_of("programs", tmp_path, VNPU_RACES="report")
    assert "race between programs of Triton kernel neighbours_kernel" in text
    for line in lines("tl.load(x_ptr + lanes + 1)") + lines("tl.store(x_ptr + lanes, x)"):
        assert f"{PROGRAM}:{line}" in text


@pytest.mark.parametrize("schedule", ["eager", "threads", "fuzz:7"])
def test_the_order_of_streams_holds_under_each_schedule(schedule: str, tmp_path: Path):
    expected = sum(n * (6 if n < 2048 else 1) for n in range(4097))
    text = output_of("ordered", tmp_path, VNPU_SCHEDULE=schedule)
    assert f"sum {expected}" in text
