"""The host waits for a step's input copies only if a copy is pending."""

import torch

from vllm_davinci.core.inputs.copied_event import CopiedEvent
from vllm_davinci.vnpu import HostCounts


def waits(event: torch.npu.Event) -> int:
    before = HostCounts.now()
    event.synchronize()
    return (HostCounts.now() - before).synchronizations


def test_the_host_waits_while_a_copy_is_under_way_and_not_after_it():
    source = torch.ones(16).pin_memory()
    product = torch.ones(2048, 2048, device="npu")
    for _ in range(4):
        product = product @ product
    target = product.new_zeros(16)
    target.copy_(source, non_blocking=True)
    event, plain = CopiedEvent(), torch.npu.Event()
    event.record()
    plain.record()
    event.synchronize()
    assert event.query()
    assert torch.equal(target.cpu(), source)
    assert waits(plain) == 1
    assert waits(event) == 0
