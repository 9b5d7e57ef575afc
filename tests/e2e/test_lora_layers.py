"""Adapters of MLA, routed experts and int8 layers, in every layout of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines import adapters
from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.engine_process import EngineError
from vllm_davinci_testing.engines.fixture_types import Prompts, Reference, StartEngine, Zoo
from vllm_davinci_testing.engines.graph_settings import decode_graphs
from vllm_davinci_testing.engines.int8_checkpoint import input_ranges
from vllm_davinci_testing.engines.integer_reference import IntegerReference
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

pytestmark = pytest.mark.nightly("layouts")

EXPERTS, MLA = "qwen3_moe_softmax_top2_of_8", "deepseek_v3_moe"
WITHOUT_COMPRESSED_QUERIES = "deepseek_v2_moe"
LAYERS = r"self_attn\..*proj|mlp\..*proj$|mlp\.gate$"
WITHOUT_EXPERTS = r"self_attn\..*proj|mlp\.(shared_experts\.)?(gate|up|down)_proj$|mlp\.gate$"
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
LORA: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 3,
    "max_lora_rank": 16,
    "max_num_seqs": 16,
    "enable_prefix_caching": False,  # hits would change the order of attention's sums
    "worker_extension_cls": "vllm_davinci_testing.engines.adapter_worker.AdapterWorker",
}
# Chunked prompts: queries attend to keys expanded from the cache.
CHUNKS = {"max_num_batched_tokens": 64}
GRAPHS = decode_graphs(4, 16)
RACES = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:11"}
TP2, EP = {"tensor_parallel_size": 2}, {"enable_expert_parallel": True}
ONE_KEY_HEAD = "qwen3_norm_head64_gqa8_tied"
UBATCHES = {"additional_config": {"dbo": {**SPLIT_ALWAYS, "split": "request"}}}


def divided(ranks: int) -> dict[str, Any]:
    """Returns options of context parallelism with an interleave size of 16 tokens."""
    return {"decode_context_parallel_size": ranks, "cp_kv_cache_interleave_size": 16}


def numbers(output: Any) -> list[Any]:
    """Returns a request's tokens and exact logprobs."""
    completion = output.outputs[0]
    of_tokens = [{t: p.logprob for t, p in each.items()} for each in completion.logprobs]
    return list(zip(completion.token_ids, of_tokens, strict=True))


def assert_all_in_slots(answers: list[list[str]], path: Path) -> None:
    """Asserts that the ranks' slots hold every tensor of the adapter, and no others."""
    assert set().union(*map(set, answers)) == adapters.layer_names(path)


def of_expert(directory: Path, rows: int = 96) -> Path:
    """Writes an adapter for one expert of EXPERTS; its up_proj has 96 rows."""
    name = "base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_{}.weight"
    pair = {name.format("A"): torch.ones(8, 128), name.format("B"): torch.ones(rows, 8)}
    adapters.write_files(directory, pair, {"r": 8, "target_modules": ["up_proj"]})
    return directory


@pytest.mark.parametrize(
    ("model", "dp_ranks", "options", "environment"),
    [
        pytest.param(MLA, 1, {**CHUNKS, **GRAPHS}, RACES, id="mla_graphs_races"),
        pytest.param(EXPERTS, 2, {**EP, **GRAPHS}, {}, id="attention_dp2_ep2_graphs"),
        pytest.param(
            MLA,
            1,
            {**TP2, **UBATCHES, **CHUNKS, **GRAPHS},
            RACES,
            id="mla_tp2_ubatches_graphs_races",
            marks=pytest.mark.thorough,
        ),
        *(
            pytest.param(*case, {}, id=name, marks=pytest.mark.thorough)
            for name, case in {
                "mla_tp2_ep2": (MLA, 1, {**TP2, **EP, **CHUNKS}),
                "mla_tp2": (MLA, 1, {**TP2, **GRAPHS}),
                "mla_without_compressed_queries": (WITHOUT_COMPRESSED_QUERIES, 1, CHUNKS),
                "mla_dp2_ep2": (MLA, 2, EP),
                "mla_contexts_of_two_ranks": (MLA, 1, {**TP2, **divided(2), **CHUNKS, **GRAPHS}),
                "contexts_of_two_ranks": (ONE_KEY_HEAD, 1, {**TP2, **divided(2), **CHUNKS}),
                "contexts_of_four_ranks": (
                    *(ONE_KEY_HEAD, 1),
                    {"tensor_parallel_size": 4, **divided(4), **CHUNKS, **GRAPHS},
                ),
                "experts_pp2": (EXPERTS, 1, {"pipeline_parallel_size": 2}),
                "experts_tp2_ubatches": (EXPERTS, 1, {**TP2, **UBATCHES}),
            }.items()
        ),
    ],
)
def test_tokens_equal_those_of_transformers(
    zoo, start_engine, reference, prompts, tmp_path, model, dp_ranks, options, environment
):
    network = reference(model).network
    targets = LAYERS if dp_ranks == 1 else WITHOUT_EXPERTS
    first, second = (
        adapters.write_adapter(network, tmp_path / str(rank), rank, seed=rank, targets=targets)
        for rank in (8, 16)
    )
    given = [prompts[5], *prompts[10:13]] * 3
    paths = [None] * 4 + [first] * 4 + [second] * 4
    requests = {
        first: LoRARequest("first", 1, str(first)),
        second: LoRARequest("2", 2, str(second)),
    }
    asked = [path and requests[path] for path in paths]
    if dp_ranks > 1:  # only every second prompt has an adapter, so one DP rank has none
        paths = [path if number % 2 else None for number, path in enumerate(paths)]
        asked = [path and requests[path] for path in paths]
    with DPEngines(
        start_engine, zoo(model), dp_ranks, environment, **{**LORA, **options}
    ) as engine:
        outputs = engine.generate(given, GREEDY, adapters=asked)
        owners = engine.engines[-1]
        for path, request in requests.items():
            assert_all_in_slots(owners.on_workers("layers_with", request.lora_int_id), path)
        if dp_ranks > 1:
            with pytest.raises(EngineError, match=r"experts\.3\.up_proj"):
                owners.add_lora(LoRARequest("experts", 9, str(of_expert(tmp_path / "experts"))))
        if UBATCHES.items() <= options.items():
            assert owners.on_workers("overlap_decisions")[0]["split"] > 2
        alone = engine.generate(given[:4], GREEDY, adapters=[None] * 4) if dp_ranks == 1 else []
    assert not adapters.first_differences(reference(model), paths, given, outputs)
    # With one key head, other requests of a step change how a context is merged and rounded.
    if model != ONE_KEY_HEAD:
        assert [numbers(each) for each in outputs[:4] if alone] == [numbers(each) for each in alone]


@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", pytest.param("W8A8", marks=pytest.mark.thorough)])
def test_int8_layers_get_deltas_of_their_float_inputs(
    tiny_deepseek: Path, start_engine: StartEngine, prompts: Prompts, tmp_path: Path, kind: str
):
    model = tmp_path / kind
    text = [*range(40, 90)] * 4
    ranges = input_ranges(tiny_deepseek, [torch.tensor([text])])
    Exporter(tiny_deepseek, model, kind, torch.bfloat16, ranges).run(lambda _: None)
    floats = TransformersReference(tiny_deepseek).network
    path, zero = (
        adapters.write_adapter(
            floats, tmp_path / str(strength), 16, seed=3, targets=LAYERS, strength=strength
        )
        for strength in (adapters.STRENGTH, 0.0)
    )
    given = prompts[6:10]
    request, nothing = LoRARequest("adapter", 1, str(path)), LoRARequest("zero", 2, str(zero))
    with start_engine(model, dtype="bfloat16", **LORA) as engine:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in given * 3],
            GREEDY,
            lora_request=[None] * 4 + [request] * 4 + [nothing] * 4,
        )
        assert_all_in_slots(engine.on_workers("layers_with", 1), path)
        alone = engine.generate([{"prompt_token_ids": prompt} for prompt in given], GREEDY)
    base, adapted, with_zero = ([*map(numbers, outputs[i : i + 4])] for i in (0, 4, 8))
    assert base == [*map(numbers, alone)] == with_zero
    assert adapted != base
    reference = IntegerReference(model)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    with adapters.adapted(reference.network, path):
        close, wrong = reference.differing_tokens(given, tokens[4:8])
    assert wrong == 0, (close, wrong)
    assert close <= 6  # of 64


def test_experts_that_an_adapter_leaves_alone_stay_the_base(
    zoo: Zoo, start_engine: StartEngine, reference: Reference, prompts: Prompts, tmp_path: Path
):
    some = adapters.write_adapter(
        reference(EXPERTS).network,
        tmp_path / "some",
        8,
        seed=4,
        targets=r"experts\.[13]\.down_proj$|experts\.5\.gate_proj$",
    )
    wrong = of_expert(tmp_path / "wrong", 95)
    with start_engine(zoo(EXPERTS), **LORA) as engine:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts[3:7]],
            GREEDY,
            lora_request=[LoRARequest("some", 1, str(some))] * 4,
        )
        assert_all_in_slots(engine.on_workers("layers_with", 1), some)
        with pytest.raises(EngineError, match=r"experts\.3\.up_proj: shapes .* \[96, rank\]"):
            engine.add_lora(LoRARequest("wrong", 2, str(wrong)))
    assert not adapters.first_differences(reference(EXPERTS), [some] * 4, prompts[3:7], outputs)


def test_experts_out_of_order_do_not_support_adapters(zoo, start_engine, tmp_path):
    places = [
        {
            "layer_id": layer,
            "device_count": 2,
            "device_list": [
                {"device_id": rank, "device_expert": experts}
                for rank, experts in enumerate(([7, 6, 5, 4], [3, 2, 1, 0]))
            ],
        }
        for layer in range(2)
    ]
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"moe_layer_count": 2, "layer_list": places}))
    placed = {**TP2, **EP, "additional_config": {"expert_map_path": str(path)}}
    with start_engine(zoo(EXPERTS), **{**LORA, **placed}) as engine:
        request = LoRARequest("experts", 9, str(of_expert(tmp_path / "experts")))
        with pytest.raises(EngineError, match=r"experts\.3\.up_proj"):
            engine.add_lora(request)
        assert "experts are not in order" in engine.log_text()
