"""When drafts pay, computed from the steps of two dry-runs."""

from argparse import Namespace
from typing import Any

import pytest

from vllm_davinci.planner.dry_run import draft_gain
from vllm_davinci.planner.dry_run.draft_gain import check_acceptance, measure, told
from vllm_davinci.planner.errors import DryRunError

SPECULATION = '{"method": "mtp", "num_speculative_tokens": 2}'
ASKED = ["--tensor-parallel-size=4", "--speculative-config", SPECULATION]


def options(**changes: Any) -> Namespace:
    known = {"model": "a", "requests": 6, "prompt_tokens": (100,), "acceptance": (0.8, 0.5)}
    return Namespace(**known | changes)


def steps(rows: int, milliseconds: float) -> list[dict[str, Any]]:
    """Returns decode steps of 6, 4, 2 and 1 requests with this time per request, and steps to
    ignore.
    """
    shapes = [[100] * 6, *([rows] * size for size in (6, 5, 4, 2, 2, 1)), [rows, rows + 1]]
    return [
        {"tokens": shape, "modelled": {"host_ps": round(len(shape) * milliseconds * 10**9)}}
        for shape in shapes
    ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records the options of the compared dry-runs."""
    seen: list[list[str]] = []

    def report(
        of: Namespace, work: list[str], most: int, arguments: list[str], by: str
    ) -> dict[str, Any]:
        outputs = work[2].partition("=")[2].split(",")
        assert most > max(map(int, outputs))  # also covers the prompts' steps
        seen.append([*work, *arguments])
        has_drafts = "--speculative-config" in arguments
        return {
            "machine": {"title": "a chip", "hash": "0"},
            "world_size": 4,
            "steps": steps(3, 2.0) if has_drafts else steps(1, 1.25),
        }

    monkeypatch.setattr(draft_gain, "report_of", report)
    return seen


def test_the_gain_is_tokens_by_time(asked: list[list[str]]):
    report = measure(options(), ASKED)
    assert report["tokens_per_step"] == pytest.approx(2.3)
    assert [step["requests"] for step in report["steps"]] == [1, 2, 4, 6]
    assert all(step["gain"] == pytest.approx(2.3 * 1.25 / 2) for step in report["steps"])
    assert all(step["break_even"] == pytest.approx(1.6) for step in report["steps"])
    plain, drafted = asked
    assert not any("speculative" in option for option in plain)
    assert "--speculative-config" in drafted
    assert "Drafts pay for all of these." in told(report)
    assert "2.30 tokens" in told(report)


def test_drafts_that_do_not_pay_are_reported(asked: list[list[str]]):
    assert "Drafts pay for none" in told(measure(options(acceptance=(0.2, 0.1)), ASKED))


def test_requests_end_in_groups_that_leave_each_size(asked: list[list[str]]):
    measure(options(), ["--max-num-batched-tokens=200", *ASKED])
    outputs = next(each for each in asked[0] if each.startswith("--output-tokens="))
    lengths = [int(number) for number in outputs.partition("=")[2].split(",")]
    assert len(lengths) == 6 and lengths == sorted(lengths, reverse=True)
    # Groups end together, and leave six, four, two and one requests.
    assert [lengths.count(each) for each in sorted({*lengths}, reverse=True)] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ((0.8,), "has 1 rates, and --speculative-config has 2 drafts"),
        ((0.5, 0.8), "none above the one before it"),
        ((1.2, 0.5), "expected rates from 0 to 1"),
        ((0.5, -0.1), "expected rates from 0 to 1"),
    ],
)
def test_invalid_rates_are_refused(rates: tuple[float, ...], said: str):
    assert said in str(check_acceptance(rates, 2))
    with pytest.raises(DryRunError, match=said):
        measure(options(acceptance=rates), ASKED)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "add --speculative-config as JSON"),
        (["--speculative-config", '{"method": "mtp"}'], "with num_speculative_tokens"),
        (["--speculative-config", '{"num_speculative_tokens": 0}'], "expected at least 1"),
    ],
)
def test_an_engine_without_drafts_has_none_to_compare(arguments: list[str], said: str):
    with pytest.raises(DryRunError, match=said):
        measure(options(), arguments)
