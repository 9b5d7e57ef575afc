"""The figure that changes a step's time most."""

import io

from rich.console import Console

from vllm_davinci.planner.dry_run.sensitivity import Move, interval_of, moves_of, print_sensitivity
from vllm_davinci.planner.dry_run.step import Step
from vllm_davinci.vnpu.timing import Report, load_machine


def report(host_ps: int) -> Report:
    return Report(host_ps, 0, 0, 0, 0, 0, 0, 0, {})


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
        Move("hbm_share", 100, 95),  # the low value equals the stated one
        Move("event_wait", 99, 103),
    ]


def test_the_interval_has_all_machines_in_it() -> None:
    assert interval_of(STEP) == (80, 120)
    assert interval_of(Step((1,), report(100), 0.0)) == (100, 100)


def test_steps_without_a_mechanism_are_printed_with_their_change() -> None:
    variants = {"without hardware queues": report(90), "without steps of collectives": report(100)}
    step = Step((1,), report(100), 0.0, variants)
    console = Console(width=100, record=True, file=io.StringIO())
    print_sensitivity({"1 x 1 tokens": [step]}, load_machine("ascend910b2", "node-of-8"), console)
    told = console.export_text()
    assert "hardware queues" in told and "-10.0%" in told and "+0.0%" in told
    assert "figure that moves it" not in told
