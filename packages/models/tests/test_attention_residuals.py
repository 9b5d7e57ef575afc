"""Attention residuals equal their equation, in any number of parts and over pipeline stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vllm_davinci.models import attention_residuals
from vllm_davinci.models.attention_residuals import AttentionResiduals
from vllm_davinci_testing.engines.kimi_k3_checkpoint import EPS, mixed_sums

TOKENS, HIDDEN = 7, 32


@pytest.mark.parametrize("piece", [1 << 24, 3 * HIDDEN * 2])
@torch.inference_mode()
def test_mixes_are_those_of_the_equation(piece: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_residuals, "_PIECE", piece)
    torch.manual_seed(0)
    of_scores, to_score = nn.RMSNorm(HIDDEN, EPS), nn.Linear(HIDDEN, 1, bias=False)
    of_scores.weight.normal_(mean=1.0, std=0.3)
    to_score.weight.normal_()
    of_scores.variance_epsilon = EPS
    embedded, *outputs = torch.randn(6, TOKENS, HIDDEN).unbind(0)
    sums, residuals = [embedded.clone()], AttentionResiduals(embedded, None, 4)
    kept = embedded.clone()
    for number, output in enumerate(outputs):
        if number % 2 == 0:
            residuals.begin_block(output)
            sums = [*sums, output]
        else:
            residuals.add(output)
            sums = [*sums[:-1], sums[-1] + output]
        expected = mixed_sums(sums, of_scores, to_score)
        torch.testing.assert_close(residuals.mix(of_scores, to_score), expected)
        if number == 2:  # the next stage takes over
            residuals = AttentionResiduals(residuals.current, residuals.completed(), 4)
    assert torch.equal(embedded, kept)


def test_a_single_sum_is_its_own_mix():
    embedded = torch.randn(TOKENS, HIDDEN)
    mix = AttentionResiduals(embedded, None, 2).mix(nn.Identity(), nn.Identity())
    assert torch.equal(mix, embedded)
