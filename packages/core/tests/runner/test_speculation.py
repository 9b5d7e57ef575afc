"""Numbers of computed tokens: if drafts are rejected, the device knows them before the host."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_davinci.core.runner.speculation import ComputedTokens


def states(on_device: list[int], on_host: list[int]) -> Any:
    return SimpleNamespace(
        num_computed_tokens=SimpleNamespace(gpu=torch.tensor(on_device, dtype=torch.int32).npu()),
        num_computed_tokens_np=np.array(on_host, dtype=np.int32),
        is_new=np.ones(len(on_host), dtype=bool),
    )


def test_before_the_first_step_the_hosts_numbers_stand():
    of_requests = states([0, 0], [4, 9])
    ComputedTokens(of_requests).settle(np.array([1, 0]))
    assert of_requests.num_computed_tokens_np.tolist() == [4, 9]


def test_numbers_are_the_devices_but_of_requests_that_came_since():
    of_requests = states([11, 22, 33, 44], [14, 25, 36, 47])
    computed = ComputedTokens(of_requests)
    computed.copy()
    of_requests.num_computed_tokens.gpu.fill_(0)  # by the next step
    of_requests.is_new[2] = True
    computed.settle(np.array([2, 0, 3]))
    assert of_requests.num_computed_tokens_np.tolist() == [11, 25, 36, 44]
    assert computed.of(np.array([3, 1])).tolist() == [44, 22]
