"""Checks that Ray has the NPUs that an engine needs, before vLLM waits for them.

vLLM requests all of them at once and waits 30 minutes, since hosts may join. A shorter wait is
enough for users who start an engine before its hosts.
"""

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from vllm_davinci.core.errors import DeviceError
from vllm_davinci.core.log import init_logger

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

logger = init_logger(__name__)

RESOURCE = "NPU"
# Enough for hosts that join, and for an engine that has just ended to release its NPUs.
WAIT_S = 60
_ASKED_FOR_S = WAIT_S + 60

# Runs in a separate process, because vLLM will connect this process to Ray with the user's runtime
# environment. Prints the number of all NPUs and of free ones; nothing if Ray does not run.
_ASK = """
import json, sys, time
import ray

try:
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
except ConnectionError:
    sys.exit()
name, needed, wait_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
deadline = time.monotonic() + wait_s
while True:
    counts = [int(each().get(name, 0)) for each in (ray.cluster_resources, ray.available_resources)]
    if counts[1] >= needed or time.monotonic() > deadline:
        break
    time.sleep(1)
print("NPUS", json.dumps(counts))
"""


def check_ray_devices(parallel: "ParallelConfig") -> None:
    """Raises DeviceError if for a minute Ray has fewer free NPUs than the engine's ranks."""
    if parallel.distributed_executor_backend != "ray" or parallel.placement_group is not None:
        return
    needed = parallel.world_size
    if parallel.data_parallel_backend == "ray":
        needed *= parallel.data_parallel_size
    else:
        needed *= max(parallel.data_parallel_size_local, 1)
    counts = _counts(needed)
    if counts is None or counts[1] >= needed:
        return
    total, free = counts
    raise DeviceError(
        f"{needed} NPUs are needed (tensor parallel {parallel.tensor_parallel_size} x pipeline "
        f"parallel {parallel.pipeline_parallel_size} x data parallel "
        f"{needed // parallel.world_size}), and Ray's cluster has {total}, of which {free} are "
        f"free after {WAIT_S} s. Start Ray on more hosts (with virtual devices: "
        f"""ray start --resources '{{"{RESOURCE}": COUNT}}'), end the jobs that hold the others, """
        "or lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size."
    )


def _counts(needed: int) -> tuple[int, int] | None:
    """NPUs of Ray's cluster, total and free; None if unknown."""
    command = [sys.executable, "-c", _ASK, RESOURCE, str(needed), str(WAIT_S)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_ASKED_FOR_S)
    except subprocess.TimeoutExpired:
        logger.warning("Ray did not report its number of NPUs within %d s.", _ASKED_FOR_S)
        return None
    lines = [line for line in ended.stdout.splitlines() if line.startswith("NPUS ")]
    if not lines:  # vLLM starts Ray itself, or reports what is wrong with it
        return None
    total, free = json.loads(lines[-1].removeprefix("NPUS "))
    return total, free
