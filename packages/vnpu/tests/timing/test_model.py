"""Programs in modelled time."""

import json
import pathlib

import pytest

from vllm_davinci.vnpu import TraceError, VirtualDeviceConfig, VirtualDeviceError, coverage
from vllm_davinci.vnpu.timing import load_machine, modelled_timeline
from vllm_davinci_testing.processes.forked import run_to_exit

# Two products, the second after the first one's event on a side stream, and one concurrent with it.
PROGRAM = """
import torch, torch_npu
from vllm_davinci.vnpu import label_launches, name_stream
from vllm_davinci.vnpu.timing import read_report
side = torch.npu.Stream()
name_stream(side.npu_stream, "side")
x = torch.ones(2048, 2048, dtype=torch.float16, device="npu")
begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
before = read_report()
begin.record()
label_launches("products")
y = x @ x
end.record()
with torch.npu.stream(side):
    side.wait_event(end)
    z = y + y
label_launches("")
w = x @ x
torch.npu.synchronize()
step = read_report() - before
print(begin.elapsed_time(end), step.host_ps, step.compute_ps, step.busy_ps["cube"])
print(float(z[0, 0]))
"""


def modelled(directory: pathlib.Path) -> tuple[str, bytes]:
    """Runs the program; returns its output and the timeline's bytes."""
    directory.mkdir()
    config = VirtualDeviceConfig(chip="ascend910b2", timeline=str(directory))
    done = run_to_exit(PROGRAM, config)
    assert done.status == 0, done.stderr
    modelled_timeline.merge([directory], directory / "all.json")
    return done.stdout, (directory / "all.json").read_bytes()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    return modelled(tmp_path_factory.mktemp("timeline") / "first")


def test_two_runs_give_equal_bytes(first: tuple[str, bytes], tmp_path: pathlib.Path) -> None:
    assert modelled(tmp_path / "second") == first


def test_events_and_reports_have_modelled_time(first: tuple[str, bytes]) -> None:
    figures, value = first[0].splitlines()
    elapsed_ms, host_ps, compute_ps, cube_ps = map(float, figures.split())
    # 2 x 2048^3 operations at 70 % of 376 TOP/s, in 128 tiles on 24 cores: six waves.
    product_ps = 2 * 2048**3 / (0.7 * 376) * 144 / 128
    assert cube_ps == pytest.approx(2 * product_ps, rel=1e-6)
    # The device waits for the launch, which takes 15 us on the host.
    assert elapsed_ms * 1e9 == pytest.approx(product_ps + 5e6 + 15e6, rel=1e-6)
    assert compute_ps < host_ps < compute_ps + 200e6
    assert float(value) == 4096.0  # The arithmetic is the same without a model.


def test_the_timeline_has_streams_labels_and_arrows(first: tuple[str, bytes]) -> None:
    events = json.loads(first[1])
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert any(name.startswith("side (device 0, stream") for name in names)
    [labels] = [e["args"]["labels"] for e in events if e["name"] == "process_labels"]
    assert labels.startswith("modelled, no NPU: ascend910b2 in node-of-8 (model 4, figures ")
    tasks = [e for e in events if e["ph"] == "X"]
    products = [e for e in tasks if e["name"] == "aclnnMatmul"]
    [total] = [e for e in tasks if e["name"] == "aclnnAdd"]
    assert products[0]["args"]["label"] == total["args"]["label"] == "products"
    assert "label" not in products[1]["args"]
    assert total["ts"] >= products[0]["ts"] + products[0]["dur"]
    # The addition shares memory bandwidth and vector cores only with the second product.
    assert total["dur"] >= total["args"]["alone"]
    starts = {e["id"] for e in events if e["ph"] == "s"}
    ends = {e["id"] for e in events if e["ph"] == "f"}
    assert ends and ends <= starts


def test_every_operator_has_a_cost() -> None:
    present = [operator for operator in coverage.operators() if operator.exported]
    assert len(present) > 400
    assert [operator.name for operator in present if not operator.priced] == []


def test_a_machine_of_wrong_figures_is_refused_by_the_device() -> None:
    done = run_to_exit("import torch; torch.ones(1, device='npu')", VNPU_TIMING="cube_cores=1")
    assert done.status != 0
    assert "VNPU_TIMING lacks the figure" in done.stderr


def test_phantom_ranks_need_operators_that_do_not_compute() -> None:
    program = (
        "import torch, torch.distributed as dist\n"
        "torch.npu.set_device(0)\n"
        "dist.init_process_group('hccl', store=dist.HashStore(), rank=0, world_size=16)\n"
        "x = torch.ones(1024, device='npu')\n"
        "dist.all_reduce(x)\n"
        "torch.npu.synchronize()\n"
        "print('done')\n"
    )
    done = run_to_exit(program, VNPU_PHANTOM_RANKS="1")
    assert "VNPU_PHANTOM_RANKS=1 needs VNPU_COMPUTE=0" in done.stderr
    done = run_to_exit(program, VNPU_PHANTOM_RANKS="1", VNPU_COMPUTE="0")
    assert done.stdout.strip() == "done", done.stderr


STEPS = """
import torch, torch_npu
from vllm_davinci.vnpu.timing import pass_host_step, read_report
x = torch.ones(4096, 4096, dtype=torch.float16, device="npu")
torch.npu.synchronize()
pass_host_step(0, False)

def host_of(num_requests, beside, products=0):
    before = read_report()
    for _ in range(products):
        x @ x
    torch.npu.synchronize()
    pass_host_step(num_requests, beside)
    return (read_report() - before).host_ps

print(host_of(0, False), host_of(10, False), host_of(10, True))
print(host_of(10, False, 8), host_of(10, True, 8), host_of(10, True, 1))
"""


def test_an_engines_own_time_passes_where_the_host_does_not_wait() -> None:
    done = run_to_exit(STEPS, VirtualDeviceConfig(chip="ascend910b2", compute=False))
    assert done.status == 0, done.stderr
    none, ten, alone, after, beside, partly = map(int, done.stdout.split())
    figures = load_machine("ascend910b2", "node-of-8").figures
    step, wait = figures["host_step"] + 10 * figures["host_step_request"], 10 * 10**6
    assert none == figures["host_step"] + wait
    assert ten == alone == step + wait  # nothing can overlap
    assert after - beside == step
    one = 2 * 4096**3 / (0.7 * 376) * 528 / 512  # 512 tiles, 24 at a time
    assert step - one < partly - wait - one < step


# Reads 64 MiB twice, and once 64 MiB that were prefetched during a product.
CACHED = """
import torch, torch_npu
from vllm_davinci.vnpu.timing import read_report
x = torch.ones(1 << 25, dtype=torch.float16, device="npu")
y = torch.ones(1 << 25, dtype=torch.float16, device="npu")
big = torch.ones(1 << 27, dtype=torch.float16, device="npu")
out = torch.empty((), device="npu")

def memory_of(work):
    before = read_report()
    work()
    torch.npu.synchronize()
    return (read_report() - before).busy_ps["hbm"]

big.add_(1)
print(memory_of(lambda: x.sum()))
print(memory_of(lambda: x.sum()))
big.add_(1)
print(memory_of(lambda: torch_npu.npu_prefetch(y, None, y.nbytes)))
print(memory_of(lambda: y.sum()))
big.add_(1)
print(memory_of(lambda: torch_npu.npu_prefetch(big, None, y.nbytes)))
print(memory_of(lambda: big.sum()))
y.add_(1)
big.add_(1)
side = torch.npu.Stream()

def prefetch_beside():
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        torch_npu.npu_prefetch(y, None, y.nbytes)
    y.sum()

before = read_report()
prefetch_beside()
torch.npu.synchronize()
done = read_report() - before
print(done.busy_ps["hbm"], done.any_ps)
"""


def test_hits_in_l2_take_no_memory_time() -> None:
    done = run_to_exit(CACHED, VirtualDeviceConfig(chip="ascend910b2", compute=False))
    assert done.status == 0, done.stderr
    first, again, prefetch, after, part, rest, beside, time = map(int, done.stdout.split())
    read_ps = (64 << 20) / (1.6 * 0.6)  # 60 % of 1.6 TB/s
    assert first == pytest.approx(read_ps, rel=1e-3)
    assert prefetch == pytest.approx(read_ps, rel=1e-3)
    assert again < read_ps / 1000
    assert after < read_ps / 1000
    # The cache has 192 MiB: the first 64 of 256 MiB hit.
    assert part == pytest.approx(read_ps, rel=1e-3)
    assert rest == pytest.approx(3 * read_ps, rel=1e-3)
    # On another stream the read misses until the data has arrived.
    assert beside == pytest.approx(read_ps, rel=1e-3)
    assert time > beside


# 40 products of 0.1 ms; the second time, this host exceeds the permitted time by a factor of two.
PACED = """
import time, torch
from vllm_davinci.vnpu import _C
x = torch.ones(2048, 2048, dtype=torch.float16, device="npu")
def products():
    begin = time.monotonic()
    for _ in range(40):
        x @ x
    return begin
torch.npu.synchronize()
begin = products()
torch.npu.synchronize()
print(time.monotonic() - begin, _C.lateness()[1])
begin = products()
time.sleep(2)
torch.npu.synchronize()
print(time.monotonic() - begin, _C.lateness()[1])
"""


def test_paced_waits_take_their_modelled_time_and_late_ones_are_reported() -> None:
    config = VirtualDeviceConfig(chip="ascend910b2", compute=False, paced=200.0)
    done = run_to_exit(PACED, config)
    assert done.status == 0, done.stderr
    (paced_s, in_time), (slow_s, late) = (
        map(float, line.split()) for line in done.stdout.split("\n")[:2]
    )
    product_s = 2 * 2048**3 / (0.7 * 376e12) * 144 / 128
    assert paced_s > 200 * 40 * product_s
    assert (in_time, late) == (0, 1)
    assert slow_s > 2
    assert "this host is too slow for the modelled chip" in done.stderr
    assert "1 of 3 waits ended later than modelled" in done.stderr


@pytest.mark.parametrize("scale", ["0", "-1", "fast"])
def test_an_invalid_time_scale_is_refused(scale: str) -> None:
    variables = VirtualDeviceConfig(chip="ascend910b2").environment() | {"VNPU_PACED": scale}
    done = run_to_exit("import torch; torch.ones(1, device='npu')", **variables)
    assert done.status != 0
    assert f"VNPU_PACED='{scale}' is not valid" in done.stderr


def test_a_timeline_needs_a_chip(tmp_path: pathlib.Path) -> None:
    with pytest.raises(VirtualDeviceError, match="needs a chip"):
        VirtualDeviceConfig(timeline=str(tmp_path))
    with pytest.raises(TraceError, match="no modelled tasks"):
        modelled_timeline.merge([tmp_path], tmp_path / "all.json")


# A memory-bound addition beside a product, on all cores and on few.
LIMITED = """
import torch, torch_npu
x = torch.ones(1 << 27, dtype=torch.float16, device="npu")
a = torch.ones(4096, 4096, dtype=torch.float16, device="npu")
side = torch.npu.Stream()
events = lambda: [torch.npu.Event(enable_timing=True) for _ in range(2)]

def timed(stream, work, count=4):
    begin, end = events()
    with torch.npu.stream(stream):
        begin.record()
        for _ in range(count):
            work()
        end.record()
    torch.npu.synchronize()
    return begin.elapsed_time(end)

main = torch.npu.current_stream()
for work in (lambda: x.add_(1), lambda: torch.mm(a, a, out=a)):
    timed(main, work)
    figures = []
    for cores in ({}, {"vector_num": 6, "cube_num": 6}):
        torch.npu.reset_stream_limit(side)
        torch.npu.set_stream_limit(side, **cores)
        figures.append(timed(side, work))
    print(*figures, timed(main, work))
"""


def test_the_time_of_an_operator_depends_on_its_number_of_cores() -> None:
    config = VirtualDeviceConfig(chip="ascend910b2", compute=False)
    done = run_to_exit(LIMITED, config)
    assert done.status == 0, done.stderr
    addition, product = [[float(x) for x in line.split()] for line in done.stdout.splitlines()]
    # 512 MiB from memory at 60 % of 1.6 TB/s, except the part in L2, or through an eighth of the
    # cores' 4 TB/s to L2.
    assert addition[0] == addition[2] < 4 * 2**29 / 0.96e9 * 1.02
    assert addition[1] == pytest.approx(4 * 2**29 / 0.5e9, rel=0.01)
    assert product[0] == product[2]
    # 1024 tiles take 43 waves on 24 cores, and 171 on 6.
    assert (product[1] - 4 * 0.005) / (product[0] - 4 * 0.005) == pytest.approx(171 / 43, rel=0.03)
