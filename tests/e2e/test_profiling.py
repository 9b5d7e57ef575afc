"""vLLM's profiler, and the compute threads of virtual devices."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.generating import as_inputs
from vllm_davinci_testing.processes.forked import output_of

pytestmark = pytest.mark.nightly("planning")


def test_virtual_devices_compute_with_the_threads_that_there_were(tiny_llama: Path):
    """Unless OMP_NUM_THREADS is set, vLLM limits a process with a model to one thread."""
    [threads] = output_of(
        f"""
        import os
        import torch
        os.environ.pop("OMP_NUM_THREADS", None)
        torch.set_num_threads(3)
        from vllm import LLM
        LLM({str(tiny_llama)!r}, dtype="bfloat16", enforce_eager=True, max_model_len=256)
        print("threads:", torch.get_num_threads())
        """,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VNPU_SOC="Ascend910B3",
    )[-1:]
    assert threads == "threads: 3"


def test_vllm_s_profiler_writes_a_trace_of_host_and_device(start_engine, tiny_llama, tmp_path):
    engine = start_engine(
        tiny_llama,
        enforce_eager=False,
        max_num_seqs=4,
        profiler_config={"profiler": "torch", "torch_profiler_dir": str(tmp_path)},
    )
    engine.on_workers("profile", True)
    engine.generate(as_inputs([[5, 6, 7]]), SamplingParams(temperature=0, max_tokens=4))
    engine.on_workers("profile", False)
    engine.close()
    (trace,) = tmp_path.glob("*.pt.trace.json.gz")
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = Counter(event.get("name") for event in events)
    assert names["aten::argmax"] >= 4
    assert sum(count for name, count in names.items() if str(name).startswith("aten::")) > 100
    kernels = Counter(event["name"] for event in events if event.get("cat") == "kernel")
    num_layers = json.loads((tiny_llama / "config.json").read_text())["num_hidden_layers"]
    # One prefill launches the operator itself; the three decodes replay a graph.
    assert kernels["aclnnFusedInferAttentionScoreV3"] == 4 * num_layers
    assert kernels["aclnnArgMax"] >= 4
