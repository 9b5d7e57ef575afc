"""Blocked copies of weights are dropped when the weights' memory changes."""

from collections.abc import Callable, Iterator

import pytest
import torch

from vllm_davinci.vnpu import _C, VirtualDeviceConfig
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import values
from vllm_davinci_testing.processes import forked
from vllm_davinci_testing.processes.programs import output_of
from vllm_davinci_testing.processes.ranks import check_ranks
from vllm_davinci_testing.processors import PROCESSORS

pytestmark = pytest.mark.nightly("operators")

ROWS, DEPTH, COLUMNS = 3, 72, 136
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 1e-2, "atol": 2e-2},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}

Weight = torch.Tensor  # [COLUMNS, DEPTH]; products use its transpose


def index_write(weight: Weight) -> None:
    weight[torch.tensor([5, 1], device=weight.device)] = 2.0


def write_through_a_second_tensor(weight: Weight) -> None:
    torch.as_strided(weight, (7,), (DEPTH,), 3).fill_(-3.0)


def write_as_an_output(weight: Weight) -> None:
    torch.mul(torch.ones_like(weight), 0.5, out=weight)


def write_a_cast(weight: Weight) -> None:
    weight.copy_(torch.full((COLUMNS, DEPTH), 7, dtype=torch.int32, device=weight.device))


def write_parts(weight: Weight) -> None:
    torch.split_with_sizes_copy(
        torch.ones_like(weight), [100, 36], 0, out=[weight[:100], weight[100:]]
    )


WRITES: dict[str, Callable[[Weight], object]] = {
    "copy from the host": lambda w: w.copy_(values((COLUMNS, DEPTH), w.dtype, 9, low=-1, high=1)),
    "copy of a row from the host": lambda w: w[17].copy_(values((DEPTH,), w.dtype, 9)),
    "copy on the device": lambda w: w.copy_(w.flip(0)),
    "cast": write_a_cast,
    "arithmetic in place": lambda w: w.add_(0.25),
    "one element": lambda w: w[0, 0].fill_(30.0),
    "the last element": lambda w: w[-1, -1].fill_(30.0),
    "zeros": lambda w: w.zero_(),
    "fill": lambda w: w.fill_(0.125),
    "out=": write_as_an_output,
    "index": index_write,
    "masked": lambda w: w.masked_fill_(w > 0, 1.0),
    "another view": write_through_a_second_tensor,
    "several outputs": write_parts,
    "random numbers": lambda w: w.copy_(w.clone().uniform_().cpu()),
}


@pytest.fixture
def own_memory() -> Iterator[None]:
    """Gives each case memory that no earlier case has shared with another process.

    The library keeps no copy of weights in shared memory, because the other process may write them;
    the allocator would reuse this memory.
    """
    pool = torch.npu.MemPool()
    with torch.npu.use_mem_pool(pool):
        yield


in_own_memory = pytest.mark.usefixtures("own_memory")


def product(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    return torch.mm(x.to(weight.device), weight.t())


def is_kept(weight: Weight) -> bool:
    last = sum(
        (size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True)
    )
    return _C.is_watched(weight.data_ptr(), (last + 1) * weight.element_size())


def use_twice(x: torch.Tensor, weight: Weight) -> None:
    """Uses the weight until the library keeps a blocked copy of it."""
    first = product(x, weight).cpu()
    for _ in range(2):
        assert torch.equal(product(x, weight).cpu(), first)
    assert is_kept(weight)


@in_own_memory
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_weight_that_was_written_is_used_with_its_new_values(write, dtype):
    x = values((ROWS, DEPTH), dtype, 1, low=-1, high=1)
    weight = values((COLUMNS, DEPTH), dtype, 2, low=-1, high=1).npu()
    for _ in range(2):
        use_twice(x, weight)
        write(weight)
        torch.npu.synchronize()
        assert not is_kept(weight)
        expected = product(x, weight.cpu())
        for _ in range(3):
            compare(product(x, weight), expected, **TOLERANCE[dtype])


@in_own_memory
@pytest.mark.parametrize("layout", ["columns", "rows"])
def test_heads_and_experts_are_forgotten_one_by_one(layout: str) -> None:
    x = values((4, ROWS, DEPTH), torch.bfloat16, 1)
    weight = values((4, DEPTH, COLUMNS), torch.bfloat16, 2).npu()
    if layout == "columns":
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(3):
        torch.bmm(x.npu(), weight)
    weight[2].mul_(2)
    torch.npu.synchronize()
    assert [is_kept(one) for one in weight] == [True, True, False, True]
    compare(torch.bmm(x.npu(), weight), torch.bmm(x, weight.cpu()), **TOLERANCE[torch.bfloat16])


@in_own_memory
def test_bytes_around_a_write_are_unchanged() -> None:
    x = values((ROWS, DEPTH), torch.bfloat16, 1, low=-1, high=1)
    whole = values((3 * COLUMNS, DEPTH), torch.bfloat16, 2).npu()
    for part in whole.chunk(3):
        use_twice(x, part)
    whole[COLUMNS : 2 * COLUMNS].neg_()
    torch.npu.synchronize()
    assert [is_kept(part) for part in whole.chunk(3)] == [True, False, True]
    for part in whole.chunk(3):
        compare(product(x, part), product(x, part.cpu()), **TOLERANCE[torch.bfloat16])


def test_memory_that_is_used_again_holds_another_weight() -> None:
    x = values((ROWS, DEPTH), torch.bfloat16, 1, low=-1, high=1)
    addresses = set()
    for seed in range(4):
        weight = values((COLUMNS, DEPTH), torch.bfloat16, seed, low=-1, high=1).npu()
        addresses.add(weight.data_ptr())
        for _ in range(3):
            compare(product(x, weight), product(x, weight.cpu()), **TOLERANCE[torch.bfloat16])
        del weight
    assert len(addresses) == 1, "the allocator was expected to hand out the same memory again"


def test_freed_memory_is_not_watched() -> None:
    x = values((ROWS, DEPTH), torch.bfloat16, 1, low=-1, high=1)
    torch.npu.empty_cache()
    # A large tensor has a segment of its own, so that all of it is returned.
    weight = torch.zeros(COLUMNS, 1 << 18, dtype=torch.bfloat16, device="npu")[:, :DEPTH]
    use_twice(x, weight)
    address = weight.data_ptr()
    del weight
    torch.npu.empty_cache()
    assert not _C.is_watched(address, 1 << 20)


@in_own_memory
def test_a_replayed_graph_writes_the_weight_each_time() -> None:
    x = values((ROWS, DEPTH), torch.bfloat16, 1, low=-1, high=1)
    weight = torch.ones(COLUMNS, DEPTH, dtype=torch.bfloat16, device="npu")
    on_device = x.npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        weight.add_(1.0)
        inside = torch.mm(on_device, weight.t())
        again = torch.mm(on_device, weight.t())
    for count in range(1, 4):
        use_twice(x, weight)
        graph.replay()
        torch.npu.synchronize()
        expected = product(x, torch.full((COLUMNS, DEPTH), 1.0 + count, dtype=torch.bfloat16))
        for found in (inside, again, product(x, weight)):
            compare(found, expected, **TOLERANCE[torch.bfloat16])


@in_own_memory
def test_a_write_that_fails_counts_as_one() -> None:
    """The output of an operator that was stopped may contain anything."""
    weight = values((COLUMNS, DEPTH), torch.float32, 2, low=-1, high=1).npu()
    use_twice(values((ROWS, DEPTH), torch.float32, 1, low=-1, high=1), weight)
    with pytest.raises(RuntimeError):
        torch.gather(weight, 0, torch.full((COLUMNS, DEPTH), 10**6, device="npu"), out=weight)
        torch.npu.synchronize()
    assert not is_kept(weight)


@pytest.mark.parametrize("schedule", ["eager", "threads", "fuzz:3"])
@pytest.mark.parametrize(
    ("run", "variables"),
    [
        # torch_npu reads this variable when it is imported.
        pytest.param(
            output_of, {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, id="segments"
        ),
        pytest.param(forked.output_of, {}, id="blocks"),
    ],
)
def test_a_write_of_another_stream_is_seen_behind_its_event(schedule, run, variables):
    lines = run(
        """
        import torch
        side = torch.npu.Stream()
        x = torch.ones(2, 64, dtype=torch.bfloat16, device="npu")
        weight = torch.zeros(96, 64, dtype=torch.bfloat16, device="npu")
        for step in range(20):
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                weight.add_(0.5)
            torch.npu.current_stream().wait_stream(side)
            for _ in range(3):
                found = torch.mm(x, weight.t())
            print(float(found[1, 70].cpu()))
        """,
        VirtualDeviceConfig(schedule=schedule),
        **variables,
    )
    assert [float(line) for line in lines] == [32.0 * (step + 1) for step in range(20)]


def test_collectives_write_weights() -> None:
    check_ranks(
        """
        x = torch.ones(2, 64, dtype=torch.bfloat16, device="npu")
        weight = torch.ones(96, 64, dtype=torch.bfloat16, device="npu")
        other = torch.full_like(weight, 3.0)

        def holds(value):
            for _ in range(3):
                found = torch.mm(x, weight.t()).cpu()
                assert torch.all(found == 64 * value), (value, found)

        holds(1)
        dist.all_reduce(weight)
        holds(2)
        dist.broadcast(other.mul_(2) if rank == 0 else weight, 0)
        holds(2 if rank == 0 else 6)
        dist.all_gather_into_tensor(weight, torch.full((48, 64), 4.0).bfloat16().npu())
        holds(4)
        dist.reduce_scatter_tensor(weight, torch.ones(192, 64, dtype=torch.bfloat16).npu())
        holds(2)
        dist.all_to_all_single(weight, torch.full_like(weight, 5.0))
        holds(5)
        if rank == 0:
            dist.send(other, 1)
        else:
            dist.recv(weight, 0)
        holds(5 if rank == 0 else 6)
        """,
        2,
    )


SPLIT_AND_WHOLE = """
import hashlib
import torch
generator = torch.Generator().manual_seed(1)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for depth, columns in ((64, 128), (515, 96), (2048, 64), (4096, 256), (96, 40)):
        x = torch.randn(200, depth, generator=generator).to(dtype).npu()
        weight = torch.randn(columns, depth, generator=generator).to(dtype).npu()
        whole = torch.mm(x, weight.t()).cpu()
        for rows in (1, 2, 3, 15, 16, 17, 63, 64, 65, 129):
            for first in (0, 71):
                part = torch.mm(x[first : first + rows], weight.t()).cpu()
                assert torch.equal(part, whole[first : first + rows]), (dtype, depth, rows, first)
        print(hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest())
"""


def test_a_row_does_not_depend_on_how_many_there_are_or_on_the_threads() -> None:
    """Splitting steps between requests, and merging them again, gives the same sums bit for bit."""
    one = forked.output_of(SPLIT_AND_WHOLE)
    three = output_of(
        "import torch\ntorch.set_num_threads(3)\n" + SPLIT_AND_WHOLE, TASK_QUEUE_ENABLE="0"
    )
    assert one == three


@pytest.mark.parametrize("variables", PROCESSORS.values(), ids=PROCESSORS)
def test_nor_does_it_on_processors_with_narrower_vectors(variables: dict[str, str]) -> None:
    assert output_of(SPLIT_AND_WHOLE, **variables)
