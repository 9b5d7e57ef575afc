"""The same program on machines with other values of the assumed figures."""

import json
from typing import Any

import pytest

from vllm_davinci.vnpu import VirtualDeviceConfig, VirtualDeviceError
from vllm_davinci.vnpu.timing import load_machine, variants_of
from vllm_davinci.vnpu.timing.variants import MECHANISMS, without_mechanisms
from vllm_davinci_testing.processes.forked import run_to_exit

# Fills on two side streams and on 61, more than torch's pool has; each fill waits for the one
# before.
PROGRAM = """
import ctypes, json, torch, torch_npu
from ctypes import byref, c_size_t
from vllm_davinci.vnpu.timing import read_report, read_variants
x = torch.ones(1 << 20, dtype=torch.float16, device="npu")
torch.npu.synchronize()
acl = ctypes.CDLL("libascendcl.so")
streams = [ctypes.c_void_p() for _ in range(61)]
event = ctypes.c_void_p()
for stream in streams:
    assert acl.aclrtCreateStream(byref(stream)) == 0
assert acl.aclrtCreateEvent(byref(event)) == 0

def run(num_streams):
    for i in range(244):
        stream, before = streams[i % num_streams], streams[(i - 1) % num_streams]
        assert acl.aclrtRecordEvent(event, before) == 0
        assert acl.aclrtStreamWaitEvent(stream, event) == 0
        size = c_size_t(x.nbytes)
        assert acl.aclrtMemsetAsync(ctypes.c_void_p(x.data_ptr()), size, 0, size, stream) == 0
    torch.npu.synchronize()

def report():
    variants = read_variants()
    return {"": read_report(), **variants}

torch.npu.synchronize()
times = []
for num_streams in (2, 61, 61):
    before = report()
    run(num_streams)
    after = report()
    differences = {name: after[name] - before[name] for name in after}
    times.append({name: d.any_ps for name, d in differences.items()})
print(json.dumps(times))
"""
CHIP = "ascend910b2"


@pytest.fixture(scope="module")
def times() -> list[dict[str, int]]:
    """Returns device times with 2 side streams, with 61, and with 61 again; by variant, "" for
    none.
    """
    done = run_to_exit(PROGRAM, VirtualDeviceConfig(chip=CHIP, variants=True))
    assert done.status == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_more_streams_than_hardware_queues_cost_their_changes(times: list[dict[str, int]]) -> None:
    two, first, again = times
    figures = load_machine(CHIP, "node-of-8").figures
    # The main stream and two or 30 others got unused queues; later fills take over queues.
    change = figures["queue_change"]
    assert again[""] - two[""] == pytest.approx(244 * change, rel=0.02)
    assert first[""] < again[""]
    assert again[""] > 1.5 * two[""]
    assert again["hardware_queues high"] == pytest.approx(two["hardware_queues high"], rel=0.02)


def test_each_variant_is_a_machine_of_its_own(times: list[dict[str, int]]) -> None:
    _, _, again = times
    assert set(again) == {"", *variants_of(load_machine(CHIP, "node-of-8"))}
    assert again["queue_change low"] < again[""] < again["queue_change high"]
    assert again["vector_static low"] < again[""] < again["vector_static high"]
    assert again["matmul_share low"] == again[""]
    drawn = [time for name, time in again.items() if name.startswith("drawn ")]
    assert len(set(drawn)) == len(drawn)


def test_variants_differ_in_the_figures_that_name_them() -> None:
    machine = load_machine(CHIP, "two-meshes-of-8")
    variants = variants_of(machine)
    assert variants["matmul_share low"] == {"matmul_share": 550_000}
    assert variants["tier1_share high"] == {"tier1_share": 850_000}
    for name, figures in variants.items():
        for figure, value in figures.items():
            low, high = machine.ranges[figure]
            assert low <= value <= high, (name, figure)
    assert set(variants["drawn 0"]) == set(machine.ranges)
    assert variants == variants_of(machine)


def test_variants_need_a_chip_and_no_pace() -> None:
    with pytest.raises(VirtualDeviceError, match="need a chip whose figures vary, and no pace"):
        VirtualDeviceConfig(variants=True)
    with pytest.raises(VirtualDeviceError, match="need a chip whose figures vary, and no pace"):
        VirtualDeviceConfig(variants=True, chip=CHIP, paced=1.0)
    with pytest.raises(VirtualDeviceError, match="need a chip whose figures vary, and no pace"):
        VirtualDeviceConfig(mechanisms=True)


def test_a_variant_of_an_unknown_figure_is_refused_by_the_device() -> None:
    config = VirtualDeviceConfig(chip=CHIP)
    program = "import torch; torch.ones(1, device='npu')"
    done = run_to_exit(program, config, VNPU_TIMING_VARIANTS="other:cube_core=1")
    assert done.status != 0
    assert "unknown figure: cube_core" in done.stderr
    done = run_to_exit(program, config, VNPU_TIMING_VARIANTS="cube_cores=1")
    assert "where NAME:FIGURE=INTEGER;... is expected" in done.stderr


def test_each_mechanism_is_turned_off_by_figures_of_the_machine() -> None:
    machine = load_machine(CHIP, "two-meshes-of-8")
    without = without_mechanisms(machine)
    assert set(without) == {f"without {name}" for name in MECHANISMS}
    assert without["without steps of collectives"] == {"tier0_latency": 0, "tier1_latency": 0}
    for name, figures in without.items():
        assert figures and set(figures) <= set(machine.figures), name
        assert all(machine.figures[figure] != value for figure, value in figures.items()), name


def test_without_hardware_queues_more_streams_cost_nothing() -> None:
    done = run_to_exit(PROGRAM, VirtualDeviceConfig(chip=CHIP, mechanisms=True))
    assert done.status == 0, done.stderr
    two, _, again = json.loads(done.stdout)
    name = "without hardware queues"
    assert again[""] > 1.5 * two[""]
    assert again[name] == pytest.approx(two[name], rel=0.02)
    fixed = "without fixed times of tasks"
    assert again[fixed] < again[""]
