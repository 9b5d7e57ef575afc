"""Graph capture and replay."""

import pytest
import torch

from vllm_davinci.vnpu import _C, VirtualDeviceConfig
from vllm_davinci_testing.processes.forked import output_of

FORK_JOIN = """
import torch
x = torch.zeros(16, device="npu")
side = torch.npu.Stream()
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    a = x + 1.0
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        b = a + a
    c = a + 10.0
    torch.npu.current_stream().wait_stream(side)
    out = b + c
for value in (0.0, 3.0, -2.0):
    x.copy_(torch.full((16,), value))
    graph.replay()
    torch.npu.synchronize()
    print(float(out[5].cpu()))
"""


@pytest.mark.parametrize("policy", ["eager", "threads", "fuzz:1", "fuzz:2"])
def test_a_captured_fork_and_join_replays_on_new_inputs(policy: str) -> None:
    lines = output_of(FORK_JOIN, VirtualDeviceConfig(schedule=policy))
    # a = v + 1; out = 2 a + a + 10
    assert [float(line) for line in lines] == [3 * (v + 1) + 10 for v in (0.0, 3.0, -2.0)]


def test_capture_runs_nothing() -> None:
    x = torch.zeros(8, device="npu")
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.add_(1.0)
    torch.npu.synchronize()
    assert float(x[0].cpu()) == 0.0
    graph.replay()
    graph.replay()
    torch.npu.synchronize()
    assert float(x[0].cpu()) == 2.0


def test_a_replay_costs_the_host_one_launch() -> None:
    x = torch.zeros(8, device="npu")
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        for _ in range(20):
            x.add_(1.0)
    torch.npu.synchronize()
    before = _C.host_counts()["launches"]
    graph.replay()
    torch.npu.synchronize()
    assert _C.host_counts()["launches"] - before == 1
    assert float(x[0].cpu()) == 20.0


def test_graphs_of_one_pool_share_memory_and_give_it_back() -> None:
    pool = torch.npu.graph_pool_handle()

    def capture() -> tuple[torch.npu.NPUGraph, torch.Tensor]:
        x = torch.ones(1 << 20, device="npu")
        torch.npu.synchronize()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, pool=pool):
            out = ((x + 1.0) * 2.0).sum()
        return graph, out

    torch.npu.empty_cache()
    first = capture()
    held = torch.npu.memory_reserved()
    second = capture()
    assert torch.npu.memory_reserved() - held < 8 << 20  # x takes 4 MiB
    for graph, out in (first, second):
        graph.replay()
        assert float(out.cpu()) == 4.0 * (1 << 20)
    del first, second, graph, out
    torch.npu.synchronize()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() < held


def test_synchronising_a_capturing_stream_is_an_error() -> None:
    graph = torch.npu.NPUGraph()
    x = torch.zeros(8, device="npu")
    torch.npu.synchronize()

    def capture() -> None:
        with torch.npu.graph(graph):
            x.add_(1.0)
            torch.npu.current_stream().synchronize()

    with pytest.raises(RuntimeError, match="captur"):
        capture()


# --- calls that a capture refuses -----------------------------------------------------------------

RECORDED = """
x.add_(1.0)
event = torch.npu.Event()
event.record()
"""
REFUSED = {
    "asking whether a captured event is done": (
        f"{RECORDED}event.query()  # <-\n",
        "asks about an event that was recorded in a capture",
    ),
    "waiting for a captured event": (
        f"{RECORDED}event.synchronize()  # <-\n",
        "waits for an event that was recorded in a capture",
    ),
    "waiting for the device": ("torch.npu.synchronize()  # <-", "device cannot be synchronised"),
    "asking whether the stream is done": (
        "torch.npu.current_stream().query()  # <-",
        "asks whether a capturing stream is done",
    ),
    "a copy with pageable memory": (
        "x.copy_(torch.ones(8), non_blocking=True)  # <-",
        "pageable host memory",
    ),
    "reading a value": ("float(x[0])  # <-", "captur"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_capture_refuses_host_waits_and_names_the_line(name: str) -> None:
    body, message = REFUSED[name]
    lines = body.strip().splitlines()
    (marked,) = (number for number, line in enumerate(lines) if line.endswith("# <-"))
    program = "\n".join(
        [
            "import torch, torch_npu",
            "x = torch.zeros(8, device='npu')",
            "torch.npu.synchronize()",
            "graph = torch.npu.NPUGraph()",
            "try:",
            "    with torch.npu.graph(graph):",
            *(f"        {line}" for line in lines),
            "except RuntimeError as error:",
            "    chain = []",
            "    while error is not None:",
            "        chain.append(str(error))",
            "        error = error.__context__",
            "    print('@'.join(chain).replace(chr(10), ' '))",
        ]
    )
    (told,) = [line for line in output_of(program, VirtualDeviceConfig()) if message in line]
    assert f":{marked + 7} in <module>" in told


UNJOINED = """
import torch
x = torch.zeros(16, device="npu")
side = torch.npu.Stream()
graph = torch.npu.NPUGraph()
torch.npu.synchronize()
try:
    with torch.npu.graph(graph):
        y = x + 1.0
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y.add_(1.0)
except RuntimeError as error:
    print(str(error).replace(chr(10), " "))
"""


def test_a_side_stream_that_does_not_rejoin_is_refused_at_the_end() -> None:
    (told,) = output_of(UNJOINED, VirtualDeviceConfig())
    assert "does not wait for" in told
    assert "<module>" in told


# --- task groups ----------------------------------------------------------------------------------

UPDATED = """
import torch
from torch_npu.npu import (
    graph_task_group_begin, graph_task_group_end, graph_task_update_begin, graph_task_update_end
)
x, out = torch.zeros(4, device="npu"), torch.zeros(4, device="npu")
updates, updated, replayed = torch.npu.Stream(), torch.npu.Event(), torch.npu.Event()
graph = torch.npu.NPUGraph()
torch.npu.synchronize()
with torch.npu.graph(graph):
    stream = torch.npu.current_stream()
    y = x + 1.0
    graph_task_group_begin(stream)
    torch.add(y, 10.0, out=out)
    group = graph_task_group_end(stream)
    z = out * 2.0

def update(value, waits=True):
    with torch.npu.stream(updates):
        if waits:
            updates.wait_event(replayed)
        graph_task_update_begin(updates, group)
        torch.add(y, value, out=out)
        graph_task_update_end(updates)
        updated.record(updates)
"""

ORDERED = (
    UPDATED
    + """
results = []
for value in (1.0, 5.0, 7.0):
    update(value)
    torch.npu.current_stream().wait_event(updated)
    graph.replay()
    replayed.record()
    results.append(z.clone())
print([float(each[0].cpu()) for each in results])
"""
)


@pytest.mark.parametrize("policy", ["eager", "threads", "fuzz:1", "fuzz:5"])
def test_an_update_takes_effect_in_the_order_of_its_stream(policy: str) -> None:
    (line,) = output_of(ORDERED, VirtualDeviceConfig(schedule=policy, races="raise"))
    assert line == str([2 * (1 + value) for value in (1.0, 5.0, 7.0)])


UNORDERED = (
    UPDATED
    + """
graph.replay()
replayed.record()
try:
    update(5.0, waits=False)
    torch.npu.synchronize()
except RuntimeError as error:
    print(str(error).replace(chr(10), " "))
"""
)


def test_an_update_beside_a_replay_is_a_race() -> None:
    (told,) = output_of(UNORDERED, VirtualDeviceConfig(races="raise"))
    assert "read by graph replay" in told
    assert "write by graph update" in told


OTHER_KIND = (
    UPDATED
    + """
with torch.npu.stream(updates):
    graph_task_update_begin(updates, group)
    try:
        torch.mul(y, 2.0, out=out)
        torch.npu.synchronize()
    except RuntimeError as error:
        print(str(error).replace(chr(10), " "))
"""
)


def test_an_update_of_another_kind_is_refused() -> None:
    told = output_of(OTHER_KIND, VirtualDeviceConfig())
    assert any("aclnnAdds and would become aclnnMuls" in line for line in told), told
