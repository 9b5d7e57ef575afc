"""Host time of published decode steps of Qwen3-30B-A3B, compared with the timing model.

Launches per layer are counted in the sources of the measured releases (vllm-project/vllm-ascend),
not in ours. No command distributes experts over ranks: each rank has a slice of every expert, and
routing does not change its share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from published.runs import PS_PER_MS
from vllm_davinci.vnpu.timing import load_machine

LAYERS = 48


@dataclass(frozen=True)
class Launches:
    """Host calls per layer of a decode step; `operators` and `collectives` are launched outside
    graphs.
    """

    told: str
    graphs: int = 0
    operators: int = 0
    collectives: int = 0
    events: int = 0

    def host_ps(self, figures: Mapping[str, int]) -> int:
        """Returns the host time of a step."""
        per_layer = (
            self.graphs * figures["host_graph_launch"]
            + self.operators * figures["host_operator_launch"]
            + self.collectives * figures["host_collective_launch"]
            + self.events * figures["host_event_call"]
        )
        return LAYERS * per_layer


# v0.9.2rc1: `splitting_ops` cuts the graph at `unified_ascend_attention_with_output`, which copies
# values, writes the cache, attends and copies its output.
IN_PIECES = Launches("a graph per layer; attention's 4 launches beside it", graphs=1, operators=4)
# v0.9.1rc1, whose graphs do not support Qwen3-MoE (pull request 1381, 6 July 2025), and v0.9.2rc1
# with --enforce-eager: 2 norms, 5 products, 2 norms of heads, rotary embedding, attention as above,
# 5 for the choice of experts, 9 more of `fused_experts`.
ONE_BY_ONE = Launches("all 28 launches and 2 sums one by one", operators=28, collectives=2)
# v0.11.0rc2, FULL_DECODE_ONLY: `update_attn_params` asks for a workspace, begins an update,
# launches attention, ends the update and records an event.
UPDATED = Launches("one graph; attention's update per layer", operators=2, events=3)

# Rows of others.FIGURES, by source: how the release launches, and how it may have launched.
RELEASES: Mapping[int, tuple[Launches, ...]] = {
    2328: (IN_PIECES, ONE_BY_ONE),
    1605: (ONE_BY_ONE,),  # of 3 July 2025
    4656: (UPDATED,),
}


@dataclass(frozen=True)
class Decode:
    """A published decode step.

    ours_ps:   time of the modelled step
    device_ps: time in which the device is busy
    """

    name: str
    source: int
    published_ms: float
    requests: int
    ours_ps: int
    device_ps: int


def moe_page(decodes: Sequence[Decode], chip: str) -> str:
    """Returns the table of these steps in Markdown."""
    machine = load_machine(chip, "node-of-8")
    highest = {name: machine.ranges.get(name, (0, value))[1]
               for name, value in machine.figures.items()}  # fmt: skip
    head = (
        *("step", "published", "ours", "the device's part", "launched by its release"),
        *("with its host, stated figures", "at their highest", "left at the highest"),
    )
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for decode in decodes:
        for launches in RELEASES[decode.source]:
            stated, most = (
                max(decode.device_ps, launches.host_ps(figures)) + figures["host_step"]
                + decode.requests * figures["host_step_request"]
                for figures in (machine.figures, highest)
            )  # fmt: skip
            left = decode.published_ms - most / PS_PER_MS
            cells = (
                f"{decode.name} ({decode.source})",
                f"{decode.published_ms:g} ms",
                *(f"{ps / PS_PER_MS:.1f} ms" for ps in (decode.ours_ps, decode.device_ps)),
                launches.told,
                *(f"{ps / PS_PER_MS:.1f} ms" for ps in (stated, most)),
                f"{left:.1f} ms" if left > 0 else "nothing",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
