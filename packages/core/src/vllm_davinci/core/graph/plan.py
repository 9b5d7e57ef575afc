"""Resources of the device that graphs take, computed before the first capture."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm_davinci.core.config.graph_sizes import sample_evenly
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.device.soc import GraphLimits
from vllm_davinci.core.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Of the streams of a device, as many are left to other work: the runner's own, the collectives'
# outside of graphs, other processes. Source: 1920 of 1984 in the budget of the established plugin.
SPARE_STREAMS = 64


@dataclass(frozen=True)
class CapturePlan:
    """The graphs of one engine, and what they hold on each device while it runs.

    sizes:             tokens, ascending
    streams_per_graph: the first one, side streams of layers, and those of collectives
    events_per_graph:  between these streams
    updates_per_graph: launches whose lengths change before a replay: one per attention layer
    memory_bytes:      of all graphs together, which share one pool; None before it is measured
    notes:             why there are fewer sizes than asked for
    """

    sizes: tuple[int, ...]
    streams_per_graph: int
    events_per_graph: int
    updates_per_graph: int
    memory_bytes: int | None = None
    notes: tuple[str, ...] = ()

    def within(self, limits: GraphLimits) -> "CapturePlan":
        """The same with as many sizes as the device can hold, among them the largest.

        Raises ConfigurationError when it can hold none.
        """
        room = {
            "streams": (limits.streams - SPARE_STREAMS) // self.streams_per_graph,
            "events": limits.events // max(1, self.events_per_graph),
            "updatable launches": limits.updatable_tasks // max(1, self.updates_per_graph),
        }
        what, most = min(room.items(), key=lambda item: item[1])
        if most < 1:
            raise ConfigurationError(
                f"A graph of this model does not fit the device: {self.told()}; limits: {limits}, "
                f"too few {what}. Start with --enforce-eager."
            )
        if most >= len(self.sizes):
            return self
        note = f"{len(self.sizes)} sizes were asked for, and the device has {what} for {most}"
        return replace(
            self, sizes=tuple(sample_evenly(self.sizes, most)), notes=(*self.notes, note)
        )

    def told(self) -> str:
        """One line for the log."""
        count = len(self.sizes)
        text = (
            f"{count} graphs of {', '.join(map(str, self.sizes))} tokens; each with "
            f"{self.streams_per_graph} streams, {self.events_per_graph} events, "
            f"{self.updates_per_graph} launches to update; together "
            f"{count * self.streams_per_graph} streams, {count * self.events_per_graph} events"
        )
        if self.memory_bytes is not None:
            text += f", about {self.memory_bytes / (1 << 20):.0f} MiB"
        return "; ".join([text, *self.notes])


def plan_capture(
    vllm_config: "VllmConfig",
    sizes: list[int],
    num_attention_layers: int,
    memory_bytes: int | None = None,
) -> CapturePlan:
    """The plan of this rank's graphs, before the device's limits.

    num_attention_layers: of this pipeline stage
    memory_bytes:         that the largest step needs, if it is known
    """
    parallel = vllm_config.parallel_config
    options = get_config(vllm_config).torchair_graph_config
    model = vllm_config.model_config
    # Process groups whose collectives a layer launches: each has a stream of its own.
    groups = [
        parallel.tensor_parallel_size > 1,
        model.is_moe and parallel.data_parallel_size > 1,
    ]
    sides = [options.enable_multistream_mla, options.enable_multistream_moe]
    # A fork or a collective takes an event there and one back. Per layer: two reductions, gather
    # and scatter; three hand-overs of MLA's side stream, four of the shared experts'.
    per_layer = 2 * (2 * groups[0] + 2 * groups[1] + 3 * sides[0] + 4 * sides[1])
    return CapturePlan(
        sizes=tuple(sizes),
        streams_per_graph=1 + sum(groups) + sum(sides),
        events_per_graph=per_layer * num_attention_layers,
        updates_per_graph=num_attention_layers,
        memory_bytes=memory_bytes,
    )
