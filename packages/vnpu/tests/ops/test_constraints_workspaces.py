"""Operators' workspaces are ordinary memory: allocated, large enough, and used by one stream."""

import pytest

from vllm_davinci_testing.processes.forked import run_alone

PRODUCT = """
import ctypes
import torch
from vllm_davinci.vnpu import _C
from vllm_davinci_testing.operators import aclnn

torch.npu.set_device(0)
acl = ctypes.CDLL("libascendcl.so")

def allocate(size):
    address = ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(size), 0) == 0
    return address.value

def operands():
    a, b = torch.ones(3, 8, device="npu"), torch.ones(8, 5, device="npu")
    return a, b, torch.zeros(3, 5, device="npu"), ctypes.c_int8(0)

first, second = operands(), operands()
needed = aclnn.workspace_size("Mm", *first)
torch.npu.synchronize()
"""


def test_a_workspace_is_taken_as_it_is_given() -> None:
    ended = run_alone(
        PRODUCT
        + """
aclnn.call_in(allocate(needed), needed, "Mm", *first)
torch.npu.synchronize()
print(needed, first[2].eq(8).all().item())
"""
    )
    assert ended.output.splitlines()[-1] == f"{20 << 20} True", ended.output


@pytest.mark.refused_calls
@pytest.mark.parametrize(
    ("workspace", "code", "said"),
    [
        ("0, 0", 161002, f"a workspace of 0 bytes at null, but {20 << 20} were asked for"),
        ("0, needed", 161002, f"a workspace of {20 << 20} bytes at null"),
        ("allocate(needed), needed - 1", 161002, f"a workspace of {(20 << 20) - 1} bytes"),
        ("allocate(needed - 4096), needed", 507015, "aclnnMm workspace"),
        ("freed, needed", 507015, "freed (use after free)"),
    ],
    ids=["none", "null", "small", "beyond_its_allocation", "freed"],
)
def test_a_workspace_that_is_not_there_is_refused(workspace: str, code: int, said: str) -> None:
    ended = run_alone(
        PRODUCT
        + f"""
freed = allocate(needed)
acl.aclrtFree(ctypes.c_void_p(freed))
try:
    aclnn.call_in({workspace}, "Mm", *first)
    torch.npu.synchronize()
    print("launched")
except RuntimeError as error:
    print(error)
"""
    )
    assert f"aclnnMm returned {code}" in ended.output and said in ended.output, ended.output


@pytest.mark.parametrize(("shared", "races"), [(True, 1), (False, 0)])
def test_two_streams_do_not_share_a_workspace(shared: bool, races: int) -> None:
    ended = run_alone(
        PRODUCT
        + f"""
one, other = allocate(needed), allocate(needed)
aclnn.call_in(one, needed, "Mm", *first)
with torch.npu.stream(torch.npu.Stream()):
    aclnn.call_in(one if {shared} else other, needed, "Mm", *second)
torch.npu.synchronize()
print("races:", _C.races_found())
""",
        VNPU_RACES="report",
    )
    assert f"races: {races}" in ended.output.splitlines(), ended.output
    assert ended.output.count("aclnnMm") == 2 * races, ended.output


GRAPH = """
workspace = allocate(needed)
stream, graph = torch.npu.Stream(), torch.npu.NPUGraph()
with torch.npu.stream(stream):
    graph.capture_begin()
    aclnn.call_in(workspace, needed, "Mm", *first)
    graph.capture_end()
graph.replay()
torch.npu.synchronize()
assert first[2].eq(8).all()
"""


@pytest.mark.refused_calls
def test_a_graph_is_not_replayed_without_its_workspace() -> None:
    ended = run_alone(
        PRODUCT
        + GRAPH
        + """
acl.aclrtFree(ctypes.c_void_p(workspace))
graph.replay()
torch.npu.synchronize()
print("replayed")
"""
    )
    assert ended.status != 0
    assert "aclnnMm workspace uses" in ended.output and "use after free" in ended.output


@pytest.mark.parametrize(("waits", "races"), [(False, 1), (True, 0)])
def test_a_replay_beside_a_launch_in_its_workspace_is_a_race(waits: bool, races: int) -> None:
    ended = run_alone(
        PRODUCT
        + GRAPH
        + f"""
graph.replay()
side = torch.npu.Stream()
if {waits}:
    side.wait_stream(torch.npu.current_stream())
with torch.npu.stream(side):
    aclnn.call_in(workspace, needed, "Mm", *second)
torch.npu.synchronize()
print("races:", _C.races_found())
""",
        VNPU_RACES="report",
    )
    assert f"races: {races}" in ended.output.splitlines(), ended.output
