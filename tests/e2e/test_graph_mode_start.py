"""Graph mode at start-up: a recorded KV cache size, and settings that exclude graphs."""

import json
from pathlib import Path

import pytest

from vllm_davinci_testing.engines.fixture_types import StartEngine, Zoo

pytestmark = pytest.mark.nightly("layouts")

MODEL = "llama_head64_gqa4"
KEY_OF_PLAN = {"schema", "fingerprint"}


def test_a_recorded_kv_cache_size_is_reused_and_a_damaged_or_stale_record_is_not(
    start_engine: StartEngine, zoo: Zoo, tmp_path: Path
):
    graph = {
        "enabled": True,
        "use_cached_graph": True,
        "use_cached_kv_cache_bytes": True,
        "graph_batch_sizes": [8],
    }

    def start() -> tuple[int, str]:
        engine = start_engine(
            zoo(MODEL),
            environment={"VLLM_CACHE_ROOT": str(tmp_path), "VNPU_MEMORY": "1GiB"},
            enforce_eager=False,
            kv_cache_memory_bytes=None,
            gpu_memory_utilization=0.5,
            additional_config={"torchair_graph_config": graph},
            max_num_seqs=8,
            max_num_batched_tokens=512,
        )
        (blocks,) = engine.on_workers("num_kv_cache_blocks")
        engine.close()
        return blocks, engine.log_text()

    measured, log = start()
    assert "Applying persisted startup plan" not in log
    again, log = start()
    assert again == measured
    assert "Applying persisted startup plan" in log
    (plan,) = (tmp_path / "startup_plan").iterdir()
    whole = json.loads(plan.read_text(encoding="utf-8"))
    plan.write_bytes(b"\xff\x00")
    rebuilt, log = start()
    assert rebuilt == measured
    assert f"The recorded KV cache size in {plan} is damaged" in log
    assert json.loads(plan.read_text(encoding="utf-8")) == whole
    # The plan was measured on a device with more free memory, for a larger cache.
    stale = {name: 2 * value for name, value in whole.items() if name not in KEY_OF_PLAN}
    plan.write_text(json.dumps({**whole, **stale}), encoding="utf-8")
    rebuilt, log = start()
    assert rebuilt == measured
    assert "Startup plan not applied" in log
