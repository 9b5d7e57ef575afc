"""In the mode HostValues, encoders' copies and reads give the usual values and never wait."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_davinci.core.multimodal.host_values import MAX_KNOWN, HostValues
from vllm_davinci.vnpu import counted

NPU = torch.device("npu")
Result = Any


def sizes() -> torch.Tensor:
    return torch.tensor([[4, 6], [2, 8], [3, 3]])


def features() -> torch.Tensor:
    return torch.arange(24.0).view(2, 4, 3).to("npu")


def positions() -> Result:
    rows = torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")
    return torch.stack(rows, -1).flatten(0, 1).to(NPU)


def patches_of_images() -> Result:
    return [int(height) // 2 * int(width) for height, width in sizes().to(device=NPU)]


def split_by_lengths() -> Result:
    masks = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).to(NPU, non_blocking=True)
    return ((masks.sum(-1) - 1) // 2 + 1).unsqueeze(1).flatten().tolist()


def rows_of_a_mask() -> Result:
    lengths = torch.tensor([1, 3]).to(NPU).unsqueeze(1)
    mask = torch.arange(4, device=NPU).expand(2, 4) < lengths
    return features()[mask]


def filled_by_a_mask() -> Result:
    masks = torch.tensor([[True, False], [False, True]]).to(NPU)
    filled = masks.to(torch.float32)
    filled[masks] = float("-inf")
    return filled


def made_there() -> Result:
    return torch.tensor([0, 4, 9], dtype=torch.int32, device=NPU)[1:].tolist()


def chunks_of_lengths() -> Result:
    lengths = torch.tensor([130, 200]).to(NPU)
    counts = ((lengths + 99) / 100).long()
    chunks = torch.full((int(counts.sum()),), 100).to(NPU)
    chunks[torch.nn.functional.pad(counts, (1, 0), value=-1).cumsum(0)[1:]] = lengths % 100
    chunks[chunks == 0] = 100
    return chunks.tolist()


def is_without_padding() -> Result:
    return bool((sizes().to(NPU) > 1).all(dim=-1).all())


WORK = [
    positions, patches_of_images, split_by_lengths, rows_of_a_mask, filled_by_a_mask, made_there,
    chunks_of_lengths, is_without_padding,
]  # fmt: skip


def on_host(result: Result) -> Result:
    return result.cpu() if isinstance(result, torch.Tensor) else result


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_values_known_on_the_host_are_equal_and_cause_no_wait(work: Callable[[], Result]):
    expected = work()
    features()  # the device's first use
    with HostValues(NPU), counted() as counts:
        found = work()
    assert (counts.synchronizations, counts.copies_to_host) == (0, 0)
    assert counts.launches > 0
    if isinstance(expected, torch.Tensor):
        assert found.device.type == "npu"
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(on_host(found), on_host(expected))
    else:
        assert found == expected
    with counted() as counts:
        work()
    assert counts.synchronizations + counts.copies_to_host > 0, "nothing was to be saved"


WRITES: list[Callable[[torch.Tensor], Any]] = [
    lambda tensor: tensor.add_(1),
    lambda tensor: tensor[1].fill_(7),
    lambda tensor: tensor.__setitem__(0, 5),
    lambda tensor: tensor.__iadd__(3),
    lambda tensor: torch.add(tensor, 1, out=tensor),
    lambda tensor: torch.ops.aten.add_(tensor, 1),
    lambda tensor: torch.ops.aten.add_.Scalar(tensor, 1),
]


@pytest.mark.parametrize("number", range(len(WRITES)))
def test_a_value_written_on_the_device_is_read_from_it(number: int):
    expected = sizes().to(NPU)
    WRITES[number](expected)
    with HostValues(NPU):
        tensor = sizes().to(NPU)
        WRITES[number](tensor)
        assert tensor.tolist() == expected.tolist()


def test_where_the_device_rounds_a_quotient_otherwise_the_host_reads_it_and_copies_integers_of_it():
    def div(tensor: torch.Tensor, divisor: int) -> torch.Tensor:
        return tensor / divisor - (1e-3 if tensor.device.type == "npu" else 0)

    with HostValues(NPU) as mode:
        quotients = mode.__torch_function__(div, (), (sizes().to(NPU), 2))
        with counted() as counts:
            integers, signs, casts = quotients.long(), quotients >= 2, quotients.to(torch.int32)
            lists = [each[0].tolist() for each in (integers, signs, casts)]
        assert (counts.synchronizations, counts.copies_to_host) == (0, 0)
        assert lists == [[2, 3], [True, True], [2, 3]]
        assert quotients[0].tolist() == pytest.approx([1.999, 2.999])
        assert quotients[0].cpu()[0] < 2
    assert [each[0].tolist() for each in (integers, signs, casts)] == lists


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_source_that_is_written_to_afterwards_changes_no_copy(is_pinned: bool):
    source = sizes().pin_memory() if is_pinned else sizes()
    with HostValues(NPU):
        tensor = source.to(NPU)
        source.fill_(9)
        assert tensor.tolist() == sizes().tolist()
    assert tensor.tolist() == sizes().tolist()


def test_a_copy_on_the_host_is_the_callers():
    with HostValues(NPU):
        tensor = sizes().to(NPU)
        for copy in (tensor.cpu(), tensor.to("cpu")):
            copy.fill_(9)
        assert tensor.tolist() == sizes().tolist()


def test_pixels_and_what_comes_from_the_device_are_not_kept():
    large = torch.arange(MAX_KNOWN + 1)
    with HostValues(NPU), counted() as counts:
        assert large.to(NPU).tolist() == large.tolist()
        assert torch.ones(3).to(NPU).tolist() == [1, 1, 1]
        assert (features() > 3).sum().item() == 20
    assert counts.copies_to_host == 3
