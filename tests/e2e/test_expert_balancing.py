"""Expert balancing: no bit of an answer depends on an expert's slot, or on when it moved.

Without exchange, and with all-gather, each rank sums its experts' results and the ranks' sums are
added. Moves then change the order of sums with more than two terms, and of all sums in 16 bits;
there tokens are compared in fp32. The other dispatch methods sum on the token's rank.

Answers, with logprobs, equal those of an engine whose experts stay; each slot's tensors after the
moves equal its expert's before. Virtual NPUs execute streams in a random order permitted by their
events, with the race detector on.
"""

import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines.balanced_engines import (
    ALL_TO_ALL,
    BALANCED,
    DP2,
    DP2TP2,
    DUAL,
    EXPERTS,
    GRAPHS,
    TP2,
    TP4,
    V3,
    WIDE,
    answers,
    experts_of,
    skewed,
    started,
)
from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.server_process import SMALL, ForkedServer

pytestmark = pytest.mark.nightly("layouts")

STATES = "qwen3_next_moe"
INT8 = {"int8_wide": WIDE, "int8_v3": V3}
SUMS_OF_MANY = (V3, "int8_v3", STATES)  # four experts per token, or shared experts
REPLICAS = {**BALANCED, "num_redundant_experts": 2}
ASYNC = {**REPLICAS, "use_async": True}

# model, ranks, engine options, additional_config, eplb_config
CASES = {"dp2_async_graphs": (EXPERTS, DP2, GRAPHS, {}, ASYNC)}
THOROUGH_CASES = {
    "tp2": (EXPERTS, TP2, {}, {}, REPLICAS),
    "int8_tp2_dual": ("int8_wide", TP2, {}, {**ALL_TO_ALL, **DUAL}, REPLICAS),
    "tp2_no_replicas": (EXPERTS, TP2, {}, {}, BALANCED),
    "tp2_async": (EXPERTS, TP2, {}, {}, ASYNC),
    "tp2_hosts": (EXPERTS, TP2, {}, {}, {**REPLICAS, "communicator": "torch_gloo"}),
    "tp4_graphs": (EXPERTS, TP4, GRAPHS, {}, {**REPLICAS, "num_redundant_experts": 8}),
    "tp2_dual_graphs": (EXPERTS, TP2, GRAPHS, DUAL, ASYNC),
    "tp2_pieces": (EXPERTS, TP2, {}, {"expert_piece_tokens": 16}, REPLICAS),
    "states_tp2": (STATES, TP2, {}, {}, REPLICAS),
    "states_dp2": (STATES, DP2, GRAPHS, {}, ASYNC),
    "v3_tp2": (V3, TP2, {}, {}, REPLICAS),
    "v3_tp2_all_to_all": (V3, TP2, {}, ALL_TO_ALL, REPLICAS),
    "v3_dp2tp2": (V3, DP2TP2, {}, ALL_TO_ALL, {**ASYNC, "num_redundant_experts": 4}),
    "v3_multistream": (
        V3,
        TP2,
        GRAPHS,
        {"torchair_graph_config": {"enable_multistream_moe": True, "enable_multistream_mla": True}},
        REPLICAS,
    ),
    "dp2": (EXPERTS, DP2, {}, {}, REPLICAS),
    "dp2_all_to_all": (EXPERTS, DP2, {}, ALL_TO_ALL, REPLICAS),
    "dp2_dual": (EXPERTS, DP2, {}, {**ALL_TO_ALL, **DUAL}, REPLICAS),
    "dp2_fused": (WIDE, DP2, GRAPHS, {"moe_communication": "fused"}, REPLICAS),
    "dp2tp2": (EXPERTS, DP2TP2, GRAPHS, {}, {**REPLICAS, "num_redundant_experts": 4}),
    "int8_dp2_graphs": ("int8_wide", DP2, GRAPHS, {}, ASYNC),
    "int8_v3_dp2": ("int8_v3", DP2, GRAPHS, ALL_TO_ALL, REPLICAS),
}


@pytest.fixture(scope="module")
def checkpoint(
    zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Returns the checkpoint of this name, written at its first use."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in INT8:
            return zoo(name)
        if name not in made:
            made[name] = tmp_path_factory.mktemp("int8") / name
            exporter = Exporter(zoo(INT8[name]), made[name], "W8A8_DYNAMIC", torch.bfloat16, {})
            exporter.run(lambda _: None)
        return made[name]

    return find


Start = Callable[..., DPEngines]


@pytest.fixture(scope="module")
def start(start_engine: Callable[..., Any], checkpoint: Callable[[str], Path]) -> Start:
    """Starts DP ranks with a model."""

    def begin(model: str, additional: dict[str, Any], **options: Any) -> DPEngines:
        in_16_bits = model in (WIDE, *INT8)
        return started(start_engine, checkpoint(model), additional, in_16_bits, **options)

    return begin


def assert_close(found: list[Any], expected: list[Any]) -> None:
    """Asserts equal tokens, and probabilities within the rounding of fp32 sums."""
    for one, other in zip(found, expected, strict=True):
        for (token, likely), (wanted, as_likely) in zip(one, other, strict=True):
            assert token == wanted
            assert likely == pytest.approx(as_likely, abs=1e-4)


@pytest.mark.parametrize(
    ("model", "ranks", "options", "additional", "balance"),
    [
        *(pytest.param(*each, id=name) for name, each in CASES.items()),
        *(
            pytest.param(*each, id=name, marks=pytest.mark.thorough)
            for name, each in THOROUGH_CASES.items()
        ),
    ],
)
def test_experts_that_move_change_no_bit_of_an_answer(
    model, ranks, options, additional, balance, start, request
):
    with start(model, additional, **ranks, **options) as engine:
        expected = answers(engine)
        before = experts_of(engine.on_workers("expert_digests"))
    seed = sum(map(ord, request.node.callspec.id))
    with start(
        model,
        {**additional, "eplb_config": balance},
        **ranks,
        **options,
        environment={"VNPU_RACES": "raise", "VNPU_SCHEDULE": f"fuzz:{seed}"},
    ) as engine:
        addresses = engine.on_workers("weight_addresses")
        found = answers(engine)
        slots = engine.on_workers("expert_digests")
        states = engine.on_workers("balance")
        assert engine.on_workers("weight_addresses") == addresses
        said = engine.log_text()
    if model in SUMS_OF_MANY and "moe_communication" not in additional:
        assert_close(found, expected)
    else:
        assert found == expected
    assert experts_of(slots) == before
    assert all(state == states[0] for state in states), states
    assert states[0]["decisions"] >= 2
    assert states[0]["moved"] > 0
    assert "Experts are balanced: the largest load of a rank over the mean was" in said


@pytest.mark.nightly("weights")
def test_the_guides_command_balances_and_shows_it_in_the_metrics(repository: Path, tmp_path: Path):
    guide = (repository / "docs" / "guides" / "expert_balancing.md").read_text()
    command = guide.split("```bash\n", 1)[1].split("```", 1)[0]
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:5] == ["vnpu", "run", "--", "vllm", "serve"]
    server = ForkedServer(repository / words[5], tmp_path / "log.txt", *SMALL, *words[6:])
    try:
        server.wait_until_ready()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda prompt: server.complete(prompt, 24), skewed(3, 4)))
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
        server.interrupt()
        server.wait_for_end()
    finally:
        server.kill()
    values = {
        line.split()[0]: float(line.split()[1])
        for line in metrics.splitlines()
        if line.startswith("davinci:expert")
    }
    before, after = (
        values[f'davinci:expert_imbalance{{engine="0",when="{when}"}}']
        for when in ("before", "after")
    )
    assert before > after >= 1, values
    assert values['davinci:expert_moves_total{engine="0"}'] > 0
    assert f"the mean was {before:.3f}, and is {after:.3f}" in server.log_text()
