"""Reports on this process's device on the modelled clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vllm_davinci.vnpu import _C

is_modelled = _C.is_modelled
"""True if this process models time. Calling it freezes this process's vnpu settings."""
set_routed_share = _C.set_routed_share
"""set_routed_share(numerator, denominator): share of the rows allocated by expert routing that this
rank's experts compute."""
place_group = _C.place_group
"""place_group(name, ranks): places an HCCL communicator's ranks in the topology, by number. The
ranks of other groups count as neighbours."""
pass_host_step = _C.pass_host_step
"""pass_host_step(requests, beside_device): advances the host's clock by the engine's own time per
step; with `beside_device` only by what exceeds the host's waits since the last step."""
write_timeline = _C.write_timeline
"""Writes the timeline now, not only at the end of the process."""
restart_timeline = _C.restart_timeline
"""Starts the timeline anew, after everything launched so far."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Modelled picoseconds since the process began, or between two reports (`after - before`).

    host_ps:                time on the host's clock
    waited_ps:              part of it in which the host waited for the device
    any_ps:                 time in which the device ran any task
    compute_ps:             ... a compute task; communication_ps: a collective
    overlapped_ps:          ... both
    compute_alone_ps:       sum of the tasks' times, each alone on the device; likewise
                            communication_alone_ps
    busy_ps:                resource -> time for which its work occupies it
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
        """Time of collectives with no concurrent computation."""
        return self.communication_ps - self.overlapped_ps

    @property
    def overlap_bound_ps(self) -> int:
        """Lower bound on two streams: the longer of computation and communication, each serial and
        undisturbed."""
        return max(self.compute_alone_ps, self.communication_alone_ps)


def read_report() -> Report:
    """Waits, in modelled time, for the current device and returns its report.

    Raises RuntimeError if time is not modelled.
    """
    return Report(**_C.modelled_report())
