"""Model-based drafters change no token: MTP, EAGLE, EAGLE-3, a draft model.

Asynchronous scheduling, the default, prepares a step before the host knows which drafts were
accepted.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from vllm_davinci.core.features.speculation import MTP_SERVED
from vllm_davinci_testing.engines.drafters import KNOWING, TEXTS, WRONG
from vllm_davinci_testing.engines.eagle_checkpoint import random_eagle, random_eagle3
from vllm_davinci_testing.engines.fixture_types import Engines
from vllm_davinci_testing.engines.mtp_checkpoint import with_copied_mtp, with_random_mtp
from vllm_davinci_testing.engines.mtp_families import FAMILIES, write_mtp_family
from vllm_davinci_testing.engines.rotated_checkpoint import rotated
from vllm_davinci_testing.engines.speculating import (
    RACES,
    REQUESTS,
    SMALL,
    first_wrong,
    generate,
    speculation,
    texts,
    told,
    with_logprobs,
    write_texts,
)
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

pytestmark = pytest.mark.nightly("layouts")

THOROUGH = pytest.mark.thorough
GRAPHS = {"enforce_eager": False}
# Another plugin's option, which the drafter's configuration inherits.
SIZES = {
    "additional_config": {"torchair_graph_config": {"enabled": True, "graph_batch_sizes": [4]}}
}
SYNCHRONOUS = {"async_scheduling": False}
TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
CHUNKS = {"max_num_batched_tokens": 48}
# Too few for all requests: some are preempted.
FEW_BLOCKS = {"num_gpu_blocks_override": 8, "enable_prefix_caching": True}


# Models with sparse attention.
SPARSE, SHARED = "deepseek_v32", "glm_dsa_shared"


@pytest.fixture(scope="module")
def with_mtp(
    tiny_deepseek: Path, zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Returns a model of the zoo, or tiny_deepseek, with a random MTP layer."""

    @cache
    def write(name: str) -> Path:
        source = tiny_deepseek if name == "tiny_deepseek" else zoo(name)
        return with_random_mtp(source, tmp_path_factory.mktemp("mtp") / name)

    return write


@pytest.fixture(scope="module")
def mtp(with_mtp: Callable[[str], Path]) -> Path:
    return with_mtp("tiny_deepseek")


@pytest.fixture(scope="module")
def modules(tiny_deepseek: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_copied_mtp(tiny_deepseek, tmp_path_factory.mktemp("modules") / "it", count=3)


@pytest.mark.parametrize(
    ("model", "count", "options"),
    [
        *(
            pytest.param("tiny_deepseek", count, options, id=name, marks=THOROUGH)
            for name, count, options in (
                ("1", 1, {}),
                ("2_sync", 2, SYNCHRONOUS),
                ("4_chunked", 4, CHUNKS),
                ("3_few_blocks", 3, FEW_BLOCKS),
                ("2_tp2_graphs", 2, {**TP2, **GRAPHS, **SIZES}),
                ("2_ep2", 2, {**TP2, "enable_expert_parallel": True}),
            )
        ),
        pytest.param("tiny_deepseek", 3, GRAPHS, id="3_graphs"),
        pytest.param(SHARED, 3, GRAPHS, id="shared_3_graphs"),
        *(
            pytest.param(SPARSE, count, options, id=f"sparse_{name}", marks=THOROUGH)
            for name, count, options in (
                ("1_graphs", 1, GRAPHS),
                ("2_sync", 2, SYNCHRONOUS),
                ("4_chunked", 4, CHUNKS),
                ("3_few_blocks", 3, FEW_BLOCKS),
                ("2_tp2_graphs", 2, {**TP2, **GRAPHS}),
            )
        ),
    ],
)
def test_mtp_changes_no_token(model, count, options, drafting_engine, with_mtp):
    with drafting_engine(with_mtp(model), {**speculation("mtp", count), **options}) as engine:
        is_async = engine.scheduler_settings()["async_scheduling"]
        assert is_async == options.get("async_scheduling", True)
        drafted, accepted = told(engine)
        replays = engine.on_workers("graph_replays")[0]
        of_drafter = engine.on_workers("draft_replays")[0]
    print(f"{model}: {accepted} of {drafted} drafts accepted")
    assert bool(of_drafter) == bool(replays)
    assert 0 < accepted < drafted
    assert bool(replays) == (not options.get("enforce_eager", True))
    assert all(tokens % (1 + count) == 0 for tokens in replays)


@THOROUGH
def test_drafts_of_one_who_knows_are_all_accepted_by_sparse_attention(
    drafting_engine, undrafted, with_mtp, tmp_path
):
    known = write_texts(tmp_path / "texts.json", undrafted(with_mtp(SHARED)))
    asked = {**speculation("custom_class", 3, model=KNOWING), **GRAPHS}
    with drafting_engine(with_mtp(SHARED), asked, **{TEXTS: str(known)}) as engine:
        drafted, accepted = told(engine)
    assert drafted == accepted > 200


@THOROUGH
@pytest.mark.parametrize(
    ("method", "options"), [("ngram", {"prompt_lookup_min": 1}), ("custom_class", {"model": WRONG})]
)
def test_drafts_out_of_the_text_change_no_token_of_sparse_attention(
    method, options, drafting_engine, with_mtp
):
    asked = {**speculation(method, 3, **options), **GRAPHS}
    with drafting_engine(with_mtp(SPARSE), asked) as engine:
        assert told(engine)[0] > 30


@pytest.mark.parametrize(
    ("count", "options"),
    [
        pytest.param(3, GRAPHS, id="3_graphs"),
        pytest.param(2, SYNCHRONOUS, id="2_sync", marks=THOROUGH),
        pytest.param(3, CHUNKS, id="3_chunked", marks=THOROUGH),
        pytest.param(3, FEW_BLOCKS, id="3_few_blocks", marks=THOROUGH),
        pytest.param(2, {**TP2, **GRAPHS}, id="2_tp2_graphs", marks=THOROUGH),
    ],
)
def test_mtp_of_several_modules_changes_no_token(count, options, drafting_engine, modules, mtp):
    asked = {**speculation("mtp", count), **options}
    with drafting_engine(modules, asked, plain=mtp) as engine:
        drafted, accepted = told(engine)
        by_place = engine.metric_vectors()["vllm:spec_decode_num_accepted_tokens_per_pos"]
        of_drafter = engine.on_workers("draft_replays")[0]
    # As measured for one MTP layer that runs three times.
    rates = [count * each / drafted for each in by_place]
    print(f"{accepted} of {drafted} drafts accepted, by place {rates}")
    assert all(rate > bound for rate, bound in zip(rates, (0.65, 0.45, 0.35), strict=False))
    assert bool(of_drafter) == (not options.get("enforce_eager", True))


@pytest.mark.parametrize(
    ("method", "count", "options"),
    [
        pytest.param("eagle3", 1, {}, id="eagle3_1", marks=THOROUGH),
        pytest.param("eagle3", 3, GRAPHS, id="eagle3_3_graphs"),
        pytest.param("eagle3", 4, SYNCHRONOUS, id="eagle3_4_sync", marks=THOROUGH),
        pytest.param("eagle3", 2, TP2, id="eagle3_2_tp2", marks=THOROUGH),
        pytest.param("eagle", 2, GRAPHS, id="eagle_2_graphs", marks=THOROUGH),
        pytest.param(
            "eagle3",
            2,
            {"disable_padded_drafter_batch": True},
            id="eagle3_2_unpadded",
            marks=THOROUGH,
        ),
    ],
)
def test_heads_change_no_token(method, count, options, drafting_engine, tiny_llama, tmp_path):
    write = random_eagle3 if method == "eagle3" else random_eagle
    head = write(tiny_llama, tmp_path / "head")
    options = dict(options)
    padded = {k: options.pop(k) for k in ("disable_padded_drafter_batch",) if k in options}
    asked = {**speculation(method, count, model=str(head), **padded), **options}
    with drafting_engine(tiny_llama, asked) as engine:
        # With one draft per step, 381 tokens get at most one draft each.
        assert told(engine)[0] > min(500, 300 * count)
        replayed = sum(engine.on_workers("draft_replays")[0].values())
    # A decode step replays each draft pass.
    assert replayed > 10 * count if options == GRAPHS else not replayed


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(GRAPHS, id="graphs"),
        pytest.param(SYNCHRONOUS, id="sync", marks=THOROUGH),
        pytest.param(FEW_BLOCKS, id="few_blocks", marks=THOROUGH),
        pytest.param(TP2, id="tp2", marks=THOROUGH),
    ],
)
def test_all_drafts_of_the_model_itself_are_accepted(options, drafting_engine, tiny_llama):
    draft = {"model": str(tiny_llama)}
    if "tensor_parallel_size" in options:
        draft["draft_tensor_parallel_size"] = options["tensor_parallel_size"]
    asked = {**speculation("draft_model", 3, **draft), **options}
    with drafting_engine(tiny_llama, asked) as engine:
        drafted, accepted = told(engine)
        of_drafter = engine.on_workers("draft_replays")[0]
    assert drafted == accepted > 200
    assert bool(of_drafter) == (options == GRAPHS)


@pytest.mark.parametrize(
    ("target", "method", "draft", "least", "bounds"),
    [
        # Measured acceptance: mtp 0.60, by position 0.73, 0.59, 0.47; eagle3 0.26, by position
        # 0.47, 0.20, 0.10.
        pytest.param("tiny_deepseek", "mtp", None, 0.5, (0.65, 0.5, 0.4), id="mtp"),
        pytest.param(
            *("tiny_llama", "eagle3", "tiny_llama_eagle3", 0.2, (0.4, 0.15, 0.06)),
            id="eagle3",
            marks=THOROUGH,
        ),
    ],
)
def test_trained_drafters_are_accepted_as_often_as_measured(
    target, method, draft, least, bounds, repository, start_engine
):
    checkpoints = repository / "checkpoints"
    head = {} if draft is None else {"model": str(checkpoints / draft)}
    with start_engine(checkpoints / target, **speculation(method, 3, **head)) as engine:
        generate(engine)
        drafted, accepted = told(engine)
        by_place = engine.metric_vectors()["vllm:spec_decode_num_accepted_tokens_per_pos"]
    rates = [3 * count / drafted for count in by_place]
    print(f"{method} of {target}: {accepted} of {drafted} drafts accepted, by place {rates}")
    assert least < accepted / drafted < 1
    assert sum(by_place) == accepted
    assert all(rate > bound for rate, bound in zip(rates, bounds, strict=True))


@THOROUGH
def test_a_rotated_model_is_drafted_for_as_well_as_before(start_engine, tiny_deepseek, tmp_path):
    """The drafter reverses the rotation of the hidden states (QuaRot)."""
    plain = {"dtype": "bfloat16"}
    described = {**plain, "quantization": "ascend"}
    turned = rotated(tiny_deepseek, tmp_path / "turned")
    with start_engine(turned, **SMALL, **described) as engine:
        expected = with_logprobs(engine)
    rates = []
    for checkpoint, options in ((tiny_deepseek, plain), (turned, described)):
        asked = {**speculation("mtp", 3), **options, "enforce_eager": False}
        with start_engine(checkpoint, environment=RACES, **asked) as engine:
            tokens = generate(engine)
            drafted, accepted = told(engine)
        print(f"{checkpoint.name}: {accepted} of {drafted} drafts accepted")
        rates.append(accepted / drafted)
    assert not first_wrong(expected, tokens)
    assert rates[1] > rates[0] - 0.1


@THOROUGH
def test_in_16_bits_every_token_is_the_greatest_as_far_as_rounding_tells(
    tiny_deepseek, start_engine
):
    """Runs on a chip that accepts only documented calls.

    Verifying several rows changes the order of sums, so texts may differ where 16-bit rounding
    decides between two tokens.
    """
    options = {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "environment": {**RACES, "VNPU_SOC": "Ascend910B3"},
    }
    with start_engine(tiny_deepseek, **SMALL, **options) as engine:
        plain = generate(engine)
    with start_engine(tiny_deepseek, **speculation("mtp", 3), **options) as engine:
        found = generate(engine)
        drafted, accepted = told(engine)
    others = sum(one != other for one, other in zip(plain, found, strict=True))
    print(f"{others} of {REQUESTS} texts go on otherwise; {accepted} of {drafted} drafts")
    assert 0 < accepted < drafted
    reference = TransformersReference(tiny_deepseek)
    for outputs in (plain, found):
        for text, tokens in zip(texts(), outputs, strict=True):
            prompt = text["prompt_token_ids"]
            assert reference.first_difference(prompt, tokens, dtype=torch.bfloat16) is None


# MTP layers of every supported family: drafts change no token.

DEFAULT = "Glm4MoeMTPModel"
# Their vLLM definitions wait for the device in each pass, which prevents a capture.
WAIT = {"ErnieMTPModel", "HYV3MTPModel"}


def test_every_family_has_a_case():
    # tested in test_speculation_models.py, test_{compressed,pooled}_attention.py
    elsewhere = {"DeepSeekMTPModel", "DeepseekV32MTPModel", "DeepSeekV4MTPModel"}
    elsewhere |= {"Glm5NextMTPModel"}
    assert {*FAMILIES} | elsewhere == {*MTP_SERVED}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == DEFAULT else [pytest.mark.thorough])
        for name in FAMILIES
    ],
)
def test_mtp_of_a_family_changes_no_token(name: str, drafting_engine: Engines, tmp_path: Path):
    checkpoint = write_mtp_family(name, tmp_path / "model")
    for options in ({}, GRAPHS):
        with drafting_engine(checkpoint, {**speculation("mtp", 2), **options}) as engine:
            drafted, accepted = told(engine)
            replays = engine.on_workers("draft_replays")[0]
        print(f"{name}: {accepted} of {drafted}")
        assert drafted > 500
        assert 0 < accepted < drafted
        assert bool(replays) == (bool(options) and name not in WAIT)
