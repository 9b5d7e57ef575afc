"""Split steps launch the expected collectives, each during the other half's work."""

import pytest

from vllm_davinci.vnpu import timeline
from vllm_davinci_testing.engines.generating import TWO_RANKS, as_inputs
from vllm_davinci_testing.engines.split_engines import (
    FIRST_TOKEN,
    decisions,
    overlapped,
    random_prompts,
)

MODEL = "llama_head64_gqa4"

# One reduction each for the embedding, the dense layer's attention and MLP, the sparse layer's
# attention, and its shared and routed experts (together or separately). `lean` uses reduce-scatter
# for all but the embedding.
REDUCTIONS = {
    "off": {"all_reduce": 5},
    "published": {"all_reduce": 6},
    "lean": {"all_reduce": 1, "reduce_scatter": 4},
}


@pytest.mark.nightly("layouts")
def test_a_schedule_reduces_as_often_as_it_says_and_the_host_waits_no_more_often(zoo, start_engine):
    waits = []
    for schedule, expected in REDUCTIONS.items():
        with start_engine(
            zoo("deepseek_v3_moe"),
            **TWO_RANKS,
            additional_config={"overlap": schedule, "sequence_parallel": {"min_tokens": 1}},
            worker_extension_cls="vllm_davinci_testing.engines.counting_worker.CountingWorker",
        ) as engine:
            # torch_npu waits for the device when a stream's workspace must grow: let it grow first.
            engine.generate(as_inputs([[4, 5, 6]]), FIRST_TOKEN)
            engine.on_workers("count_collectives")
            engine.generate(as_inputs([[1, 2, 3]]), FIRST_TOKEN)
            waits.append(engine.on_workers("host_waits"))
            for counted in engine.on_workers("collectives"):
                assert {name: n for name, n in counted.items() if "reduce" in name} == expected
    assert waits == waits[:1] * len(REDUCTIONS)


@pytest.mark.nightly("layouts")
def test_the_host_waits_for_nothing_inside_the_layers_of_a_split_step(zoo, start_engine):
    waits = []
    for options in ({"overlap": "off"}, overlapped(split="token")["additional_config"]):
        with start_engine(
            zoo("deepseek_v3_moe"),
            **TWO_RANKS,
            additional_config=options,
            worker_extension_cls="vllm_davinci_testing.engines.counting_worker.CountingWorker",
        ) as engine:
            engine.generate(as_inputs(random_prompts(4, [40, 40])), FIRST_TOKEN)
            engine.on_workers("count_collectives")
            engine.generate(as_inputs(random_prompts(3, [40, 40])), FIRST_TOKEN)
            waits.append(engine.on_workers("host_waits"))
            split = decisions(engine)["split"]
    assert split == 2
    assert waits[0] == waits[1]


def test_one_half_computes_while_the_other_communicates(zoo, start_engine, tmp_path):
    # Longer than the host ever takes to launch the next operator.
    pace = "aclnnM=20000,all_reduce=20000"
    with start_engine(
        zoo(MODEL),
        environment={
            "VNPU_SCHEDULE": "threads", "VNPU_PACE": pace, "VNPU_TRACE": str(tmp_path),
        },
        **TWO_RANKS,
        additional_config={
            **overlapped()["additional_config"], "sequence_parallel": {"enabled": False},
        },
    ) as engine:  # fmt: skip
        engine.generate(as_inputs(random_prompts(1, [200] * 4)), FIRST_TOKEN)
        assert decisions(engine)["split"] == 1
    traced = timeline.read([tmp_path])
    for process in traced.processes:
        first, second = (
            [task for task in traced.tasks if (task.process, task.label) == (process, label)]
            for label in ("ubatch 0", "ubatch 1")
        )
        operators = [task for task in second if task.category == "operator"]
        collectives = [task for task in first if task.category == "collective"]
        assert len(collectives) > 2
        covered = [
            any(task.begin < end and task.end > begin for task in operators)
            for begin, end in (each.busy for each in collectives[1:])
        ]  # the first collective overlaps only a short look-up
        # Without overlap no collective is covered; a busy host launches some operators too late.
        assert sum(covered) > 0.3 * len(covered), covered
        # Streams with collectives run nothing else.
        streams = {task.stream for task in first + second if task.category == "collective"}
        assert {task.category for task in first + second if task.stream in streams} <= {
            "collective",
            "copy",
            "event",
        }
