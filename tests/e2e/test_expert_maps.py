"""Expert maps with replicas: no bit of an answer depends on an expert's slot."""

import json
import re
from pathlib import Path

import pytest

from vllm_davinci_testing.engines.balanced_engines import (
    ALL_TO_ALL,
    BALANCED,
    DP2,
    DUAL,
    EXPERTS,
    GRAPHS,
    TP2,
    answers,
    experts_of,
    started,
)
from vllm_davinci_testing.engines.fixture_types import Zoo
from vllm_davinci_testing.engines.refusals import refusal_of

THOROUGH = pytest.mark.thorough


def map_file(path: Path, places: dict[int, list[list[int]]]) -> str:
    """Writes a map of each layer's experts per rank; returns its path."""
    layers = [
        {
            "layer_id": layer,
            "device_count": len(ranks),
            "device_list": [
                {"device_id": rank, "device_expert": experts} for rank, experts in enumerate(ranks)
            ],
        }
        for layer, ranks in places.items()
    ]
    path.write_text(json.dumps({"moe_layer_count": len(layers), "layer_list": layers}))
    return str(path)


# Ranks have equally many experts; 0 and 1, or 7 and 3, are on both.
PLACES = {0: [[7, 0, 2, 5, 1], [1, 3, 4, 6, 0]], 1: [[3, 2, 1, 0, 7], [4, 7, 5, 6, 3]]}


@pytest.mark.parametrize(
    ("ranks", "options", "additional"),
    [
        pytest.param(TP2, GRAPHS, {"eplb_config": BALANCED}, id="tp2_that_moves", marks=THOROUGH),
        *(
            pytest.param(*each, id=name, marks=THOROUGH)
            for name, each in {
                "tp2": (TP2, {}, {}),
                "dp2": (DP2, GRAPHS, {}),
                "dp2_all_to_all": (DP2, {}, ALL_TO_ALL),
                "dp2_dual": (DP2, {}, {**ALL_TO_ALL, **DUAL}),
            }.items()
        ),
    ],
)
def test_a_map_with_replicas_changes_no_bit_of_an_answer(
    ranks, options, additional, zoo, start_engine, tmp_path
):
    others = {key: value for key, value in additional.items() if key != "eplb_config"}
    model = zoo(EXPERTS)
    with started(start_engine, model, others, **ranks, **options) as engine:
        expected = answers(engine)
        before = experts_of(engine.on_workers("expert_digests"))
    path = map_file(tmp_path / "map.json", PLACES)
    environment = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:7"}
    with started(
        start_engine,
        model,
        {**additional, "expert_map_path": path},
        **ranks,
        **options,
        environment=environment,
    ) as engine:
        placed = [
            [[expert for expert, _ in layer] for layer in rank]
            for rank in engine.on_workers("expert_digests")
        ]
        assert placed == [[PLACES[0][rank], PLACES[1][rank]] for rank in range(2)]
        assert answers(engine) == expected
        assert experts_of(engine.on_workers("expert_digests")) == before


def test_bad_settings_end_the_start_with_the_key(zoo: Zoo, tmp_path: Path):
    path = map_file(tmp_path / "map.json", {**PLACES, 1: [[3, 2, 1, 0, 3], [4, 7, 5, 6, 2]]})
    for additional, told in (
        ({"expert_map_path": path}, "device_id 0, device_expert has expert 3 twice"),
        ({"eplb_config": {**BALANCED, "num_redundant_experts": 3}}, "Possible values of .* 0, 2,"),
    ):
        options = {"additional_config": additional, "enable_expert_parallel": True, **TP2}
        assert re.search(told, refusal_of(zoo(EXPERTS), **options))
