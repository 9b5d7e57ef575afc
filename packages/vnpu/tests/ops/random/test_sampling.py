"""Filtering and sampling of tokens equal their definitions in torch on the CPU."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, values

INFINITY = float("inf")


def top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None, k: torch.Tensor | None
) -> torch.Tensor:
    """Computes the definition on rows in ascending order, like vLLM's sampler."""
    ranked, order = logits.float().sort(dim=-1, descending=False, stable=True)
    if k is not None:
        threshold = ranked.gather(1, (ranked.shape[1] - k.long())[:, None])
        ranked = ranked.masked_fill(ranked < threshold, -INFINITY)
    if p is not None:
        hidden = ranked.softmax(-1).cumsum(-1) <= 1 - p.float()[:, None]
        hidden[:, -1] = False
        ranked = ranked.masked_fill(hidden, -INFINITY)
    return torch.empty_like(ranked).scatter_(1, order, ranked).to(logits.dtype)


@pytest.mark.parametrize("vocabulary", [5, 1000, 5000])
@given(dtype=st.sampled_from(FLOATS), spread=st.sampled_from([0.1, 1.0, 10.0]), data=st.data())
def test_top_k_top_p_equals_its_definition(vocabulary, dtype, spread, data):
    seed = data.draw(st.integers(0, 99))
    # Values are distinct, because either of two equal tokens may remain.
    ranks = torch.rand(4, vocabulary, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    if dtype != torch.float32:
        ranks = ranks % 200
    logits = (ranks / vocabulary * spread).to(dtype)
    k = torch.tensor(
        data.draw(st.lists(st.integers(1, min(vocabulary, 1024)), min_size=4, max_size=4)),
        dtype=torch.int32,
    )
    p = values((4,), dtype, seed, low=0.05, high=0.95)
    for chosen_p, chosen_k in ((p, k), (None, k), (p, None)):
        if chosen_p is not None and dtype != torch.float32:
            continue
        compare(
            torch_npu.npu_top_k_top_p(
                logits.npu(),
                None if chosen_p is None else chosen_p.npu(),
                None if chosen_k is None else chosen_k.npu(),
            ),
            top_k_top_p(logits, chosen_p, chosen_k),
        )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_top_p_keeps_the_token_that_crosses_the_mass(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().to(dtype)
    for p, kept in ((0.4, 1), (0.6, 2), (0.8, 3), (1.0, 4)):
        out = torch_npu.npu_top_k_top_p(
            logits.npu(), torch.tensor([p], dtype=dtype).npu(), torch.tensor([4]).int().npu()
        )
        assert out.isfinite().sum().item() == kept
        compare(out[:, :kept], logits[:, :kept])


def test_rows_without_a_limit_stay_as_they_are() -> None:
    logits = values((3, 4000), torch.float32, 1)
    k = torch.tensor([4000, 7, 4000], dtype=torch.int32)
    p = torch.tensor([1.0, 1.0, 0.5])
    out = torch_npu.npu_top_k_top_p(logits.npu(), p.npu(), k.npu())
    compare(out[0], logits[0])
    assert out.isfinite().sum(-1).tolist()[1] == 7
    compare(out, top_k_top_p(logits, p, k))


def test_equal_logits_at_the_threshold_all_stay() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    out = torch_npu.npu_top_k_top_p(
        logits.npu(), torch.tensor([1.0]).npu(), torch.tensor([2]).int().npu()
    )
    assert out.isfinite().tolist() == [[False, True, True, True, False]]
