"""Programs with and without a race, for tests of the race detector."""

SETUP = """
import torch
main = torch.npu.current_stream()
side, third = torch.npu.Stream(), torch.npu.Stream()
x = torch.ones(256, 16, device="npu")
y = torch.zeros(256, 16, device="npu")
out = torch.zeros(256, 16, device="npu")
pinned = torch.zeros(256, 16).pin_memory()
event = torch.npu.Event()
torch.npu.synchronize()
"""

# Mistake in a program -> its source, after SETUP. The two racing launches are marked, in order.
PLANTED = {
    "read after write, no wait": """
y.add_(1.0)  # <-
with torch.npu.stream(side):
    out.copy_(y)  # <-
""",
    "write after read, no wait": """
torch.add(x, 1.0, out=out)  # <-
with torch.npu.stream(side):
    x.zero_()  # <-
""",
    "write after write, no wait": """
out.zero_()  # <-
with torch.npu.stream(side):
    out.fill_(3.0)  # <-
""",
    "the wait comes after the use": """
y.add_(1.0)  # <-
with torch.npu.stream(side):
    out.copy_(y)  # <-
    side.wait_stream(main)
""",
    "the event was recorded before the write": """
event.record(main)
y.add_(1.0)  # <-
with torch.npu.stream(side):
    side.wait_event(event)
    out.copy_(y)  # <-
""",
    "the wrong stream waits": """
y.add_(1.0)  # <-
event.record(main)
third.wait_event(event)
with torch.npu.stream(side):
    out.copy_(y)  # <-
""",
    # torch_npu creates an event at its first record and skips a wait before that, so this program
    # calls the runtime directly.
    "the event is never recorded": """
import ctypes
acl, handle = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p()
acl.aclrtCreateEventExWithFlag(ctypes.byref(handle), 0)
y.add_(1.0)  # <-
acl.aclrtStreamWaitEvent(ctypes.c_void_p(side.npu_stream), handle)
with torch.npu.stream(side):
    out.copy_(y)  # <-
""",
    "the join is missing": """
side.wait_stream(main)
with torch.npu.stream(side):
    y.add_(1.0)  # <-
torch.add(y, 1.0, out=out)  # <-
""",
    "memory is reused while a side stream reads it": """
z = x + 1.0
side.wait_stream(main)
with torch.npu.stream(side):
    out.copy_(z)  # <-
del z
w = x + 2.0  # <-
""",
    "a matrix product beside the write of its operand": """
w = torch.ones(16, 16, device="npu")
torch.npu.synchronize()
with torch.npu.stream(side):
    w.fill_(2.0)  # <-
torch.mm(x, w)  # <-
""",
    "overlapping rows of one tensor": """
x[:130].fill_(1.0)  # <-
with torch.npu.stream(side):
    x[129:].fill_(2.0)  # <-
""",
    "elements between those of a newer use with the same ends": """
nine = y.view(-1)[:9]
nine[::2].fill_(1.0)  # <-
nine[::4].fill_(2.0)
with torch.npu.stream(side):
    nine[2:3].fill_(3.0)  # <-
""",
    "a copy to the host that does not wait for the product": """
y.add_(1.0)  # <-
with torch.npu.stream(side):
    pinned.copy_(y, non_blocking=True)  # <-
""",
    "two copies into one host buffer": """
pinned.copy_(x, non_blocking=True)  # <-
with torch.npu.stream(side):
    pinned.copy_(y, non_blocking=True)  # <-
""",
    "a graph replay beside a write of its input": """
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    g = x + y
torch.npu.synchronize()
graph.replay()  # <-
with torch.npu.stream(side):
    x.fill_(5.0)  # <-
""",
    "two branches of a captured graph": """
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    capture = torch.npu.current_stream()
    side.wait_stream(capture)
    y.add_(1.0)  # <-
    with torch.npu.stream(side):
        y.mul_(2.0)  # <-
    capture.wait_stream(side)
""",
}

# The host changes pinned memory that a copy may still read. Marked: the copy, and the line where
# the race is reported.
PLANTED_ON_HOST = {
    "written while the copy may not have run": """
x.copy_(pinned, non_blocking=True)  # <-
pinned.fill_(2.0)
torch.npu.synchronize()  # <-
""",
    "written after a wait for an event from before the copy": """
event.record(main)
x.copy_(pinned, non_blocking=True)  # <-
event.synchronize()
pinned[3, 5] = 1.0
main.synchronize()  # <-
""",
    "written after a wait for another stream": """
with torch.npu.stream(side):
    x.copy_(pinned, non_blocking=True)  # <-
main.synchronize()
pinned.fill_(2.0)
side.synchronize()  # <-
""",
    "written between two copies of it": """
x.copy_(pinned, non_blocking=True)  # <-
pinned.fill_(2.0)
y.copy_(pinned, non_blocking=True)  # <-
""",
    "written while a replayed graph may copy it": """
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    x.copy_(pinned, non_blocking=True)
torch.npu.synchronize()
graph.replay()  # <-
pinned.fill_(2.0)
main.synchronize()  # <-
""",
    "freed while the copy may not have run": """
import ctypes
acl, buffer = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p()
acl.aclrtMallocHost(ctypes.byref(buffer), 64)
target, stream = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(main.npu_stream)
acl.aclrtMemcpyAsync(target, 64, buffer, 64, 1, stream)  # <-
acl.aclrtFreeHost(buffer)  # <-
""",
}

CORRECT = {
    "wait_stream both ways": """
y.add_(1.0)
side.wait_stream(main)
with torch.npu.stream(side):
    out.copy_(y)
main.wait_stream(side)
out.add_(1.0)
""",
    "a chain through a third stream": """
y.add_(1.0)
event.record(main)
third.wait_event(event)
side.wait_stream(third)
with torch.npu.stream(side):
    out.copy_(y)
""",
    "the host waits": """
y.add_(1.0)
torch.npu.synchronize()
with torch.npu.stream(side):
    out.copy_(y)
""",
    "the host waits for an event": """
y.add_(1.0)
event.record(main)
event.synchronize()
with torch.npu.stream(side):
    out.copy_(y)
""",
    "both only read": """
torch.add(x, 1.0, out=out)
with torch.npu.stream(side):
    torch.add(x, 2.0, out=y)
""",
    "disjoint rows": """
x[:128].fill_(1.0)
with torch.npu.stream(side):
    x[128:].fill_(2.0)
""",
    "columns that interleave in memory": """
x[:, :8].fill_(1.0)
with torch.npu.stream(side):
    x[:, 8:].fill_(2.0)
""",
    "elements that two uses with the same ends leave out": """
nine = y.view(-1)[:9]
nine[::2].fill_(1.0)
nine[::4].fill_(2.0)
with torch.npu.stream(side):
    nine[1::2].fill_(3.0)
""",
    "record_stream keeps reused memory apart": """
z = x + 1.0
side.wait_stream(main)
with torch.npu.stream(side):
    out.copy_(z)
z.record_stream(side)
del z
w = x + 2.0
""",
    "an event used again": """
for step in range(5):
    y.add_(1.0)
    event.record(main)
    side.wait_event(event)
    with torch.npu.stream(side):
        out.copy_(y)
    main.wait_stream(side)
""",
    "the host waits for each copy before it writes again": """
for step in range(3):
    pinned.fill_(step)
    x.copy_(pinned, non_blocking=True)
    event.record(main)
    event.synchronize()
""",
    "the host asks until the copy is complete": """
x.copy_(pinned, non_blocking=True)
event.record(main)
while not event.query():
    pass
pinned.fill_(2.0)
""",
    "pinned memory that torch uses again": """
for step in range(20):
    x.copy_(torch.full((256, 16), float(step)).pin_memory(), non_blocking=True)
""",
    "a copy to the host and back": """
for step in range(3):
    pinned.copy_(x, non_blocking=True)
    y.copy_(pinned, non_blocking=True)
    x.add_(y)
""",
    "two buffers in turn": """
buffers = [torch.zeros(256, 16).pin_memory() for _ in range(2)]
events = [torch.npu.Event() for _ in buffers]
for step in range(6):
    events[step % 2].synchronize()
    buffers[step % 2].fill_(step)
    x.copy_(buffers[step % 2], non_blocking=True)
    events[step % 2].record(main)
""",
    "a captured fork and join": """
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    capture = torch.npu.current_stream()
    y.add_(1.0)
    side.wait_stream(capture)
    with torch.npu.stream(side):
        out.copy_(y)
    capture.wait_stream(side)
    out.add_(1.0)
torch.npu.synchronize()
graph.replay()
graph.replay()
""",
}


FINISH = """
torch.npu.synchronize()
from vllm_davinci.vnpu import _C
print("races:", _C.races_found())
"""
