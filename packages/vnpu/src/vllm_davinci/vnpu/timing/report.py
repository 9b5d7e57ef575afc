"""Work of this process's device on the modelled clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vllm_davinci.vnpu import _C

is_modelled = _C.is_modelled
"""Whether this process models time. Settles this process's settings."""
set_routed_share = _C.set_routed_share
"""set_routed_share(numerator, denominator): of the rows that expert routing makes room for, the
share that this rank's experts have to work on."""
place_group = _C.place_group
"""place_group(name, ranks): the ranks of a communicator of HCCL, by the numbers that the topology
counts. A group that is not placed has neighbours."""
pass_host_step = _C.pass_host_step
"""pass_host_step(requests, beside_device): the engine's own time for a step passes on the host's
clock, with `beside_device` only what is longer than the host's waits since the step before."""
write_timeline = _C.write_timeline
"""Writes the timeline now, and not only when the process ends."""
restart_timeline = _C.restart_timeline
"""Lets the timeline begin here, after all that was launched before."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Modelled picoseconds: since the process began, or between two reports (`after - before`).

    host_ps:                what passed on the host's clock
    waited_ps:              of it, what the host waited for the device
    any_ps:                 time in which the device had something to do
    compute_ps:             ... something that computes; communication_ps: a collective
    overlapped_ps:          ... both
    compute_alone_ps:       sum over tasks of what each takes when it has the device for itself;
                            likewise communication_alone_ps
    busy_ps:                resource -> for how long its work would keep it busy
    """

    host_ps: int
    waited_ps: int
    any_ps: int
    compute_ps: int
    communication_ps: int
    overlapped_ps: int
    compute_alone_ps: int
    communication_alone_ps: int
    busy_ps: Mapping[str, int]

    def __sub__(self, before: Report) -> Report:
        fields = dataclasses.asdict(self)
        earlier = dataclasses.asdict(before)
        busy = {name: ps - before.busy_ps[name] for name, ps in self.busy_ps.items()}
        differences: dict[str, Any] = {
            name: value - earlier[name] for name, value in fields.items() if name != "busy_ps"
        }
        return Report(**differences, busy_ps=busy)

    @property
    def exposed_communication_ps(self) -> int:
        """Time in which nothing computes while a collective runs."""
        return self.communication_ps - self.overlapped_ps

    @property
    def overlap_bound_ps(self) -> int:
        """The longer of computing and communicating, each one task after another and undisturbed:
        what these tasks take on two streams at best."""
        return max(self.compute_alone_ps, self.communication_alone_ps)


def read_report() -> Report:
    """Waits, in modelled time, for all that the current device has to do.

    Raises RuntimeError where time is not modelled.
    """
    return Report(**_C.modelled_report())
