"""Messages about a KV cache that does not fit, and about damaged recorded sizes."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_davinci.core.device import memory
from vllm_davinci.core.device.memory import (
    bytes_in_pieces,
    check_given_cache,
    check_kv_cache_budget,
    discard_damaged_plans,
    format_bytes,
    memory_beside_buffers,
)
from vllm_davinci.core.errors import DeviceError
from vllm_davinci_testing.processes.programs import output_of, run_program

SPEC = FullAttentionSpec(block_size=128, num_kv_heads=32, head_size=64, dtype=torch.bfloat16)
MAX_MODEL_LEN = 1024
# Two layers, with one block more than the longest request needs.
BLOCK_BYTES = 2 * SPEC.page_size_bytes
NEEDED_BYTES = (MAX_MODEL_LEN // 128 + 1) * BLOCK_BYTES


@pytest.fixture
def worker(vllm_config: VllmConfig) -> SimpleNamespace:
    model = SimpleNamespace(
        max_model_len=MAX_MODEL_LEN, original_max_model_len=None, is_encoder_decoder=False
    )
    vllm_config.model_config = model  # type: ignore[assignment]
    return SimpleNamespace(
        vllm_config=vllm_config,
        model_config=model,
        cache_config=vllm_config.cache_config,
        device="npu:0",
        init_snapshot=SimpleNamespace(total_memory=1 << 30),
        model_runner=SimpleNamespace(model_memory_usage=3 << 20),
        peak_activation_memory=2 << 20,
        get_kv_cache_spec=lambda: {"layers.0": SPEC, "layers.1": SPEC},
    )


@pytest.mark.parametrize(
    ("reserved", "allocated", "split", "pieces"),
    [(100, 80, 15, 15), (100, 95, 15, 5), (100, 100, 0, 0)],
)
def test_remainders_of_split_blocks_are_not_counted_for_the_cache(
    reserved: int, allocated: int, split: int, pieces: int
):
    statistics = {
        "reserved_bytes.all.peak": reserved,
        "allocated_bytes.all.peak": allocated,
        "inactive_split_bytes.all.peak": split,
    }
    assert bytes_in_pieces(statistics) == pieces


@pytest.mark.nightly("planning")
def test_segments_are_expandable_unless_the_user_says_otherwise():
    """Runs in its own process, because the setting applies to a whole process."""
    told = output_of(
        """
        import torch
        from vllm_davinci.core.device.memory import bytes_in_pieces, use_expandable_segments
        use_expandable_segments("expandable_segments:False")
        before = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
        print([each["is_expandable"] for each in torch.npu.memory_snapshot()])
        del before
        torch.npu.empty_cache()
        use_expandable_segments("max_split_size_mb:64")
        parts = [torch.empty(64 << 20, dtype=torch.uint8, device="npu") for _ in range(4)]
        print([each["is_expandable"] for each in torch.npu.memory_snapshot()])
        del parts[::2]
        print(bytes_in_pieces(torch.npu.memory_stats()))
        """
    )
    assert told[:2] == ["[False]", "[True]"]
    assert int(told[2]) <= memory.SMALL_SEGMENT_BYTES, "two gaps of 64 MiB are no pieces"


@pytest.mark.parametrize(
    "limit",
    [
        "leave_room_for_workspaces(0, 300 << 20)",
        pytest.param("", id="none", marks=pytest.mark.nightly("planning")),
    ],
)
def test_torchs_cached_memory_leaves_room_for_a_workspace(limit: str):
    """A product needs a workspace after tensors of other streams were freed."""
    ended = run_program(
        f"""
        import torch
        from vllm_davinci.core.device.memory import leave_room_for_workspaces
        from vllm_davinci.core.device.memory import restore_asked_share, use_expandable_segments
        use_expandable_segments("")
        ones = torch.ones(64, 64, device="npu")
        streams = [torch.npu.Stream() for _ in range(3)]
        {limit}
        for stream, size in zip(streams, (200, 200, 40)):
            with torch.npu.stream(stream):
                torch.empty(size << 20, dtype=torch.uint8, device="npu")
        torch.npu.synchronize()
        print((ones @ ones).sum().item())
        restore_asked_share()
        print(torch.npu.get_per_process_memory_fraction())
        """,
        VNPU_MEMORY="512MiB",
        TASK_QUEUE_ENABLE="2",
    )
    if limit:
        assert ended.stdout == "262144.0\n1.0\n", ended.stderr[-2000:]
    else:
        assert "device 0 is out of memory" in ended.stderr


def test_enough_memory_passes(worker: SimpleNamespace):
    check_kv_cache_budget(NEEDED_BYTES, worker)


def test_a_model_without_a_cache_passes(worker: SimpleNamespace):
    worker.get_kv_cache_spec = dict
    check_kv_cache_budget(0, worker)


def test_a_length_chosen_by_vllm_passes(worker: SimpleNamespace):
    worker.model_config.original_max_model_len = -1
    check_kv_cache_budget(1, worker)


def test_the_missing_bytes_and_the_flags_are_named(worker: SimpleNamespace):
    with pytest.raises(DeviceError) as caught:
        check_kv_cache_budget(4 * BLOCK_BYTES, worker)
    message = str(caught.value)
    assert f"needs {format_bytes(NEEDED_BYTES)}" in message
    assert f"{format_bytes(NEEDED_BYTES - 4 * BLOCK_BYTES)} are missing" in message
    assert "lower --max-model-len to 256 or less" in message
    assert "raise --gpu-memory-utilization to 0.94" in message
    assert "weights take 3.00 MiB, the largest step 2.00 MiB" in message


def test_the_length_that_fits_is_a_whole_number_of_blocks(worker: SimpleNamespace):
    # A block equals a segment, which the allocator may take in addition next time.
    assert BLOCK_BYTES == memory.SMALL_SEGMENT_BYTES
    with pytest.raises(DeviceError, match="lower --max-model-len to 256 or less"):
        check_kv_cache_budget(5 * BLOCK_BYTES - 1, worker)


def test_an_explicit_cache_size_is_answered_with_the_size_that_fits(worker: SimpleNamespace):
    worker.cache_config.kv_cache_memory_bytes = 1
    with pytest.raises(DeviceError, match=f"raise --kv-cache-memory-bytes to {NEEDED_BYTES}"):
        check_kv_cache_budget(1, worker)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "buffers", "gib"), [(61, 3, 0.9 * 64), (55, 9, 0.9 * 55), (48, 9, None), (20, 0, None)]
)
def test_collectives_buffers_reduce_the_plan_and_other_processes_do_not(free, buffers, gib, worker):
    cache_config = worker.cache_config
    cache_config.gpu_memory_utilization = 0.9
    snapshot: Any = SimpleNamespace(total_memory=64 * GIB, free_memory=free * GIB, device_="npu:0")
    if gib is None:
        with pytest.raises(ValueError, match="Free memory on device npu:0"):
            memory_beside_buffers(snapshot, cache_config, 0, buffers * GIB)
    else:
        planned = memory_beside_buffers(snapshot, cache_config, 0, buffers * GIB)
        assert planned == pytest.approx(gib * GIB)


@pytest.mark.parametrize(("given", "left", "step"), [(None, 0, 9), (5, 9, 9)])
def test_a_cache_that_leaves_the_largest_step_its_memory_passes(worker, given, left, step):
    worker.cache_config.kv_cache_memory_bytes = given
    check_given_cache(worker, left, step)


@pytest.mark.parametrize(("left", "most"), [(1 << 20, "2097152"), (-(8 << 20), "0")])
def test_a_cache_that_leaves_the_largest_step_too_little_is_refused(worker, left, most):
    worker.cache_config.kv_cache_memory_bytes = 4 << 20
    with pytest.raises(DeviceError, match=rf"largest step takes 3.00 MiB. Lower it to {most} or"):
        check_given_cache(worker, left, 3 << 20)


def test_without_free_memory_no_length_is_suggested(worker: SimpleNamespace):
    with pytest.raises(DeviceError) as caught:
        check_kv_cache_budget(-(1 << 20), worker)
    assert "--max-model-len" not in str(caught.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [(12, "12 bytes"), (2048, "2.00 KiB"), (3 << 19, "1.50 MiB"), (5 << 30, "5.00 GiB")],
)
def test_sizes_are_written_in_the_largest_fitting_unit(count: int, text: str):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b'{"schema": 1, "finger', "Unterminated string"),
        (b"\x00\xff\xfe", "can't decode byte"),
        (b"[]", "it holds list, not an object"),
        (b"null", "it holds NoneType, not an object"),
    ],
)
def test_a_damaged_plan_is_removed_and_named(content, reason, tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(memory.logger, "warning", lambda text, *values: told.append(text % values))
    folder = tmp_path / "startup_plan"
    folder.mkdir()
    damaged, whole = folder / "startup_plan_1.json", folder / "startup_plan_2.json"
    damaged.write_bytes(content)
    whole.write_text(json.dumps({"schema": 1}), encoding="utf-8")
    discard_damaged_plans(tmp_path)
    assert list(folder.iterdir()) == [whole]
    (line,) = told
    assert f"{damaged} is damaged" in line
    assert reason in line
    discard_damaged_plans(tmp_path / "nothing is here")


@pytest.mark.parametrize(("free_gib", "is_said"), [(23.5, True), (64.0, False)])
def test_a_cache_larger_than_the_hosts_memory_is_logged(free_gib, is_said, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(memory.logger, "info", lambda text, *values: told.append(text % values))
    free = SimpleNamespace(available=int(free_gib * 2**30))
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: free)
    check_kv_cache_budget(int(58.3 * 2**30), SimpleNamespace(get_kv_cache_spec=dict))  # type: ignore[arg-type]
    assert len(told) == is_said
    assert all("grow to 58.3 GiB" in each and "--kv-cache-memory-bytes" in each for each in told)
