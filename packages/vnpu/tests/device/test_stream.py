"""Streams and events under each execution policy."""

from collections.abc import Callable

import pytest
import torch

from vllm_davinci.vnpu import _C, VirtualDeviceConfig
from vllm_davinci_testing.processes import programs
from vllm_davinci_testing.processes.forked import output_of, run_alone

POLICIES = ["eager", "threads", *(f"fuzz:{seed}" for seed in range(5))]

ORDERED = """
import torch
side = torch.npu.Stream()
total = torch.zeros(64, device="npu")
for step in range(40):
    x = torch.full((64,), float(step), device="npu")
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x + x
        x.record_stream(side)
    torch.npu.current_stream().wait_stream(side)
    total = total + y
    y.record_stream(torch.npu.current_stream())
print(int(total[0].cpu()), int(total[63].cpu()))
"""

UNORDERED = """
import torch
side = torch.npu.Stream()
x = torch.zeros(64, device="npu")
torch.npu.synchronize()
for step in range(10):
    x = x + 1.0          # the side stream does not wait for this
with torch.npu.stream(side):
    y = x + 100.0
torch.npu.synchronize()
print(int(y[0].cpu()))
"""


def test_no_stream_waits_for_an_event_that_only_marks_time() -> None:
    lines = output_of(
        """
        import ctypes, torch
        torch.npu.set_device(0)
        acl, event = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p()
        acl.aclrtCreateEventExWithFlag(ctypes.byref(event), 8)
        print(acl.aclrtRecordEvent(event, None), acl.aclrtStreamWaitEvent(None, event))
        """
    )
    assert lines == ["0 207000"]


@pytest.mark.parametrize("policy", POLICIES)
def test_events_order_two_streams(policy: str) -> None:
    lines = output_of(ORDERED, VirtualDeviceConfig(schedule=policy))
    assert lines == ["1560 1560"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_wait_is_for_its_record_and_not_for_a_later_one_of_another_stream(policy: str) -> None:
    lines = output_of(
        """
        import torch
        slow, fast, side = (torch.npu.Stream() for _ in range(3))
        event = torch.npu.Event()
        wrong = 0
        for step in range(20):
            x = torch.zeros(256, 256, device="npu")
            torch.npu.synchronize()
            with torch.npu.stream(slow):
                for _ in range(10):
                    x += 1.0
                event.record()
            side.wait_event(event)
            event.record(fast)  # which has nothing to do
            with torch.npu.stream(side):
                y = x + 100.0
            torch.npu.synchronize()
            wrong += int(y[0, 0].cpu()) != 110
        print(wrong)
        """,
        VirtualDeviceConfig(schedule=policy),
    )
    assert lines == ["0"]


def test_a_missing_wait_shows_under_some_seed_and_the_seed_reproduces_it() -> None:
    def value(seed: int) -> str:
        return output_of(UNORDERED, VirtualDeviceConfig(schedule=f"fuzz:{seed}"))[0]

    wrong = {seed: value(seed) for seed in range(6) if value(seed) != "110"}
    assert wrong, "no seed showed the missing wait"
    seed, seen = next(iter(wrong.items()))
    assert value(seed) == seen


def test_a_non_blocking_copy_reads_its_source_when_the_stream_gets_there() -> None:
    lines = output_of(
        """
        import torch
        source = torch.zeros(4).pin_memory()
        wrong = 0
        for _ in range(50):
            source.fill_(1.0)
            there = source.to("npu", non_blocking=True)
            source.fill_(2.0)      # too early: the copy may not have run
            wrong += int(there[0].cpu()) == 2
        print(wrong > 0)
        """,
        VirtualDeviceConfig(schedule="fuzz:1"),
    )
    assert lines == ["True"]


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_events_measure_time_and_complete(policy: str) -> None:
    lines = output_of(
        """
        import torch
        start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
        print(start.query())
        start.record()
        x = torch.ones(256, 256, device="npu")
        for _ in range(20):
            x = x + x
        end.record()
        end.synchronize()
        print(end.query(), 0 < start.elapsed_time(end) < 60000)
        """,
        VirtualDeviceConfig(schedule=policy),
    )
    assert lines == ["True", "True True"]


@pytest.mark.parametrize(
    "policy",
    ["eager", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("threads", "fuzz:3"))],
)
def test_the_launch_queue_of_torch_npu_changes_no_result(policy: str) -> None:
    """test_events_order_two_streams runs without the queue."""
    config = VirtualDeviceConfig(schedule=policy)
    assert programs.output_of(ORDERED, config, TASK_QUEUE_ENABLE="1") == ["1560 1560"]


def test_a_wait_for_the_device_ends_at_its_limit_and_names_its_object() -> None:
    done = run_alone(
        """
        import ctypes, torch
        torch.npu.set_device(0)
        acl = ctypes.CDLL("libascendcl.so")
        word = torch.zeros(8, dtype=torch.int64, device="npu")
        torch.npu.synchronize()
        stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
        address = ctypes.c_void_p(word.data_ptr())
        assert acl.aclrtValueWait(address, ctypes.c_uint64(5), 1, stream) == 0
        torch.npu.synchronize()
        """,
        **VirtualDeviceConfig(wait_limit=0.5).environment(),
    )
    assert done.status != 0
    assert "waited 500 ms" in done.stderr
    assert "value wait" in done.stderr
    assert "to become 5" in done.stderr


def test_a_device_word_opens_the_gate_between_two_streams() -> None:
    lines = output_of(
        """
        import ctypes, torch
        torch.npu.set_device(0)
        acl = ctypes.CDLL("libascendcl.so")
        word = torch.zeros(8, dtype=torch.int64, device="npu")
        x = torch.zeros(4, device="npu")
        torch.npu.synchronize()
        side = torch.npu.Stream()
        address = ctypes.c_void_p(word.data_ptr())
        value = ctypes.c_uint64(1)
        acl.aclrtValueWait(address, value, 1, ctypes.c_void_p(side.npu_stream))
        with torch.npu.stream(side):
            y = x + 1.0
        print(side.query())
        main = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
        acl.aclrtValueWrite(address, value, 0, main)
        side.synchronize()
        print(side.query(), int(y[0].cpu()))
        """
    )
    assert lines == ["False", "True 1"]


def test_streams_have_priorities_and_ids() -> None:
    high = torch.npu.Stream(priority=-1)
    assert high.npu_stream != torch.npu.Stream().npu_stream


def test_what_the_host_waits_for_and_copies_from_the_device_is_counted():
    x = torch.ones(8).npu()
    pinned = torch.empty(8, pin_memory=True)
    torch.npu.synchronize()

    def counted(action: Callable[[], object]) -> tuple[int, int]:
        before = _C.host_counts()
        action()
        after = _C.host_counts()
        return tuple(after[name] - before[name] for name in ("synchronizations", "copies_to_host"))

    assert counted(lambda: x + x) == (0, 0)
    assert counted(lambda: x.copy_(pinned, non_blocking=True)) == (0, 0)
    assert counted(lambda: pinned.copy_(x, non_blocking=True)) == (0, 1)
    assert counted(torch.npu.synchronize) == (1, 0)
    assert counted(lambda: x.cpu())[1] == 1
    assert counted(lambda: x.sum().item())[0] >= 1
