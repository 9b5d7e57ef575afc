"""Random numbers are reproducible from the seed and have the right distribution."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.strategies import FLOATS, SHAPES

COUNT = 20_000  # draws per test of a distribution
# In standard errors: a correct generator fails once in two million seeds, and seeds are fixed.
ERRORS = 5.0

# All ways to draw numbers, each depending only on the generator's state.
DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(999, device="npu"),
    "rand_half": lambda: torch.rand(999, dtype=torch.float16, device="npu"),
    "rand_double": lambda: torch.rand(999, dtype=torch.float64, device="npu"),
    "uniform": lambda: torch.empty(999, device="npu").uniform_(-2, 5),
    "randn": lambda: torch.randn(999, device="npu"),
    "normal": lambda: torch.normal(1.0, 2.0, (999,), device="npu"),
    "normal_means": lambda: torch.normal(torch.arange(999.0).npu(), 2.0),
    "randint": lambda: torch.randint(-5, 1000, (999,), device="npu"),
    "random": lambda: torch.empty(999, dtype=torch.int64, device="npu").random_(),
    "randperm": lambda: torch.randperm(999, device="npu"),
    "bernoulli": lambda: torch.empty(999, device="npu").bernoulli_(0.3),
    "bernoulli_tensor": lambda: torch.bernoulli(torch.full((999,), 0.3, device="npu")),
    "multinomial": lambda: torch.multinomial(torch.ones(99, 50, device="npu"), 10),
    "multinomial_again": lambda: torch.multinomial(torch.ones(99, 50, device="npu"), 10, True),
    "exponential": lambda: torch.empty(999, device="npu").exponential_(),
    "sim_exponential": lambda: torch_npu.npu_sim_exponential_(torch.empty(999).npu()),
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.npu.manual_seed(20260117)


def assert_moments(x: torch.Tensor, mean: float, variance: float) -> None:
    """Asserts mean and variance of independent draws, within ERRORS standard errors."""
    x = x.cpu().double().flatten()
    assert abs(x.mean().item() - mean) < ERRORS * math.sqrt(variance / x.numel())
    centred = (x - mean) ** 2
    assert abs(centred.mean().item() - variance) < ERRORS * float(centred.std()) / x.numel() ** 0.5


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_seed_gives_the_same_numbers(name: str) -> None:
    draw = DRAWS[name]
    torch.npu.manual_seed(5)
    first, second = draw().cpu(), draw().cpu()
    torch.npu.manual_seed(5)
    assert torch.equal(first, draw().cpu())
    assert torch.equal(second, draw().cpu())
    assert not torch.equal(first, second)
    torch.npu.manual_seed(6)
    assert not torch.equal(first, draw().cpu())


def _philox_floats(seed: int, offset: int, count: int) -> np.ndarray:
    """Computes uniform fp32 numbers as defined in csrc/ops/random/philox.h."""
    rows = -(-count // 16)
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    counter = np.arange(rows * 4, dtype=np.uint64)
    a, b = counter & low, counter >> half
    c = np.full_like(a, offset & 0xFFFFFFFF)
    d = np.full_like(a, offset >> 32)
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        product0, product1 = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (product1 >> half) ^ b ^ np.uint64(key0), product1 & low
        c, d = (product0 >> half) ^ d ^ np.uint64(key1), product0 & low
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    words = np.stack([w.reshape(rows, 4) for w in (a, b, c, d)], axis=1).reshape(-1)
    return ((words[:count] >> np.uint64(8)).astype(np.float32) / np.float32(2**24)).copy()


@given(seed=st.integers(0, 2**63 - 1), count=st.sampled_from((1, 15, 16, 17, 1000, 40_000)))
def test_uniform_numbers_follow_the_definition_of_philox(seed: int, count: int) -> None:
    generator = torch.Generator(device="npu").manual_seed(seed)
    generator.set_offset(2**33 + 8)
    drawn = torch.rand(count, device="npu", generator=generator)
    expected = torch.from_numpy(_philox_floats(seed, 2**33 + 8, count))
    torch.testing.assert_close(drawn.cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_uniform_numbers_fill_their_range(dtype: torch.dtype) -> None:
    x = torch.rand(COUNT, dtype=dtype, device="npu")
    assert x.dtype == dtype
    assert x.min() >= 0
    assert x.max() < 1
    assert_moments(x + (2**-9 if dtype == torch.bfloat16 else 0), 1 / 2, 1 / 12)
    wide = torch.empty(COUNT, dtype=dtype, device="npu").uniform_(-2, 6)
    assert wide.min() >= -2
    assert wide.max() <= 6
    assert wide.max() - wide.min() > 7.5


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_normal_numbers_have_the_moments_asked_for(dtype: torch.dtype) -> None:
    x = torch.randn(COUNT, dtype=dtype, device="npu")
    assert_moments(x, 0, 1)
    assert abs((x.cpu().double() ** 3).mean()) < ERRORS * math.sqrt(15 / COUNT)
    assert abs((x.cpu().double() ** 4).mean() - 3) < ERRORS * math.sqrt(96 / COUNT)
    # Both halves use the same pairs, and must not be correlated.
    first, second = x.cpu().double().chunk(2)
    assert abs((first * second).mean()) < ERRORS / math.sqrt(COUNT / 2)
    assert_moments(torch.empty(COUNT, dtype=dtype, device="npu").normal_(3, 0.5), 3, 0.25)


def test_normal_takes_a_mean_per_element() -> None:
    mean = torch.arange(4.0).repeat_interleave(COUNT).reshape(4, COUNT)
    for row, x in enumerate(torch.normal(mean.npu(), 0.5).cpu()):
        assert_moments(x, row, 0.25)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_integers_are_uniform_over_the_range(dtype: torch.dtype) -> None:
    x = torch.randint(3, 13, (COUNT,), dtype=dtype, device="npu").cpu()
    counts = torch.bincount(x.long(), minlength=13)
    assert counts[:3].sum() == 0
    assert counts.numel() == 13
    assert (counts[3:] - COUNT / 10).abs().max() < ERRORS * math.sqrt(COUNT * 0.09)


def test_random_fills_the_dtype() -> None:
    x = torch.empty(COUNT, dtype=torch.int32, device="npu").random_()
    assert x.min() >= 0
    assert x.max() > 0.99 * 2**31
    bytes_ = torch.empty(COUNT, dtype=torch.uint8, device="npu").random_()
    # torch_npu requests numbers below the dtype's largest number.
    assert torch.equal(bytes_.cpu().unique(), torch.arange(255, dtype=torch.uint8))


@given(n=st.integers(0, 300))
def test_randperm_is_a_permutation(n: int) -> None:
    x = torch.randperm(n, device="npu")
    assert torch.equal(x.cpu().sort().values, torch.arange(n))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_bernoulli_has_the_probability_asked_for(p: float) -> None:
    spread = ERRORS * math.sqrt(p * (1 - p) / COUNT)
    x = torch.empty(COUNT, device="npu").bernoulli_(p).cpu()
    assert set(x.tolist()) <= {0.0, 1.0}
    assert abs(x.mean() - p) <= spread
    probabilities = torch.tensor([[p], [1 - p]]).expand(2, COUNT).npu()
    means = torch.bernoulli(probabilities).cpu().mean(1)
    assert abs(means[0] - p) <= spread
    assert abs(means[1] - (1 - p)) <= spread


@pytest.mark.parametrize("replacement", [True, False])
def test_multinomial_follows_the_weights(replacement: bool) -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0])
    rows = weights.expand(COUNT // 2, 5).contiguous().npu()
    drawn = torch.multinomial(rows, 2, replacement).cpu()
    assert drawn.dtype == torch.int64
    first = torch.bincount(drawn[:, 0], minlength=5) / (COUNT / 2)
    p = weights / weights.sum()
    assert (first - p).abs().max() < ERRORS * 0.5 / math.sqrt(COUNT / 2)
    assert first[0] == first[3] == 0
    if replacement:
        assert (drawn[:, 0] == drawn[:, 1]).any()
    else:
        assert (drawn[:, 0] != drawn[:, 1]).all()
    one = torch.multinomial(weights.npu(), 1)
    assert one.shape == (1,)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [1.0, math.nan], [math.inf, 1.0]])
def test_multinomial_refuses_weights_that_are_no_distribution(weights: list[float]) -> None:
    on_device = torch.tensor(weights).npu()
    with pytest.raises(RuntimeError, match="weights"):  # runs late in some schedules
        torch.multinomial(on_device, 1)
        torch.npu.synchronize()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("rate", [1.0, 2.5])
def test_exponential_has_the_rate_asked_for(dtype: torch.dtype, rate: float) -> None:
    x = torch.empty(COUNT, dtype=dtype, device="npu").exponential_(rate)
    assert x.isfinite().all()
    assert x.min() >= 0
    # 8 random bits make the smallest step and the tail coarse.
    coarse = 0.02 if dtype == torch.bfloat16 else 0.0
    mean = x.cpu().double().mean().item()
    assert abs(mean - 1 / rate) < ERRORS / rate / math.sqrt(COUNT) + coarse
    y = torch_npu.npu_sim_exponential_(torch.empty(COUNT, dtype=dtype, device="npu"), rate)
    assert y.min() > 0
    assert (
        abs(y.cpu().double().mean().item() - 1 / rate) < ERRORS / rate / math.sqrt(COUNT) + coarse
    )


def test_sampling_by_exponential_race_follows_the_probabilities() -> None:
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], device="npu").expand(COUNT, 4)
    q = torch.empty_like(p.contiguous()).exponential_()
    counts = torch.bincount(p.div(q).argmax(-1).cpu(), minlength=4) / COUNT
    assert (counts - p[0].cpu()).abs().max() < ERRORS * 0.5 / math.sqrt(COUNT)


@given(shape=st.sampled_from(SHAPES), dtype=st.sampled_from(FLOATS))
def test_every_shape_can_be_drawn(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for draw in (torch.rand, torch.randn):
        x = draw(shape, dtype=dtype, device="npu")
        assert x.shape == shape
        assert x.isfinite().all()
    strided = torch.zeros(6, 4, dtype=dtype, device="npu")
    strided[:, ::2].uniform_(1, 2)
    assert (strided[:, ::2].cpu() >= 1).all()
    assert (strided[:, 1::2].cpu() == 0).all()


GRAPH_DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "uniform": lambda x: x.uniform_(),
    "normal": lambda x: x.normal_(),
    "random": lambda x: x.random_(0, 1000),
    "exponential": lambda x: x.exponential_(),
    "multinomial": lambda x: x.copy_(torch.multinomial(torch.ones_like(x), 256)),
}


@pytest.mark.parametrize("name", GRAPH_DRAWS)
def test_graph_replays_draw_new_numbers(name: str) -> None:
    static = torch.zeros(256, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        GRAPH_DRAWS[name](static)
    torch.npu.manual_seed(8)
    graph.replay()
    first = static.cpu().clone()
    graph.replay()
    second = static.cpu().clone()
    assert not torch.equal(first, second)
    assert first.unique().numel() > 100
    torch.npu.manual_seed(8)
    graph.replay()
    assert torch.equal(first, static.cpu())
