"""Device memory for the KV cache: recorded sizes, and errors if it is too small."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
import torch_npu
from vllm.v1.worker.utils import request_memory

from vllm_davinci.core import components
from vllm_davinci.core.errors import DeviceError
from vllm_davinci.core.log import init_logger

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)

# Torch's allocator reserves segments of this size for small tensors. How full they are depends on
# all sizes, so another --max-model-len may need one more.
SMALL_SEGMENT_BYTES = 2 << 20
# Left, if possible, for workspaces of streams that start-up has not used. A product needs 20 MiB.
SPARE_WORKSPACE_BYTES = 64 << 20


EXPANDABLE_SEGMENTS = "expandable_segments"


_are_expandable = False  # set by `use_expandable_segments`
_asked_share: float | None = None  # allowed share of device memory before an engine lowers it


def use_expandable_segments(asked: str) -> None:
    """Lets torch's allocator map memory where a large tensor needs it, so that gaps between tensors
    can be reused.

    asked: the user's allocator settings; an explicit choice of segments stays
    Call it before the device's first tensor.
    """
    global _are_expandable
    settings = [each for each in asked.split(",") if each.strip()]
    others = [each for each in settings if EXPANDABLE_SEGMENTS not in each]
    _are_expandable = len(others) == len(settings) or any(
        each.replace(" ", "") == f"{EXPANDABLE_SEGMENTS}:True" for each in settings
    )
    if len(others) == len(settings):
        _let_expand(True)


@contextmanager
def expandable_segments_off() -> Iterator[None]:
    """Inside the block, a pool's own allocator may provide memory to torch's allocator."""
    if not _are_expandable:
        yield
        return
    _let_expand(False)
    try:
        yield
    finally:
        _let_expand(True)


def _let_expand(is_on: bool) -> None:
    torch_npu.npu.memory._set_allocator_settings(f"{EXPANDABLE_SEGMENTS}:{is_on}")


def discard_damaged_plans(cache_root: Path) -> None:
    """Removes vLLM's startup plans that are not JSON objects, with a warning for each.

    vLLM ignores plans of other configurations and truncated plans, but its worker
    ends on any other content.
    cache_root: VLLM_CACHE_ROOT
    """
    for path in (cache_root / "startup_plan").glob("startup_plan_*.json"):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue  # another rank was faster
        except (OSError, ValueError) as error:
            reason = str(error)
        else:
            if isinstance(found, dict):
                continue
            reason = f"it holds {type(found).__name__}, not an object"
        logger.warning(
            "The recorded KV cache size in %s is damaged (%s): it is removed, and memory is "
            "measured anew.",
            path,
            reason,
        )
        path.unlink(missing_ok=True)


def bytes_in_pieces(statistics: Mapping[str, int]) -> int:
    """Fragmentation in bytes: memory that the allocator held beyond the peak of tensors and could
    not return, as remainders of split blocks. vLLM measures tensors only.

    statistics: of torch's allocator, with peaks since the measurement began. Expandable segments
                do not fragment: torch unmaps what lies between tensors
    Returns an upper bound: the peaks may have been at different times.
    """
    held = statistics.get("reserved_bytes.all.peak", 0) - statistics.get(
        "allocated_bytes.all.peak", 0
    )
    return max(0, min(held, statistics.get("inactive_split_bytes.all.peak", 0)))


def leave_room_for_workspaces(workspace_bytes: int, tensor_bytes: int) -> None:
    """Limits the memory that torch's allocator keeps, so that operators find memory for workspaces.

    The allocator keeps freed memory, up to the whole device, and releases it only for another
    tensor. Some workspaces do not come from this allocator: those of compiled operators, and with
    TASK_QUEUE_ENABLE=2 those of all operators. A step fails if such a workspace finds no memory.
    Each stream allocates its workspace at the first need, and again when it needs a larger one.
    workspace_bytes: workspaces of the largest steps
    tensor_bytes:    KV cache, largest step and graphs, which the allocator can always have
    """
    torch.accelerator.empty_cache()
    free_bytes, total_bytes = torch.accelerator.get_memory_info()
    spare_bytes = (free_bytes - workspace_bytes - tensor_bytes) // 2
    spare_bytes = max(0, min(spare_bytes, max(workspace_bytes, SPARE_WORKSPACE_BYTES)))
    kept_bytes = torch.accelerator.memory_reserved() + free_bytes - workspace_bytes - spare_bytes
    global _asked_share
    if _asked_share is None:
        _asked_share = torch_npu.npu.get_per_process_memory_fraction()
    share = min(_asked_share, max(0.0, kept_bytes / total_bytes))
    torch_npu.npu.set_per_process_memory_fraction(share)


def restore_asked_share() -> None:
    """Lifts the limit that an earlier engine of this process has set."""
    global _asked_share
    if _asked_share is not None:
        torch_npu.npu.set_per_process_memory_fraction(_asked_share)
        _asked_share = None


def memory_beside_buffers(
    snapshot: "MemorySnapshot",
    cache_config: "CacheConfig",
    external_weight_bytes: int,
    buffer_bytes: int,
) -> int:
    """Device memory that the engine may use in addition to HCCL's buffers, in bytes.

    snapshot:              taken after the buffers were made
    external_weight_bytes: weights held by another process
    buffer_bytes:          size of the buffers, which grows with the number of ubatches
    Returns vLLM's fraction of all memory if that is free. If the buffers leave less, returns the
    fraction of the rest and logs a warning. Raises vLLM's ValueError if other processes use the
    memory.
    """
    try:
        return request_memory(snapshot, cache_config, external_weight_bytes)
    except ValueError:
        share, total_bytes = cache_config.gpu_memory_utilization, snapshot.total_memory
        left_bytes = int(share * (total_bytes - buffer_bytes))
        is_theirs = share * total_bytes <= snapshot.free_memory + buffer_bytes
        if external_weight_bytes or not is_theirs or left_bytes > snapshot.free_memory:
            raise
        logger.warning(
            "HCCL's buffers take %s: the engine plans with %s, --gpu-memory-utilization %s of the"
            " rest, not of all %s. A smaller HCCL_BUFFSIZE shrinks them.",
            format_bytes(buffer_bytes),
            format_bytes(left_bytes),
            share,
            format_bytes(total_bytes),
        )
        return left_bytes


def cache_bytes_of_a_request(worker: "Worker") -> int:
    """Bytes of KV cache for the longest request; 0 without a cache, or if vLLM chooses the length
    that fits."""
    specs = worker.get_kv_cache_spec()
    if not specs or worker.model_config.original_max_model_len == -1:
        return 0
    # vLLM keeps one block of its pool empty (the null block).
    block_bytes = sum(spec.page_size_bytes for spec in specs.values())
    request_bytes = sum(spec.max_memory_usage_bytes(worker.vllm_config) for spec in specs.values())
    return int(request_bytes + block_bytes)


def check_kv_cache_budget(available_bytes: int, worker: "Worker") -> None:
    """Raises DeviceError if no memory is left for the KV cache, or too little for one request.

    The message says how many bytes are missing and which flag to change. vLLM's own check, later
    and across all workers, does not say what used the memory.
    """
    needed_bytes = cache_bytes_of_a_request(worker)
    if available_bytes >= needed_bytes:
        _tell_of_host_memory(available_bytes)
        return
    specs = worker.get_kv_cache_spec()
    block_bytes = sum(spec.page_size_bytes for spec in specs.values())
    request_bytes = needed_bytes - block_bytes
    missing_bytes = needed_bytes - available_bytes
    total_bytes = worker.init_snapshot.total_memory
    utilization = worker.cache_config.gpu_memory_utilization
    max_model_len = worker.model_config.max_model_len
    enough_utilization = utilization + (missing_bytes + SMALL_SEGMENT_BYTES) / total_bytes
    # Memory is allocated in blocks, so a fitting length is a whole number of them.
    block_size = max(spec.block_size for spec in specs.values())
    bytes_per_block_of_request = request_bytes / -(-max_model_len // block_size)
    spare_bytes = 0 if worker.cache_config.kv_cache_memory_bytes else SMALL_SEGMENT_BYTES
    fitting_blocks = (available_bytes - spare_bytes - block_bytes) / bytes_per_block_of_request
    fitting_len = int(max(fitting_blocks, 0)) * block_size
    remedies = []
    if worker.cache_config.kv_cache_memory_bytes:
        remedies.append(f"raise --kv-cache-memory-bytes to {needed_bytes}")
    elif enough_utilization < 1:
        # Rounded up: the suggested value must suffice.
        remedies.append(f"raise --gpu-memory-utilization to {enough_utilization + 0.01:.2f}")
    if fitting_len > 0:
        remedies.append(f"lower --max-model-len to {fitting_len} or less")
    remedies.append("lower --max-num-batched-tokens")
    remedies.append("lower --max-num-seqs")  # tables on the device have a row per request
    remedies.append("raise --tensor-parallel-size")
    raise DeviceError(
        f"The KV cache does not fit: one request of {max_model_len} tokens needs "
        f"{format_bytes(needed_bytes)}, {format_bytes(max(available_bytes, 0))} are left on "
        f"{worker.device}, {format_bytes(missing_bytes)} are missing. The device has "
        f"{format_bytes(total_bytes)}, of which --gpu-memory-utilization {utilization} may be "
        f"used; weights take {format_bytes(int(worker.model_runner.model_memory_usage))}, the "
        f"largest step {format_bytes(int(getattr(worker, 'peak_activation_memory', 0)))}. "
        f"To make it fit: {'; or '.join(remedies)}."
    )


def check_given_cache(worker: "Worker", left_bytes: int, step_bytes: int) -> None:
    """Raises DeviceError if --kv-cache-memory-bytes leaves too little memory for a step.

    left_bytes: left by the KV cache and the weights
    step_bytes: most bytes of the largest step
    """
    given_bytes = worker.cache_config.kv_cache_memory_bytes
    if given_bytes is None or step_bytes <= left_bytes:
        return
    most_bytes = given_bytes + left_bytes - step_bytes
    raise DeviceError(
        f"--kv-cache-memory-bytes {given_bytes} ({format_bytes(given_bytes)}) leaves "
        f"{format_bytes(max(left_bytes, 0))} of {worker.device} after the weights, and the "
        f"largest step takes {format_bytes(step_bytes)}. Lower it to {max(most_bytes, 0)} or "
        "less, lower --max-num-batched-tokens, or raise --tensor-parallel-size."
    )


def format_bytes(count: int) -> str:
    """The size in the largest unit with a nonzero integer part: 1.50 GiB, 83.2 MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _tell_of_host_memory(kv_cache_bytes: int) -> None:
    """Logs a hint if a virtual device's KV cache could outgrow the host's memory.

    A virtual device allocates host memory on write, so the cache grows token by token.
    kv_cache_bytes: of this rank
    """
    if components.active_device() is None or not components.device_computes():
        return
    free_bytes = psutil.virtual_memory().available
    if kv_cache_bytes > free_bytes:
        logger.info(
            "The KV cache may grow to %.1f GiB, and this host has %.1f GiB left, from which the "
            "virtual device allocates as tokens are written. Limit it for long runs: "
            "--kv-cache-memory-bytes, or `vnpu run --memory` for the whole device.",
            kv_cache_bytes / 2**30,
            free_bytes / 2**30,
        )
