"""Side streams inside a layer."""

import pytest
import torch

from vllm_davinci.multistream import EventPool, Fork, Role, StreamPool

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")


def test_work_beside_the_main_stream_gives_the_same_result() -> None:
    pool = StreamPool()
    events = EventPool(pool.device)
    x = torch.randn(32, 32).to(DEVICE)
    for _ in range(3):
        events.begin_step()
        with Fork(pool, events, Role.VECTOR) as fork:
            a = x @ x
            side = fork.run(lambda a: torch.relu(a) + 1.0, a)
            main = x * 2.0
            fork.join()
            total = main + side
    assert torch.equal(total.cpu(), (x * 2.0 + (torch.relu(x @ x) + 1.0)).cpu())
    assert events.allocated == 2


def test_an_exception_restores_the_stream_and_joins() -> None:
    pool = StreamPool()
    before = pool.device.current_stream()

    def fail(_: torch.Tensor) -> None:
        raise ValueError("inside")

    def fork_and_fail() -> None:
        with Fork(pool, EventPool(pool.device), Role.VECTOR) as fork:
            fork.run(fail, torch.ones(2).to(DEVICE))

    with pytest.raises(ValueError, match="inside"):
        fork_and_fail()
    assert pool.device.current_stream() == before


def test_streams_of_a_role_are_created_once() -> None:
    pool = StreamPool()
    assert pool.stream(Role.VECTOR) is pool.stream(Role.VECTOR)
    pool.stream(Role.COPY)
    assert pool.created == 2
    assert pool.stream(Role.COMPUTE) == pool.device.current_stream()
