"""Filtering and sampling of tokens equal their definitions in torch on the CPU."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, values

INFINITY = float("inf")


def top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None, k: torch.Tensor | None
) -> torch.Tensor:
    """The definition on rows in ascending order, as in vLLM's sampler."""
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
    # Distinct values, because either of two equal tokens may stay.
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sample_without_noise_takes_the_likeliest_token(dtype: torch.dtype) -> None:
    logits = values((4, 300), dtype, 1)
    k = torch.tensor([5, 0, 300, 1], dtype=torch.int32)
    p = torch.tensor([0.5, 0.9, 1.0, 0.0], dtype=dtype)
    token, kept = torch_npu.npu_top_k_top_p_sample(
        logits.npu(), k.npu(), p.npu(), is_need_logits=True
    )
    compare(token, logits.float().argmax(-1))
    counts = kept.isfinite().sum(-1).tolist()
    assert counts[0] <= 5
    assert counts[2:] == [300, 1]
    compare(kept.cpu().amax(-1).npu(), logits.float().amax(-1))


def test_sample_divides_the_ranked_probabilities_by_the_noise() -> None:
    logits = values((3, 50), torch.float32, 1)
    k = torch.full((3,), 4, dtype=torch.int32)
    noise = torch.ones(3, 50)
    noise[0, 1] = noise[1, 3] = 1e-6  # favours the second and fourth ranks
    noise[2, 10] = 1e-9  # outside the first four: changes nothing
    token, _ = torch_npu.npu_top_k_top_p_sample(
        logits.npu(), k.npu(), torch.ones(3).npu(), noise.npu()
    )
    order = logits.argsort(-1, descending=True)
    compare(token, torch.stack([order[0, 1], order[1, 3], order[2, 0]]))


def test_min_p_hides_what_is_unlikely_beside_the_best() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    _, kept = torch_npu.npu_top_k_top_p_sample(
        logits.npu(),
        torch.tensor([4]).int().npu(),
        torch.ones(1).npu(),
        is_need_logits=True,
        min_ps=torch.tensor([0.5]).npu(),
    )
    assert kept.isfinite().tolist() == [[True, True, False, False]]


def test_first_version_of_sample_equals_the_second() -> None:
    logits = values((3, 50), torch.float32, 1)
    k, p = torch.full((3,), 4, dtype=torch.int32).npu(), torch.full((3,), 0.8).npu()
    noise = values((3, 50), torch.float32, 2, low=0.1, high=2).npu()
    token, kept = torch_npu.npu_top_k_top_p_sample(logits.npu(), k, p, noise, is_need_logits=True)
    first_token = torch.zeros(3, dtype=torch.int64).npu()
    first_kept = torch.zeros(3, 50).npu()
    aclnn.call(
        "TopKTopPSample", logits.npu(), k, p, noise, 1e-8, True,
        32, first_token, first_kept,
    )  # fmt: skip
    compare(first_token, token.cpu())
    compare(first_kept, kept.cpu())


def test_multinomial_sample_draws_only_what_was_kept() -> None:
    logits = values((64, 50), torch.float32, 1)
    k = torch.full((64,), 3, dtype=torch.int32)
    token, _ = torch_npu.npu_top_k_top_p_sample(
        logits.npu(), k.npu(), torch.ones(64).npu(), post_sample="multiNomial"
    )
    best = logits.topk(3).indices
    assert (best == token.cpu()[:, None]).any(-1).all()
