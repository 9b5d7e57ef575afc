"""Adapters through the whole stack: peft's tokens, and requests do not affect each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from vllm_davinci_testing.engines import adapters
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.fixture_types import Prompts, Reference, StartEngine, Zoo
from vllm_davinci_testing.engines.generating import as_inputs
from vllm_davinci_testing.engines.graph_settings import decode_graphs
from vllm_davinci_testing.engines.transformers_reference import TransformersReference
from vllm_davinci_testing.engines.unfit_adapters import UNFIT

MODEL = "llama_head64_gqa4"  # with separate weights for embeddings and head
RANKS = {"rank8": 8, "rank16": 16, "rank32": 32, "rank64": 64}
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=5)
LORA: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 5,
    "max_lora_rank": 64,
    "max_num_seqs": 16,
    "worker_extension_cls": "vllm_davinci_testing.engines.adapter_worker.AdapterWorker",
}
GRAPHS = decode_graphs(2, 8, 16)


@pytest.fixture(scope="module")
def written(
    reference: Callable[[str], TransformersReference], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Writes, by name, an adapter of every layer for each LoRA rank, and one with zero deltas."""
    directory = tmp_path_factory.mktemp("adapters")
    network = reference(MODEL).network
    made = {
        name: adapters.write_adapter(
            network, directory / name, rank, seed=rank, targets=adapters.EVERYWHERE
        )
        for name, rank in RANKS.items()
    }
    made["zero"] = adapters.write_adapter(network, directory / "zero", 8, seed=1, strength=0.0)
    return made


@pytest.fixture(scope="module")
def requests(written: dict[str, Path]) -> dict[str, LoRARequest]:
    return {
        name: LoRARequest(name, number, str(path))
        for number, (name, path) in enumerate(written.items(), start=1)
    }


@pytest.fixture(scope="module")
def differences(
    written: dict[str, Path], requests: dict[str, LoRARequest], reference: Reference
) -> Callable[..., Any]:
    """Generates with one adapter (or None) per prompt; describes differences from transformers'
    tokens.
    """

    def found(engine: EngineProcess, names: list[str | None], prompts: Prompts) -> Any:
        asked = [requests.get(name) for name in names]
        outputs = engine.generate(as_inputs(prompts), GREEDY, lora_request=asked)
        of_request = [written.get(name) for name in names]
        return adapters.first_differences(reference(MODEL), of_request, prompts, outputs)

    return found


@pytest.fixture(scope="module")
def engine(zoo: Callable[[str], Path], start_engine: Callable[..., EngineProcess]) -> EngineProcess:
    """An engine with captured graphs, asynchronous scheduling, prefix cache and chunked prefill."""
    return start_engine(zoo(MODEL), disable_log_stats=False, **LORA, **GRAPHS)


def numbers(output: Any) -> list[tuple[int, dict[int, float]]]:
    """Returns a request's tokens, and the exact logprobs of the five likeliest."""
    completion = output.outputs[0]
    return [
        (token, {each: value.logprob for each, value in of_token.items()})
        for token, of_token in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def test_tokens_of_mixed_batches_equal_those_of_peft(engine, written, requests, reference, prompts):
    names = [None, *requests]
    asked = [name for name in names for _ in range(4)]
    # the same prompts for each adapter; two are longer than a cache block
    given = prompts[3:7] * len(names)
    outputs = engine.generate(
        as_inputs(given), GREEDY, lora_request=[requests.get(name) for name in asked]
    )
    of_request = [written.get(name) for name in asked]
    assert not adapters.first_differences(
        reference(MODEL), of_request, given, outputs, under=adapters.through_peft
    )
    texts = {tuple(output.outputs[0].token_ids) for output in outputs}
    assert len(texts) > 16  # the zero adapter gives the base model's texts


def test_mixed_batches_equal_single_requests_bit_for_bit(engine, requests, prompts):
    names = [None, *requests]
    given = [prompts[10 + index] for index in range(len(names))]
    of_request = [requests.get(name) for name in names]
    mixed = engine.generate(as_inputs(given), GREEDY, lora_request=of_request)
    single = [
        engine.generate(as_inputs([prompt]), GREEDY, lora_request=adapter)[0]
        for prompt, adapter in zip(given, of_request, strict=True)
    ]
    assert [numbers(each) for each in mixed] == [numbers(each) for each in single]


def test_base_requests_and_a_zero_adapter_equal_an_engine_without_lora(
    engine, zoo, start_engine, requests, prompts
):
    given = prompts[20:24]
    with start_engine(zoo(MODEL), max_num_seqs=16, **GRAPHS) as plain:
        expected = [numbers(each) for each in plain.generate(as_inputs(given), GREEDY)]
    beside = [requests["rank64"]] * 4
    outputs = engine.generate(
        as_inputs(given * 3), GREEDY, lora_request=[None] * 4 + [requests["zero"]] * 4 + beside
    )
    found = [numbers(each) for each in outputs]
    assert found[:4] == expected
    assert found[4:8] == expected
    assert found[8:] != expected


def test_logprobs_of_prompts_are_those_under_the_adapter(
    engine, written, requests, reference, prompts
):
    names = [None, "rank8", "rank64", None]
    given = [prompts[40 + index] for index in range(len(names))]
    asked = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    outputs = engine.generate(
        as_inputs(given), asked, lora_request=[requests.get(name) for name in names]
    )
    for name, prompt, output in zip(names, given, outputs, strict=True):
        with adapters.adapted(reference(MODEL).network, written.get(name)):
            expected = reference(MODEL).logprobs(prompt)
        for row, token, of_token in zip(
            expected, prompt[1:], output.prompt_logprobs[1:], strict=False
        ):
            assert of_token[token].logprob == pytest.approx(float(row[token]), abs=2e-4), name


def test_every_tensor_of_an_adapter_is_in_its_slot(engine, written, requests):
    name = "rank16"
    engine.generate(as_inputs([[1, 2, 3]]), GREEDY, lora_request=requests[name])
    (layers,) = engine.on_workers("layers_with", requests[name].lora_int_id)
    assert sorted(layers) == sorted(adapters.layer_names(written[name]))


def test_cached_prefixes_equal_those_of_the_same_adapter(engine, differences):
    prompt = [*range(60, 200)]  # longer than a cache block; no other test uses it
    hits = []
    for name in ("rank8", "rank64", None, "rank8", None):
        before = engine.metrics()["vllm:prefix_cache_hits"]
        assert not differences(engine, [name], [prompt])
        hits.append(engine.metrics()["vllm:prefix_cache_hits"] - before)
    assert hits == [0, 0, 0, 128, 128]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("of_graphs", "of_adapters"),
    [({"cudagraph_specialize_lora": False}, {}), ({}, {"specialize_active_lora": True})],
    ids=["not_specialized", "by_number_of_adapters"],
)
def test_graphs_of_any_specialization_give_the_same_numbers(
    engine, zoo, start_engine, requests, prompts, of_graphs, of_adapters
):
    graphs = {**GRAPHS, "compilation_config": {**GRAPHS["compilation_config"], **of_graphs}}
    names = [None, *requests]
    given = as_inputs(prompts[12 : 12 + len(names)])
    asked = [requests.get(name) for name in names]
    with start_engine(zoo(MODEL), **LORA, **graphs, **of_adapters) as other:
        for count in (len(names), 1, 2):
            expected = engine.generate(given[:count], GREEDY, lora_request=asked[:count])
            found = other.generate(given[:count], GREEDY, lora_request=asked[:count])
            assert [numbers(each) for each in found] == [numbers(each) for each in expected]


def test_more_adapters_than_slots_on_two_ranks(zoo, start_engine, differences, prompts):
    names = [None, *RANKS, "zero"] * 2
    given = [prompts[30 + index % 3] for index in range(len(names))]
    options = {**LORA, "max_loras": 2, "max_cpu_loras": 3, "tensor_parallel_size": 2}
    with start_engine(zoo(MODEL), **options) as engine:
        assert not differences(engine, names, given)
        slots = engine.on_workers("slots")
        layers = engine.on_workers("wrapped_layers")
    assert slots[0] == slots[1]
    assert layers[0] == layers[1]


def test_no_step_races_and_none_waits_under_a_fuzzed_schedule(
    zoo: Zoo, start_engine: StartEngine, differences: Callable[..., Any], prompts: Prompts
):
    names = [None, "rank8", "rank64", "rank32"] * 2
    given = [prompts[50 + index] for index in range(len(names))]
    checked = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:3"}
    with start_engine(zoo(MODEL), environment=checked, **{**LORA, "max_loras": 2}) as engine:
        assert not differences(engine, names, given)


# --- adapters that do not fit ---------------------------------------------------------------------


@pytest.mark.parametrize(("write", "told"), UNFIT)
def test_an_adapter_that_does_not_fit_is_named_and_the_engine_continues(
    engine, written, requests, tmp_path, write, told
):
    write(tmp_path, written["rank8"])
    engine.generate(as_inputs([[1, 2, 3]]), GREEDY, lora_request=requests["rank8"])
    with pytest.raises(EngineError, match=told):
        engine.add_lora(LoRARequest("wrong", 99, str(tmp_path)))
    outputs = engine.generate(as_inputs([[1, 2, 3]]), GREEDY, lora_request=requests["rank8"])
    assert len(outputs[0].outputs[0].token_ids) == MAX_TOKENS
