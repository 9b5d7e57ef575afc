"""Every layout of ranks, kind of weights and execution mode gives a single rank's tokens.

`nox -s tests -- -m thorough` and the nightly run them.
"""

import datetime
import math
import random
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from vllm import SamplingParams

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.fp8_checkpoint import deepseek_of_blocks, write_block_fp8
from vllm_davinci_testing.engines.int8_checkpoint import input_ranges
from vllm_davinci_testing.engines.model_zoo import fill_with_normal_weights, write_tokenizer
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
from vllm_davinci_testing.selection import THOROUGH

# Data-parallel ranks, tensor-parallel ranks and stages; at most 8 devices, because the model has
# four heads and four layers.
SIZES = [sizes for sizes in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)) if math.prod(sizes) <= 8]
OF_BLOCKS = {
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "max_position_embeddings": 256,
}
MOST_RANKS = 8  # engines with most ranks take longest, so each kind runs in one mode
KINDS = ("float", "W8A8", "W8A8_DYNAMIC", "fp8")
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graph": {"enforce_eager": False, "max_cudagraph_capture_size": 8},
    "dual": {"additional_config": {"dbo": {**SPLIT_ALWAYS, "split": "token"}}},
}
LENGTHS = (1, 3, 40, 127, 128, 129, 64, 17)
MAX_TOKENS = 12
# Largest difference of two logprobs at which several ranks may choose another token than one rank,
# because they sum in another order: int8 in bfloat16, others in float32.
CLOSE = {"W8A8": 0.3, "W8A8_DYNAMIC": 0.3, "float": 1e-3, "fp8": 1e-3}


class Case(NamedTuple):
    """ranks: numbers of data-parallel ranks, tensor-parallel ranks and pipeline stages"""

    ranks: tuple[int, int, int]
    has_expert_ranks: bool
    kind: str
    way: str

    @property
    def id(self) -> str:
        names = zip(("dp", "tp", "pp"), self.ranks, strict=True)
        layout = "_".join(f"{name}{count}" for name, count in names if count > 1) or "one"
        return f"{layout}{'_ep' if self.has_expert_ranks else ''}-{self.kind}-{self.way}"


def ways_of(ranks: tuple[int, int, int], has_expert_ranks: bool, kind: str) -> list[str]:
    if math.prod(ranks) < MOST_RANKS:
        return list(WAYS)
    turn = SIZES.index(ranks) + KINDS.index(kind) + has_expert_ranks
    return [list(WAYS)[turn % len(WAYS)]]


CASES = [
    Case(ranks, has_expert_ranks, kind, way)
    for ranks, has_expert_ranks, kind in product(SIZES, (False, True), KINDS)
    if not has_expert_ranks or ranks[0] * ranks[1] > 1
    for way in ways_of(ranks, has_expert_ranks, kind)
]


def of_a_day(date: str) -> Case:
    """Selects the two-rank case of a date."""
    short = [case for case in CASES if math.prod(case.ranks) == 2]
    return random.Random(datetime.date.fromisoformat(date).toordinal()).choice(short)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    marks = [pytest.mark.nightly("layouts")]
    option = metafunc.config.getoption
    cases = [of_a_day(datetime.datetime.now(datetime.UTC).date().isoformat())]
    if option("all") or THOROUGH in (option("markexpr") or ""):
        cases, marks = CASES, [pytest.mark.thorough]
    metafunc.parametrize("case", [pytest.param(case, id=case.id, marks=marks) for case in cases])


def prompts() -> list[list[int]]:
    generator = random.Random(7)
    return [[generator.randrange(3, 512) for _ in range(length)] for length in LENGTHS]


PROMPTS = prompts()


@pytest.fixture(scope="module")
def checkpoint(
    tiny_deepseek: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Returns tiny_deepseek in float or int8, or a similar model with block-wise fp8 weights."""

    @cache
    def write(kind: str) -> Path:
        directory = tmp_path_factory.mktemp("layouts")
        if kind == "float":
            return tiny_deepseek
        if kind == "fp8":
            source = directory / "source"
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                config = deepseek_of_blocks(**OF_BLOCKS)
                network = transformers.AutoModelForCausalLM.from_config(config)
                fill_with_normal_weights(network)
            network.save_pretrained(source)
            write_tokenizer(source)
            return write_block_fp8(source, directory / "blocks")
        ranges = {}
        if kind == "W8A8":
            windows = [torch.tensor([prompt]) for prompt in PROMPTS]
            ranges = input_ranges(tiny_deepseek, windows)
        Exporter(tiny_deepseek, directory / kind, kind, torch.bfloat16, ranges).run(lambda _: None)
        return directory / kind

    return write


@pytest.fixture(scope="module")
def outputs_of(checkpoint: Callable[[str], Path], start_engine: Callable[..., Any]) -> Any:
    """Returns a case's outputs, with the likeliest tokens at each position."""

    @cache
    def outputs(case: Case) -> list[Any]:
        dp, tp, pp = case.ranks
        options = {
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
            "enable_expert_parallel": case.has_expert_ranks,
            "dtype": "float32" if case.kind in ("float", "fp8") else "bfloat16",
            "max_num_batched_tokens": 160,  # more than the longest prompt, fewer than all prompts
            **WAYS[case.way],
            **({"distributed_executor_backend": "mp"} if tp * pp > 1 else {}),
        }
        sampling = SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=20
        )
        with DPEngines(start_engine, checkpoint(case.kind), dp, **options) as engines:
            return engines.generate(PROMPTS, sampling)

    return outputs


def test_tokens_equal_those_of_one_rank(case, outputs_of):
    expected = outputs_of(Case((1, 1, 1), False, case.kind, "eager"))
    outputs = outputs_of(case)
    num_equal = 0
    for one, several in zip(expected, outputs, strict=True):
        own, others = one.outputs[0], list(several.outputs[0].token_ids)
        assert len(own.token_ids) == len(others) == MAX_TOKENS
        places = [at for at, token in enumerate(own.token_ids) if token != others[at]]
        if not places:
            num_equal += 1
            continue
        likely = own.logprobs[places[0]]
        assert others[places[0]] in likely, (case.id, places[0], others, own.token_ids)
        gap = likely[own.token_ids[places[0]]].logprob - likely[others[places[0]]].logprob
        assert gap < CLOSE[case.kind], (case.id, places[0], gap)
    assert num_equal >= len(PROMPTS) // 2, (case.id, num_equal)
