"""Graph capture and replay."""

import pytest
import torch

from vllm_davinci.vnpu import VirtualDeviceConfig
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
