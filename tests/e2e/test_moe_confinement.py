"""A NaN or infinity in one request, from any source, does not affect other requests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.fixture_types import Prompts, StartEngine, Zoo
from vllm_davinci_testing.engines.int8_checkpoint import rewrite, tensors_of, write_int8
from vllm_davinci_testing.engines.model_zoo import POISONED_EXPERT, POISONS, write_poisoned
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

MODEL = "qwen3_moe_softmax_top2_of_8"
MAX_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def beside_poisons(
    prompts: list[list[int]], poisons: tuple[int, ...] = POISONS
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns clean prompts, and a list of each clean prompt followed by a poisoned copy."""
    clean = [[token for token in prompt if token not in POISONS] for prompt in prompts]
    clean = [prompt for prompt in clean if prompt]
    # The poison is at the end, in the middle or at the start.
    mixed: list[list[int]] = []
    for number, prompt in enumerate(clean):
        mixed.append(prompt)
        where = (len(prompt), len(prompt) // 2, 0)[number // len(POISONS) % 3]
        mixed.append([*prompt[:where], poisons[number % len(POISONS)], *prompt[where:]])
    return clean, mixed


@pytest.fixture(scope="module")
def poisoned(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_poisoned(zoo(MODEL), tmp_path_factory.mktemp("poisoned"))


TWO_RANKS = {
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "distributed_executor_backend": "mp",
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one_device", marks=pytest.mark.thorough),
        pytest.param(
            {**TWO_RANKS, "additional_config": {"moe_communication": "all_to_all"}},
            id="expert2_all_to_all",
        ),
        pytest.param(TWO_RANKS, id="expert2", marks=pytest.mark.thorough),
        pytest.param(
            {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
            id="tensor2",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {
                **TWO_RANKS,
                "additional_config": {"moe_communication": "all_to_all", "dbo": SPLIT_ALWAYS},
            },
            id="expert2_overlapped",
            marks=pytest.mark.thorough,
        ),
        *(
            pytest.param(
                {
                    "count": 2,
                    "enable_expert_parallel": True,
                    "additional_config": {"moe_communication": scheme},
                },
                id=f"data2_{scheme}",
                marks=pytest.mark.thorough,
            )
            for scheme in ("all_gather", "multicast", "all_to_all")
        ),
    ],
)
def test_requests_beside_poisoned_ones_get_the_tokens_of_transformers(
    options: dict[str, Any], poisoned: Path, start_engine: StartEngine, prompts: Prompts
):
    reference = TransformersReference(poisoned)
    clean, mixed = beside_poisons(prompts[:12])
    with DPEngines(start_engine, poisoned, **options) as engine:
        first = engine.generate(mixed, GREEDY)
        # Repeat in cache blocks that held the poison.
        again = engine.generate(clean, GREEDY)
    compared = 0
    for prompt, *outputs in zip(clean, first[::2], again, strict=True):
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            assert len(tokens) == MAX_TOKENS
            if set(tokens) & set(POISONS):
                continue  # the answer itself contains a poison
            assert reference.first_difference(prompt, tokens) is None
            compared += 1
    assert compared > len(clean)
    for prompt in mixed[1::2]:
        assert not reference.logits(prompt)[-1].isfinite().any(), "this prompt is not poisoned"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(TWO_RANKS, id="expert2"),
        pytest.param({"count": 2, "enable_expert_parallel": True}, id="data2"),
    ],
)
def test_fused_launches_give_the_same_tokens_beside_poisoned_requests_and_others(
    options: dict[str, Any], zoo: Zoo, start_engine: StartEngine, prompts: Prompts, tmp_path: Path
):
    model = write_poisoned(zoo("qwen3_moe_hidden1024"), tmp_path / "poisoned")
    harmless = beside_poisons(prompts[:12], (1, 2, 3))[1]
    harmful = beside_poisons(prompts[:12])[1]
    with DPEngines(
        start_engine,
        model,
        environment={"VNPU_SOC": "Ascend910_9391"},
        dtype="bfloat16",
        enable_prefix_caching=False,
        **{**options, "additional_config": {"moe_communication": "fused"}},
    ) as engine:
        found = [
            [list(output.outputs[0].token_ids) for output in engine.generate(batch, GREEDY)]
            for batch in (harmless, harmful, harmless)
        ]
        assert "Mixture of experts: fused, because" in engine.log_text()
    # The clean prompts get the same tokens in another batch, and in cache blocks that held the
    # poison.
    assert found[1][::2] == found[0][::2]
    assert found[2] == found[0]
    assert all(one != other for one, other in zip(found[1][1::2], found[0][1::2], strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W8A8"])
def test_int8_requests_beside_poisoned_ones_get_the_tokens_that_they_get_alone(
    kind: str, zoo: Zoo, start_engine: StartEngine, prompts: Prompts, tmp_path: Path
):
    source = write_poisoned(zoo(MODEL), tmp_path / "source")
    clean = [[token for token in prompt if token not in POISONS] for prompt in prompts[:12]]
    # NaN scales do not load. Very large scales make every product of the expert infinite.
    floats = load_file(source / "model.safetensors")
    expert = f"layers.0.mlp.experts.{POISONED_EXPERT}.down_proj"
    for name in [name for name in floats if expert in name]:
        assert floats[name].isnan().all()
        floats[name] = torch.ones_like(floats[name])
    save_file(floats, source / "model.safetensors", metadata={"format": "pt"})
    model = write_int8(source, tmp_path / kind, kind, clean[5])
    tensors = tensors_of(model)
    for name in [name for name in tensors if name.endswith(f"{expert}.weight_scale")]:
        tensors[name].fill_(torch.finfo(torch.float32).max)
    rewrite(model, tensors)
    poisoned = [[*prompt, POISONS[number % 3]] for number, prompt in enumerate(clean)]
    mixed = [prompt for pair in zip(clean, poisoned, strict=True) for prompt in pair]

    def tokens(engine: EngineProcess, batch: list[list[int]]) -> list[list[int]]:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in batch], GREEDY)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with start_engine(model, dtype="bfloat16", max_model_len=512) as engine:
        alone = tokens(engine, clean)
        beside = tokens(engine, mixed)[::2]
        again = tokens(engine, clean)  # cache blocks held the poison before
    assert len({tuple(each) for each in alone}) > len(alone) // 2
    for expected, *seen in zip(alone, beside, again, strict=True):
        if not set(expected) & set(POISONS):  # a clean prompt may generate a poison
            assert seen == [expected, expected]
