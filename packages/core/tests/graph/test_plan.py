"""Device resources that graphs need, and the device's limits."""

from dataclasses import replace

import pytest

from vllm_davinci.core.device.soc import GraphLimits
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.graph.plan import SPARE_STREAMS, CapturePlan, GraphMemory

PLAN = CapturePlan(
    sizes=(1, 2, 4, 8, 16), streams_per_graph=3, events_per_graph=600, updates_per_graph=61
)
LARGE = GraphLimits(streams=1984, events=65536)


def test_a_plan_within_the_limits_stays_as_it_is():
    assert PLAN.within(LARGE) == PLAN


@pytest.mark.parametrize(
    ("limits", "sizes", "what"),
    [
        (GraphLimits(streams=SPARE_STREAMS + 9, events=65536), (1, 4, 16), "streams for 3"),
        (GraphLimits(streams=1984, events=1300), (1, 16), "events for 2"),
        (
            GraphLimits(streams=1984, events=65536, updatable_tasks=70),
            (16,),
            "updatable launches for 1",
        ),
    ],
)
def test_a_plan_over_a_limit_keeps_the_sizes_that_fit_and_says_why(limits, sizes, what):
    kept = PLAN.within(limits)
    assert kept.sizes == sizes
    assert f"5 sizes were requested, and the device has {what}" in kept.told()


def test_a_device_that_can_hold_no_graph_is_an_error():
    with pytest.raises(ConfigurationError, match=r"too few events\. Start with --enforce-eager"):
        PLAN.within(GraphLimits(streams=1984, events=599))


MEMORY = GraphMemory(first=100, next=10)


@pytest.mark.parametrize(
    ("available_bytes", "sizes"),
    [(140, (1, 2, 4, 8, 16)), (139, (1, 2, 8, 16)), (100, (16,)), (99, ())],
)
def test_a_plan_keeps_as_many_sizes_as_fit_into_memory(available_bytes, sizes):
    plan = replace(PLAN, memory=MEMORY).within(LARGE, available_bytes)
    assert plan.sizes == sizes
    assert plan.totals()["memory"] == (90 + 10 * len(sizes) if sizes else 0)
    assert bool(plan.notes) == (len(sizes) < 5)


def test_a_split_size_counts_once_for_each_ubatch():
    plan = replace(PLAN, num_ubatches={8: 2, 16: 2})
    assert plan.totals()["events"] == 7 * 600
    assert plan.totals()["updatable_tasks"] == 7 * 61
    assert plan.within(replace(LARGE, events=2400)).sizes == (1, 16)
    assert "those of 8, 16 tokens are split" in plan.told()
