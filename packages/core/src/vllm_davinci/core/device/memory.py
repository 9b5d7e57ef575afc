"""Device memory for the KV cache: sizes that earlier starts recorded, and too little of it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
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

# Torch's allocator takes this much at once for small tensors. How full what it takes is depends on
# every size, so that another length may need one more.
SMALL_SEGMENT_BYTES = 2 << 20


EXPANDABLE_SEGMENTS = "expandable_segments"


_are_expandable = False  # as `use_expandable_segments` has left it


def use_expandable_segments(asked: str) -> None:
    """Lets torch's allocator map device memory where a large tensor needs it, so that pieces
    between tensors are of use to others.

    asked: the user's settings of the allocator; what they say about segments stays
    Called before the first tensor of the device.
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
    """Inside, torch's allocator asks a pool's own allocator for memory."""
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
    """Removes vLLM's startup plans that are no objects of JSON; a warning names each.

    vLLM takes a plan of another configuration, or one that ends too early, for none. Other bytes,
    and other values of JSON, end its worker.
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
    """Device memory that the allocator held beside the most that tensors took, and could not give
    back: rests of blocks that it has split. vLLM's measurement sees tensors.

    statistics: torch's of the allocator, with peaks since the measurement began. Expandable
                segments have no such rests: torch gives back what it has mapped between tensors
    Returns an upper bound: the peaks need not have been at one time.
    """
    held = statistics.get("reserved_bytes.all.peak", 0) - statistics.get(
        "allocated_bytes.all.peak", 0
    )
    return max(0, min(held, statistics.get("inactive_split_bytes.all.peak", 0)))


def memory_beside_buffers(
    snapshot: "MemorySnapshot",
    cache_config: "CacheConfig",
    external_weight_bytes: int,
    buffer_bytes: int,
) -> int:
    """Device memory that the engine may use beside the buffers of collectives, in bytes.

    snapshot:              after those were made
    external_weight_bytes: of weights that another process holds
    buffer_bytes:          of these buffers, which are the larger the more ubatches use them
    vLLM's share of all memory where that is free; where these buffers leave less, the share of what
    they leave, and a warning. Raises vLLM's ValueError where other processes have the memory.
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
            "HCCL's buffers take %s: the engine plans with %s, --gpu-memory-utilization %s of what "
            "they leave, not of all %s. HCCL_BUFFSIZE makes them smaller.",
            format_bytes(buffer_bytes),
            format_bytes(left_bytes),
            share,
            format_bytes(total_bytes),
        )
        return left_bytes


def cache_bytes_of_a_request(worker: "Worker") -> int:
    """Bytes that the KV cache needs for the longest request; 0 where there is no cache, and where
    vLLM chooses the length that fits."""
    specs = worker.get_kv_cache_spec()
    if not specs or worker.model_config.original_max_model_len == -1:
        return 0
    # vLLM keeps one block of its pool empty.
    block_bytes = sum(spec.page_size_bytes for spec in specs.values())
    request_bytes = sum(spec.max_memory_usage_bytes(worker.vllm_config) for spec in specs.values())
    return int(request_bytes + block_bytes)


def check_kv_cache_budget(available_bytes: int, worker: "Worker") -> None:
    """Raises DeviceError when nothing is left for the KV cache, or too little for one request.

    Says how many bytes are missing and which flag to change. vLLM checks the same later, across
    all workers, with a message that does not name what used the memory.
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
    # Memory is given out in blocks, so a length that fits is a whole number of them.
    block_size = max(spec.block_size for spec in specs.values())
    bytes_per_block_of_request = request_bytes / -(-max_model_len // block_size)
    spare_bytes = 0 if worker.cache_config.kv_cache_memory_bytes else SMALL_SEGMENT_BYTES
    fitting_blocks = (available_bytes - spare_bytes - block_bytes) / bytes_per_block_of_request
    fitting_len = int(max(fitting_blocks, 0)) * block_size
    remedies = []
    if worker.cache_config.kv_cache_memory_bytes:
        remedies.append(f"raise --kv-cache-memory-bytes to {needed_bytes}")
    elif enough_utilization < 1:
        # Rounded up: the figure given must be enough.
        remedies.append(f"raise --gpu-memory-utilization to {enough_utilization + 0.01:.2f}")
    if fitting_len > 0:
        remedies.append(f"lower --max-model-len to {fitting_len} or less")
    remedies.append("lower --max-num-batched-tokens")
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
    """Raises DeviceError when the KV cache of --kv-cache-memory-bytes leaves a step no memory.

    left_bytes: that it leaves beside the weights
    step_bytes: that the largest step takes at most
    """
    given_bytes = worker.cache_config.kv_cache_memory_bytes
    if given_bytes is None or step_bytes <= left_bytes:
        return
    most_bytes = given_bytes + left_bytes - step_bytes
    raise DeviceError(
        f"--kv-cache-memory-bytes {given_bytes} ({format_bytes(given_bytes)}) leaves "
        f"{format_bytes(max(left_bytes, 0))} of {worker.device} beside the weights, and the "
        f"largest step takes {format_bytes(step_bytes)}. Lower it to {max(most_bytes, 0)} or less, "
        "lower --max-num-batched-tokens, or raise --tensor-parallel-size."
    )


def format_bytes(count: int) -> str:
    """A size in the largest unit that leaves a digit before the point: 1.50 GiB, 83.2 MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _tell_of_host_memory(kv_cache_bytes: int) -> None:
    """Says where a virtual device's KV cache could take more memory than its host has.

    A virtual device takes the host's memory when it is written: the cache grows token by token.
    kv_cache_bytes: of this rank
    """
    if components.active_device() is None or not components.device_computes():
        return
    free_bytes = psutil.virtual_memory().available
    if kv_cache_bytes > free_bytes:
        logger.info(
            "The KV cache may grow to %.1f GiB, and this host, whose memory the virtual device "
            "takes as tokens are written, has %.1f GiB left. Bound it for long runs: "
            "--kv-cache-memory-bytes, or `vnpu run --memory` for the whole device.",
            kv_cache_bytes / 2**30,
            free_bytes / 2**30,
        )
