"""Collectives between processes, through torch.distributed and torch_npu."""

import pytest

from vllm_davinci_testing.processes.ranks import check_ranks

# Every rank knows all inputs, so it can compute the expected result.
EVERY_COLLECTIVE = """
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
WHOLES = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
SIZES = [1, 7, (1 << 20) + 3]


def values(of, size, dtype, salt=0):
    generator = torch.Generator().manual_seed(1000 * salt + of)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    low = 0 if dtype == torch.uint8 else -9
    return torch.randint(low, 10, (size,), generator=generator).to(dtype)


def combined(parts, op):
    total = parts[0].clone()
    for part in parts[1:]:
        if op == dist.ReduceOp.SUM:
            total = total + part
        elif op == dist.ReduceOp.PRODUCT:
            total = total * part
        elif op == dist.ReduceOp.MAX:
            total = torch.maximum(total, part)
        else:
            total = torch.minimum(total, part)
    return total


def equal(npu, cpu, what):
    got = npu.cpu()
    assert got.dtype == cpu.dtype and torch.equal(got, cpu), (what, got[:8], cpu[:8])


def everyone(size, dtype, salt=0):
    return [values(r, size, dtype, salt) for r in range(world)]


for dtype in FLOATS + WHOLES:
    for size in SIZES if dtype in (torch.float32, torch.bfloat16, torch.int64) else SIZES[:2]:
        inputs = everyone(size, dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            if size > 7 and op != dist.ReduceOp.SUM:
                continue
            x = inputs[rank].npu()
            dist.all_reduce(x, op)
            equal(x, combined(inputs, op), ("all_reduce", dtype, size, op))

        x = inputs[rank].npu()
        dist.reduce(x, world - 1)
        if rank == world - 1:
            equal(x, combined(inputs, dist.ReduceOp.SUM), ("reduce", dtype, size))

        if dtype == torch.uint8:
            continue  # torch_npu refuses to reduce and scatter it
        whole = everyone(size * world, dtype, 2)
        out = torch.empty(size, dtype=dtype).npu()
        dist.reduce_scatter_single(out, whole[rank].npu())
        expected = combined(whole, dist.ReduceOp.SUM)[rank * size : (rank + 1) * size]
        equal(out, expected, ("reduce_scatter", dtype, size))

for dtype in [*FLOATS, *WHOLES, torch.bool, torch.float64]:
    for size in SIZES if dtype in (torch.float32, torch.uint8) else SIZES[:2]:
        inputs = everyone(size, dtype, 3)
        out = torch.empty(size * world, dtype=dtype).npu()
        dist.all_gather_single(out, inputs[rank].npu())
        equal(out, torch.cat(inputs), ("all_gather", dtype, size))

        for root in (0, world - 1):
            x = inputs[rank].npu()
            dist.broadcast(x, root)
            equal(x, inputs[root], ("broadcast", dtype, size, root))

        out = torch.empty(size, dtype=dtype).npu()
        parts = everyone(size, dtype, 4)
        dist.scatter(out, [p.npu() for p in parts] if rank == 0 else None, src=0)
        equal(out, parts[rank], ("scatter", dtype, size))

        whole = everyone(size * world, dtype, 5)
        out = torch.empty(size * world, dtype=dtype).npu()
        dist.all_to_all_single(out, whole[rank].npu())
        mine = [w[rank * size : (rank + 1) * size] for w in whole]
        equal(out, torch.cat(mine), ("all_to_all", dtype, size))

# In place: the output is, or holds, the input.
whole = everyone(5 * world, torch.float32, 6)
out = torch.empty(5 * world).npu()
own = out[5 * rank : 5 * (rank + 1)]
own.copy_(values(rank, 5, torch.float32, 7))
dist.all_gather_single(out, own)
equal(out, torch.cat(everyone(5, torch.float32, 7)), "all_gather in place")
x = whole[rank].npu()
dist.reduce_scatter_single(x[5 * rank : 5 * (rank + 1)], x)
expected = combined(whole, dist.ReduceOp.SUM)[5 * rank : 5 * (rank + 1)]
equal(x[5 * rank : 5 * (rank + 1)], expected, "reduce_scatter in place")

# Nothing at all.
empty = torch.empty(0).npu()
dist.all_reduce(empty)
dist.broadcast(empty, 0)
dist.all_gather_single(torch.empty(0).npu(), empty)

# Different sizes per rank, one of them nothing.
sizes = [3 * r * r for r in range(world)]
parts = [values(r, sizes[r], torch.float32, 8) for r in range(world)]
outs = [torch.empty(s).npu() for s in sizes]
dist.all_gather(outs, parts[rank].npu())
for r in range(world):
    equal(outs[r], parts[r], ("all_gather, uneven", r))
inputs = [[values(10 * a + b, sizes[b], torch.float32, 9) for b in range(world)]
          for a in range(world)]
out = torch.empty(sizes[rank]).npu()
dist.reduce_scatter(out, [t.npu() for t in inputs[rank]])
expected = combined([inputs[a][rank] for a in range(world)], dist.ReduceOp.SUM)
equal(out, expected, "reduce_scatter, uneven")

scale = 100_003
counts = [[(a + 2 * b) % 3 * scale for b in range(world)] for a in range(world)]
messages = [[values(50 + 10 * a + b, counts[a][b], torch.bfloat16, 10) for b in range(world)]
            for a in range(world)]
receive = [counts[a][rank] for a in range(world)]
out = torch.empty(sum(receive), dtype=torch.bfloat16).npu()
dist.all_to_all_single(out, torch.cat(messages[rank]).npu(), receive, counts[rank])
equal(out, torch.cat([messages[a][rank] for a in range(world)]), "all_to_all, uneven")

# Messages around a ring, larger than what a mailbox holds, and several to the same rank.
after, before = (rank + 1) % world, (rank - 1) % world
big = (3 << 20) + 5
for size in (1, 7, big):
    sent = [values(rank, size, torch.float32, 11 + i).npu() for i in range(2)]
    got = [torch.empty(size).npu() for _ in range(2)]
    operations = [dist.P2POp(dist.isend, t, after) for t in sent]
    operations += [dist.P2POp(dist.irecv, t, before) for t in got]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for i in range(2):
        equal(got[i], values(before, size, torch.float32, 11 + i), ("batch", size, i))
for size in (0, 1, big):
    mine, other = values(rank, size, torch.float32, 13).npu(), torch.empty(size).npu()
    if rank == 0:
        dist.send(mine, 1)
        dist.recv(other, 1)
        equal(other, values(1, size, torch.float32, 13), "recv")
    elif rank == 1:
        dist.recv(other, 0)
        dist.send(mine, 0)
        equal(other, values(0, size, torch.float32, 13), "recv")
dist.barrier()
torch.npu.synchronize()
dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_collective_equals_torch_on_every_rank(count: int) -> None:
    for text in check_ranks(EVERY_COLLECTIVE, count):
        assert "done" in text.splitlines(), text


STREAMS_AND_GROUPS = """
import socket

# A long row of small reductions, each of which needs the one before.
x = torch.ones(64).npu()
for _ in range(200):
    dist.all_reduce(x)
    x.mul_(0.5)
assert torch.equal(x.cpu(), torch.ones(64))

# Work beside a collective: the compute stream goes on while the collective waits.
a = torch.full((1 << 18,), float(rank + 1)).npu()
work = dist.all_reduce(a, async_op=True)
b = torch.arange(16.0).npu()
for _ in range(20):
    b = b + 1.0
work.wait()
c = a + 1.0
assert torch.equal(b.cpu(), torch.arange(16.0) + 20.0)
assert torch.equal(c.cpu(), torch.full((1 << 18,), 4.0))

# A collective that depends on a side stream, and a side stream that depends on a collective.
side = torch.npu.Stream()
d = torch.zeros(4096).npu()
side.wait_stream(torch.npu.current_stream())
with torch.npu.stream(side):
    for _ in range(10):
        d.add_(1.0)
    dist.all_reduce(d)
    d.mul_(2.0)
torch.npu.current_stream().wait_stream(side)
e = d + 1.0
assert torch.equal(e.cpu(), torch.full((4096,), 41.0))

# Several groups at once, whose collectives come in different orders.
groups = [dist.new_group([0, 1]) for _ in range(3)]
tensors = [torch.full((1000 + 7 * i,), float(rank + i)).npu() for i in range(3)]
works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in range(3)]
for work in reversed(works):
    work.wait()
for i in range(3):
    assert torch.equal(tensors[i].cpu(), torch.full((1000 + 7 * i,), 2.0 * i + 1.0))

# Messages in both directions while a collective is under way.
f = torch.full((300_000,), float(rank)).npu()
g = torch.empty(300_000).npu()
work = dist.all_reduce(a, async_op=True)
operations = [dist.P2POp(dist.isend, f, 1 - rank), dist.P2POp(dist.irecv, g, 1 - rank)]
for each in dist.batch_isend_irecv(operations):
    each.wait()
work.wait()
assert torch.equal(g.cpu(), torch.full((300_000,), float(1 - rank)))
assert torch.equal(a.cpu(), torch.full((1 << 18,), 6.0))

# A new group after the old one is gone, over a store of its own: the old one holds old keys.
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    port = torch.tensor([listener.getsockname()[1]]).npu()
dist.broadcast(port, 0)
dist.barrier()
torch.npu.synchronize()
dist.destroy_process_group()
store = f"tcp://127.0.0.1:{port.item()}"
dist.init_process_group("hccl", init_method=store, rank=rank, world_size=world)
h = torch.ones(3).npu()
dist.all_reduce(h)
assert h.cpu().tolist() == [2.0, 2.0, 2.0]
torch.npu.synchronize()
dist.destroy_process_group()
"""

POLICIES = ["eager", "threads", *(f"fuzz:{seed}" for seed in range(1, 6))]


@pytest.mark.parametrize("policy", POLICIES)
def test_streams_and_groups_keep_their_order_under_every_policy(policy: str) -> None:
    check_ranks(STREAMS_AND_GROUPS, 2, VNPU_SCHEDULE=policy)


def test_a_captured_collective_runs_at_every_replay() -> None:
    check_ranks(
        """
        x = torch.zeros(1024).npu()
        dist.all_reduce(x)
        torch.npu.synchronize()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = x + 1.0
            dist.all_reduce(y)
            z = y * 2.0
        for value in (0.0, 3.0, -2.0):
            x.fill_(value + rank)
            graph.replay()
            torch.npu.synchronize()
            assert torch.equal(z.cpu(), torch.full((1024,), 2.0 * (2.0 * value + 3.0))), z
        w = torch.ones(1).npu()
        dist.all_reduce(w)
        assert w.item() == 2.0
        """,
        2,
    )


def test_ranks_share_memory_that_has_no_name_to_leave_behind() -> None:
    # The kernel frees this memory when the last process that maps it ends.
    for text in check_ranks(
        """
        dist.all_reduce(torch.ones(8).npu())
        torch.npu.synchronize()
        with open("/proc/self/maps") as maps:
            shared = {line.split(maxsplit=5)[5].strip() for line in maps if " rw-s " in line}
        # Python's own semaphores have lost their names.
        print(sorted(each for each in shared if not each.startswith("/dev/shm/sem.")))
        """,
        2,
    ):
        mapped = text.strip().split("\n")[-1]
        assert "/memfd:vnpu_" in mapped
        assert "/dev/shm" not in mapped
        assert "/tmp" not in mapped
