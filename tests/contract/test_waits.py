"""Every wait of core, kernels and vnpu is listed with what limits it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("packages/core/src", "packages/kernels/src", "packages/kernels/csrc")
FOLDERS += ("packages/vnpu/src", "packages/vnpu/csrc")
WAITS = {
    ".py": re.compile(
        r"\.(?:wait|wait_for|synchronize|select|accept|recv|barrier|all_gather_object)\("
        r"|thread\.join\(|\ball_reduce\(message\b"
    ),
    ".cpp": re.compile(
        r"(?<!simulation)(?<!simulation_)\.(?:wait|wait_for|wait_until)\(|FUTEX_WAIT\b"
    ),
    ".h": re.compile(r"\.(?:wait|wait_for|wait_until)\("),
}

# Kinds of waits, and what ends each.
DEVICE = "HCCL_EXEC_TIMEOUT where another rank is late, VNPU_WAIT_LIMIT on a virtual device"
STREAM = "no wait of the host: a stream waits for an event or a collective"
START = "--distributed-timeout-seconds, or VLLM_ENGINE_READY_TIMEOUT_S of the front end"
OWN_LIMIT = "an argument: the limit stands in the call"
IDLE = "nothing has to: a thread that waits for work, and for which nobody waits"
USER = "the user's: a command that waits for the program it was given"
CORE, CSRC = "packages/core/src/vllm_davinci/core/", "packages/vnpu/csrc/"
# What ends the waits of each file or folder.
LISTED = {
    f"{CORE}device/refusals.py": DEVICE,
    f"{CORE}device/sleeping_memory.py": DEVICE,
    f"{CORE}device/torch_cuda_names.py": STREAM,
    f"{CORE}distributed/communicator.py": STREAM,
    f"{CORE}distributed/hccl_buffers.py": DEVICE,
    f"{CORE}distributed/engine_ring.py": f"{IDLE}; the farewell: {OWN_LIMIT}",
    f"{CORE}distributed/fault_channel.py": f"{START}; then {IDLE}",
    f"{CORE}distributed/ubatch_communicator.py": STREAM,
    f"{CORE}fused_moe/dispatcher/": f"config.time_limits, row_counts; then {DEVICE}",
    f"{CORE}fused_moe/expert_map_agreement.py": START,
    f"{CORE}inputs/copied_event.py": DEVICE,
    f"{CORE}kv_offload/transfers.py": DEVICE,
    f"{CORE}kv_transfer/host_pages.py": DEVICE,
    f"{CORE}kv_transfer/mooncake_worker.py": f"{DEVICE}; of another engine: {OWN_LIMIT}",
    f"{CORE}kv_transfer/worker.py": DEVICE,
    f"{CORE}log.py": OWN_LIMIT,
    f"{CORE}process/step_guard.py": OWN_LIMIT,
    f"{CORE}quantization/quant_matmul.py": DEVICE,
    f"{CORE}runner/": DEVICE,
    f"{CORE}ubatch/coordination.py": "config.time_limits, coordination",
    f"{CORE}ubatch/largest_steps.py": DEVICE,
    f"{CORE}weight_transfer/group.py": STREAM,
    f"{CORE}weight_transfer/hccl_engine.py": DEVICE,
    f"{CORE}weight_transfer/ipc_engine.py": f"{DEVICE}; the trainer's own group",
    f"{CORE}worker.py": START,
    "packages/vnpu/src/vllm_davinci/vnpu/supervised_command.py": USER,
    f"{CSRC}abi/ascendcl/event.cpp": STREAM,
    f"{CSRC}abi/ascendcl/stream.cpp": OWN_LIMIT,
    f"{CSRC}collective/": "HCCL_CONNECT_TIMEOUT, HCCL_EXEC_TIMEOUT",
    "packages/vnpu/src/vllm_davinci/vnpu/hosts/membership.py": "HCCL_CONNECT_TIMEOUT",
    f"{CSRC}device/schedule/threads.cpp": IDLE,
    f"{CSRC}device/task_queues": f"VNPU_WAIT_LIMIT; in a background thread, {IDLE}",
    f"{CSRC}trace/timeline.cpp": OWN_LIMIT,
}


def waits(path: Path) -> list[str]:
    """Returns a file's lines that wait."""
    pattern = WAITS[path.suffix]
    return [line.strip() for line in path.read_text("utf-8").splitlines() if pattern.search(line)]


def test_every_wait_is_listed_with_its_limit() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in WAITS and "build" not in path.parts and (lines := waits(path))
    }
    new = {name: lines for name, lines in found.items() if not name.startswith(tuple(LISTED))}
    assert not new, f"List these files with what ends their waits: {new}"
    gone = [listed for listed in LISTED if not any(name.startswith(listed) for name in found)]
    assert not gone, f"These wait no more: {gone}"
