"""ModelSlim's types that our exporter does not write give the tokens of plain integers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci.core.quantization.weight_only import unpacked_rows
from vllm_davinci_testing.engines.engine_process import EngineError
from vllm_davinci_testing.engines.int8_checkpoint import as_type, rewrite, tensors_of
from vllm_davinci_testing.engines.integer_reference import IntegerReference
from vllm_davinci_testing.engines.likelihood import CLOSE, likelihood

EXPERTS = "deepseek_v3_moe"
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize(
    ("model", "most_wrong"),
    [
        ("tiny_llama", 0),
        # In 16 bits, other experts win by a tiny margin.
        pytest.param("tiny_deepseek", 3, marks=pytest.mark.thorough),
    ],
)
def test_tokens_of_mixed_layers_equal_those_of_dynamic_ones(
    model, most_wrong, request, quantize, start_engine, prompts
):
    directory = as_type(quantize, request.getfixturevalue(model), "W8A8_MIX")
    assert check_checkpoint(directory).can_load
    given = prompts[6:14]
    with start_engine(directory, dtype="bfloat16") as engine:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in given], GREEDY)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    close, wrong = IntegerReference(directory).differing_tokens(given, tokens)
    assert wrong <= most_wrong, (close, wrong)
    assert close <= 12  # of 128


@pytest.mark.thorough
def test_mixed_layers_of_an_engine_that_only_decodes_are_static_ones(
    tiny_llama, tmp_path, quantize, start_engine, prompts
):
    directory = as_type(quantize, tiny_llama, "W8A8_MIX")
    static = tmp_path / "static"
    shutil.copytree(directory, static)
    description = json.loads((directory / DESCRIPTION).read_text())
    kinds = {name: "W8A8" if kind == "W8A8_MIX" else kind for name, kind in description.items()}
    assert kinds != description
    (static / DESCRIPTION).write_text(json.dumps(kinds))
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    given = prompts[6:14]
    with start_engine(directory, dtype="bfloat16", kv_transfer_config=transfer) as engine:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in given], GREEDY)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    close, wrong = IntegerReference(static).differing_tokens(given, tokens)
    assert wrong == 0, close
    close_to_dynamic, wrong_of_dynamic = IntegerReference(directory).differing_tokens(given, tokens)
    assert close_to_dynamic + wrong_of_dynamic > close


def in_eight_bits(directory: Path, target: Path) -> Path:
    """Writes the same integers as a W8A8_DYNAMIC export."""
    shutil.copytree(directory, target)
    tensors = tensors_of(directory)
    description = json.loads((directory / DESCRIPTION).read_text())
    for name in [name for name, kind in description.items() if kind == "W4A8_DYNAMIC"]:
        if name.endswith(".scale_bias"):
            del tensors[name], description[name]
            continue
        description[name] = "W8A8_DYNAMIC"
        if name.endswith(".weight"):
            tensors[name] = unpacked_rows(tensors[name])
    rewrite(target, tensors, description)
    return target


# at start, the engine asks the product about sizes that it may not support
@pytest.mark.refused_calls
@pytest.mark.parametrize(
    ("options", "is_kept"),
    [
        pytest.param({}, True, id="one_rank"),
        pytest.param(
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            True,
            id="two_ranks_of_experts",
            marks=pytest.mark.thorough,
        ),
        # Half an expert has 32 inputs, and the product requires a multiple of 64.
        pytest.param(
            {"tensor_parallel_size": 2}, False, id="halves_of_experts", marks=pytest.mark.thorough
        ),
    ],
)
def test_4_bit_weights_give_the_results_of_8_bit_ones(
    options, is_kept, zoo, quantize, start_engine, text, tmp_path
):
    directory = as_type(quantize, zoo(EXPERTS), "W4A8_DYNAMIC")
    assert check_checkpoint(directory).can_load
    read = [token % 256 for token in text[:200]]
    found = {}
    for model in (directory, in_eight_bits(directory, tmp_path / "eight")):
        with start_engine(model, dtype="bfloat16", **options) as engine:
            found[model] = likelihood(engine, read)
            is_unpacked = "weights are stored in 8 bits" in engine.log_text()
        assert is_unpacked == (model == directory and not is_kept)
    four, eight = found.values()
    rows = IntegerReference(directory).logprobs(read)[:-1]
    defined = float(rows.gather(1, torch.tensor(read[1:]).unsqueeze(1)).mean())
    assert abs(four - eight) < 0.002
    assert abs(four - defined) < CLOSE


EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        ("weight_scale", lambda scale: scale.repeat(1, 2), "[96, 2]"),
        ("weight", lambda weight: weight[1:], "[94, 1]"),
        ("weight", lambda weight: weight.float(), "float32"),
        ("scale_bias", lambda bias: bias.repeat(1, 3), "[96, 3]"),
    ],
    ids=["groups", "rows_short", "floats", "parts"],
)
def test_bad_weights_of_four_bits_are_named(part, change, told, tiny_deepseek, quantize):
    directory = as_type(quantize, tiny_deepseek, "W4A8_DYNAMIC", "experts")
    whole = tensors_of(directory)
    name = f"{EXPERT}.{part}"
    rewrite(directory, {**whole, name: change(whole[name]).contiguous()})
    report = check_checkpoint(directory)
    rewrite(directory, whole)
    assert not report.can_load
    said = [str(issue) for issue in report.issues if EXPERT in str(issue)]
    assert any(told in each for each in said), said


def test_experts_that_are_not_symmetric_end_the_start(tiny_deepseek, quantize, start_engine):
    directory = as_type(quantize, tiny_deepseek, "W4A8_DYNAMIC", "experts.")
    tensors = tensors_of(directory)
    tensors[f"{EXPERT}.weight_offset"] += 1
    rewrite(directory, tensors)
    with pytest.raises(EngineError, match=r"w13_weight_offset.* is not zero"):
        start_engine(directory, dtype="bfloat16")
