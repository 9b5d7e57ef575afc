"""Decode of 24 requests on 16 chips with graphs, compared with the published command."""

from __future__ import annotations

from typing import Any

from published.figures import beside, modelled, ms, time_ratio_of
from published.intervals import interval
from published.runs import EXPERT_PARALLEL, NO_ASYNC, PS_PER_MS, Runs
from result import Row

# Published milliseconds between tokens: first and improved MLA multistream. Single runs.
FIRST_INTERVAL_MS, INTERVAL_MS = 59.88, 59.04
# Our goals, relative to a graph without side streams.
GOAL_DECODE, GOAL_FUSED_DECODE = 1 / 1.05, 1 / 1.08
# Prompts first, so that all requests decode together.
PROMPTS_FIRST = {"ascend_scheduler_config": {"enabled": True}}
DECODE_GRAPH = {**PROMPTS_FIRST, "torchair_graph_config": {"enabled": True}}
SIDE_STREAMS = {
    **PROMPTS_FIRST,
    "torchair_graph_config": {
        "enabled": True,
        "enable_multistream_mla": True,
        "enable_multistream_moe": True,
    },
}
# As many bytes of routed experts as memory delivers during one all-reduce; the default is 18 MiB.
DURING_A_SUM = 44 << 20
PREFETCH = {"weight_prefetch_config": {"enabled": True, "max_bytes": DURING_A_SUM}}
COMPOSED = {"enable_compiled_operators": False}


def decode_rows(runs: Runs) -> list[Row]:
    first_mla = {
        **PROMPTS_FIRST,
        "torchair_graph_config": {"enabled": True, "enable_multistream_mla": True},
        "expert_tensor_parallel_size": 16,
    }
    without_mla = {key: first_mla[key] for key in first_mla if key != "torchair_graph_config"}
    # The published release had no asynchronous scheduling.
    one_stream = runs.decode({**DECODE_GRAPH, **without_mla}, NO_ASYNC)
    published = runs.decode(first_mla, NO_ASYNC)
    whole = runs.decode({**DECODE_GRAPH, **COMPOSED}, EXPERT_PARALLEL)
    beside_it = runs.decode({**SIDE_STREAMS, **COMPOSED}, EXPERT_PARALLEL)
    by_default = {**SIDE_STREAMS, "weight_prefetch_config": {"enabled": True}}
    ahead = runs.decode({**by_default, **COMPOSED}, EXPERT_PARALLEL)
    more = runs.decode({**SIDE_STREAMS, **COMPOSED, **PREFETCH}, EXPERT_PARALLEL)
    fused = runs.decode(by_default, EXPERT_PARALLEL)
    more_fused = runs.decode({**SIDE_STREAMS, **PREFETCH}, EXPERT_PARALLEL)

    def row(name: str, step: dict[str, Any], baseline: dict[str, Any], **fields: Any) -> Row:
        return modelled(
            name, "ms", ms(step), baseline=ms(baseline),
            interval=interval(time_ratio_of, step, baseline), **fields,
        )  # fmt: skip

    lowest, highest = interval(lambda view: float(view["host_ps"]) / PS_PER_MS, published)
    return [
        row(
            "decode of 24 requests, the published command", published, one_stream,
            note=beside(ms(published), INTERVAL_MS) + f", {lowest:.1f} to {highest:.1f} ms; over "
            f"one stream, where the published {FIRST_INTERVAL_MS} to {INTERVAL_MS} is over an "
            "earlier schedule of two",
        ),
        row(
            "decode of 24 requests, side streams", beside_it, whole,
            note="experts whole on their ranks; torch_npu's operators",
        ),
        row(
            "the same, with weights fetched under sums over ranks", ahead, whole,
            at_most=GOAL_DECODE,
            note=f"up to 18 MiB of a weight; {ms(more):.2f} ms with {DURING_A_SUM >> 20}",
        ),
        row(
            "the same, with compiled operators", fused, whole, at_most=GOAL_FUSED_DECODE,
            note=f"{ms(more_fused):.2f} ms with {DURING_A_SUM >> 20} MiB",
        ),
    ]  # fmt: skip
