"""Experts without gates equal their definition, row by row."""

import torch

from vllm_davinci.core.fused_moe.ungated_experts import UngatedExperts

COUNTS, HIDDEN, INNER = [3, 0, 2], 32, 64


def test_every_row_goes_through_its_expert(device: torch.device):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(COUNTS), HIDDEN, generator=generator)
    up = torch.randn(len(COUNTS), HIDDEN, INNER, generator=generator)
    down = torch.randn(len(COUNTS), INNER, HIDDEN, generator=generator)
    experts = UngatedExperts(
        up=up.to(device), down=down.to(device), first=0, num_local=3, num_experts=3
    )
    found = experts(rows.to(device), torch.tensor(COUNTS, device=device)).cpu()
    expert = torch.repeat_interleave(torch.arange(3), torch.tensor(COUNTS))
    for row, number, result in zip(rows, expert, found, strict=True):
        expected = (row @ up[number]).relu().square() @ down[number]
        torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-4)
    assert (
        experts(rows[:0].to(device), torch.zeros(3, dtype=torch.int64, device=device)).shape[0] == 0
    )
