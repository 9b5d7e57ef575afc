"""Which figure moves a step's time most."""

from __future__ import annotations

from vllm_davinci.meta.dry_run.sensitivity import Move, interval_of, moves_of
from vllm_davinci.meta.dry_run.step import Step
from vllm_davinci.vnpu.timing import Report


def report(host_ps: int) -> Report:
    return Report(host_ps, 0, 0, 0, 0, 0, 0, {})


STEP = Step(
    (1,),
    report(100),
    0.0,
    {
        "event_wait low": report(99),
        "event_wait high": report(103),
        "matmul_share low": report(120),
        "matmul_share high": report(90),
        "hbm_share high": report(95),
        "drawn 0": report(80),
        "drawn 1": report(110),
    },
)


def test_figures_come_in_the_order_in_which_they_move_the_time() -> None:
    assert moves_of(STEP) == [
        Move("matmul_share", 120, 90),
        Move("hbm_share", 100, 95),  # its low end is where it lies
        Move("event_wait", 99, 103),
    ]


def test_the_interval_has_all_machines_in_it() -> None:
    assert interval_of(STEP) == (80, 120)
    assert interval_of(Step((1,), report(100), 0.0)) == (100, 100)
