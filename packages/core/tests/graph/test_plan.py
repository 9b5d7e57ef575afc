"""Resources that graphs take of a device, and the device's limits."""

import pytest

from vllm_davinci.core.device.soc import GraphLimits
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.graph.plan import SPARE_STREAMS, CapturePlan

PLAN = CapturePlan(
    sizes=(1, 2, 4, 8, 16), streams_per_graph=3, events_per_graph=600, updates_per_graph=61
)


def test_a_plan_within_the_limits_stays_as_it_is():
    assert PLAN.within(GraphLimits(streams=1984, events=65536)) == PLAN


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
def test_a_plan_over_a_limit_keeps_what_fits_and_says_why(
    limits: GraphLimits, sizes: tuple[int, ...], what: str
):
    kept = PLAN.within(limits)
    assert kept.sizes == sizes
    assert f"5 sizes were asked for, and the device has {what}" in kept.told()


def test_a_device_that_can_hold_no_graph_is_an_error():
    with pytest.raises(ConfigurationError, match=r"too few events\. Start with --enforce-eager"):
        PLAN.within(GraphLimits(streams=1984, events=599))
