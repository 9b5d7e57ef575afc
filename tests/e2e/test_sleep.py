"""Sleeping engines free the device's memory, and give the same tokens after waking."""

from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from vllm_davinci_testing.engines.adapters import write_adapter
from vllm_davinci_testing.engines.generating import bits
from vllm_davinci_testing.engines.graph_settings import decode_graphs
from vllm_davinci_testing.engines.refusals import refusal_of
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

DENSE = "tiny_llama"
MLA = "tiny_deepseek"
SLEEP: dict[str, Any] = {
    "enable_sleep_mode": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "worker_extension_cls": "vllm_davinci_testing.engines.sleeping_worker.SleepingWorker",
}
GRAPHS = decode_graphs(4, 8)
RACES = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:5"}
TP2 = {"tensor_parallel_size": 2}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.mark.parametrize(
    ("model", "options", "environment"),
    [
        pytest.param(
            DENSE,
            {**GRAPHS, **LORA},
            RACES,
            id="dense_adapters_graphs_races",
            marks=pytest.mark.nightly("weights"),
        ),
        pytest.param(MLA, {**GRAPHS, **TP2}, {}, id="mla_graphs_tp2"),
        pytest.param(
            "qwen3_moe_softmax_top2_of_8", {}, {}, id="experts", marks=pytest.mark.thorough
        ),
        pytest.param("hy_v4", GRAPHS, RACES, id="sinks", marks=pytest.mark.thorough),
    ],
)
def test_tokens_are_equal_before_and_after_sleep(
    repository, zoo, start_engine, prompts, tmp_path, model, options, environment
):
    checkpoint = repository / "checkpoints" / model if model in (DENSE, MLA) else zoo(model)
    given = prompts[3:9]
    adapter = None
    if "enable_lora" in options:
        network = TransformersReference(checkpoint).network
        adapter = LoRARequest("a", 1, str(write_adapter(network, tmp_path, 8, seed=2)))
    with start_engine(checkpoint, environment=environment, **SLEEP, **options) as engine:
        expected = bits(engine, given, adapter)
        if adapter is not None:
            assert bits(engine, given) != expected
        weights = engine.on_workers("weight_bytes")
        for level in (1, 2, 1):
            before = engine.on_workers("memory")
            engine.sleep(level=level)
            asleep = engine.on_workers("memory")
            for rank, (awake, sleeping) in enumerate(zip(before, asleep, strict=True)):
                assert sleeping["weights"] == sleeping["kv_cache"] == 0
                assert awake["weights"] >= weights[rank]
                freed = sleeping["free"] - awake["free"]
                assert freed >= awake["weights"] + awake["kv_cache"]
            if level == 1:
                engine.wake_up()
            else:  # a trainer temporarily needs the cache's memory
                engine.wake_up(tags=["weights"])
                partly = engine.on_workers("memory")
                assert all(each["weights"] and not each["kv_cache"] for each in partly)
                if adapter is None:
                    engine.on_workers("reload_weights")
                else:  # this loader keeps adapters in place; reloading does not
                    engine.on_workers("load_from", str(checkpoint))
                engine.wake_up(tags=["kv_cache"])
            woken = engine.on_workers("memory")
            assert [each["weights"] for each in woken] == [each["weights"] for each in before]
            assert [each["kv_cache"] for each in woken] == [each["kv_cache"] for each in before]
            assert bits(engine, given, adapter) == expected


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sleep_mode_offload_cudagraph": True}, "--sleep-mode-offload-cudagraph"),
        ({"enable_nccl_comm_suspend": True}, "--enable-nccl-comm-suspend"),
        ({"kv_offloading_size": 1.0}, "with --enable-sleep-mode"),
    ],
)
def test_other_ways_to_sleep_end_the_start(tiny_llama: Path, options: dict[str, Any], told: str):
    assert told in refusal_of(tiny_llama, enable_sleep_mode=True, **options)
