"""Weight-only quantized checkpoints: the tokens of the equivalent floats."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines import toy_scheme
from vllm_davinci_testing.engines.engine_process import ON_910C, EngineError
from vllm_davinci_testing.engines.fixture_types import Zoo
from vllm_davinci_testing.engines.packed_checkpoint import WEIGHTS, write_packed
from vllm_davinci_testing.engines.refusals import refusal_of
from vllm_davinci_testing.engines.toy_scheme import PowersOfTwo
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

DENSE, LATENT = "llama_head64_gqa4", "deepseek_v3_dense"
EXPERTS = "qwen3_moe_softmax_top2_of_8"
DIVIDED_EXPERTS = "qwen3_moe_unnormalized_top3_of_16"  # groups of 32 divide half an expert's width
THOROUGH = pytest.mark.thorough
CASES = [
    pytest.param(model, settings, options, id=f"{model}-{'-'.join(map(str, settings))}-{ranks}",
                 marks=marks)
    for model, settings, options, ranks, marks in (
        (DENSE, ("awq", 4, 32, False), {}, 1, THOROUGH),
        (DENSE, ("gptq", 4, 32, True),
         {"tensor_parallel_size": 2, "environment": ON_910C}, 2, ()),
        (DENSE, ("gptq", 8, 0, True), {}, 1, THOROUGH),
        (DENSE, ("compressed-tensors", 4, 32, False), {}, 1, THOROUGH),
        (DENSE, ("ascend", 8, 0, True), {"dtype": "float16"}, 1, THOROUGH),
        (DENSE, ("ascend", 4, 0, False), {}, 1, THOROUGH),
        (EXPERTS, ("compressed-tensors", 4, 32, True), {}, 1, ()),
        (EXPERTS, ("gptq", 4, 32, True),
         {"tensor_parallel_size": 2, "enable_expert_parallel": True}, 2, THOROUGH),
        (DIVIDED_EXPERTS, ("awq", 4, 32, False), {"tensor_parallel_size": 2}, 2, THOROUGH),
        (LATENT, ("ascend", 4, 32, False), {}, 1, ()),
    )
]  # fmt: skip


@pytest.mark.parametrize(("model", "settings", "options"), CASES)
def test_tokens_equal_those_of_the_floats(
    model, settings, options, zoo, start_engine, prompts, tmp_path
):
    options = {"dtype": "bfloat16", "max_model_len": 512, **options}
    integers, floats = write_packed(zoo(model), tmp_path, *settings)
    assert check_checkpoint(integers).problems() == []
    few = prompts[:10]
    with start_engine(integers, **options) as engine:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in few],
            SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        )
    found = [list(output.outputs[0].token_ids) for output in outputs]
    close, wrong = TransformersReference(floats).differing_tokens(few, found)
    assert wrong == 0
    assert close <= sum(map(len, found)) // 10
    assert len({tuple(tokens) for tokens in found}) > len(few) // 2


def test_a_scheme_of_one_file_is_written_checked_and_served(zoo, start_engine, prompts, tmp_path):
    toy = PowersOfTwo.name
    integers, floats = tmp_path / toy, tmp_path / "floats"
    Exporter(zoo(DENSE), integers, toy, torch.bfloat16, {}).run(lambda count: None)
    assert toy in {kind.loads for kind in check_checkpoint(integers).kinds}
    shutil.copytree(zoo(DENSE), floats)
    (written,) = integers.glob("*.safetensors")
    tensors = load_file(written)
    for name in [name for name in tensors if name.endswith(".exponent")]:
        scale = tensors.pop(name).exp2()
        weight = name.replace("exponent", "weight")
        tensors[weight] = (tensors[weight].float() * scale).bfloat16()  # exact
    save_file(tensors, floats / WEIGHTS, metadata={"format": "pt"})
    extension = f"{toy_scheme.__name__}.{toy_scheme.Workers.__name__}"
    with start_engine(integers, dtype="bfloat16", worker_extension_cls=extension) as engine:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts[:4]],
            SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        )
    found = [list(output.outputs[0].token_ids) for output in outputs]
    close, wrong = TransformersReference(floats).differing_tokens(prompts[:4], found)
    assert wrong == 0
    assert close <= sum(map(len, found)) // 10


def without(directory: Path, ending: str) -> str:
    """Removes a checkpoint's first tensor with that ending; returns its name."""
    tensors = load_file(directory / WEIGHTS)
    name = next(name for name in sorted(tensors) if name.endswith(ending))
    del tensors[name]
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize(
    ("method", "ending"),
    [("awq", "down_proj.qzeros"), ("gptq", "down_proj.scales"), ("gptq", "down_proj.qweight")],
)
def test_a_missing_tensor_ends_the_start_with_its_name(method, ending, zoo, start_engine, tmp_path):
    integers, _ = write_packed(zoo(DENSE), tmp_path, method, is_symmetric=method == "gptq")
    name = without(integers, ending)
    told = name.replace("qweight", "weight")
    assert any(told in problem for problem in check_checkpoint(integers).problems())
    with pytest.raises(EngineError) as error:
        start_engine(integers, dtype="bfloat16")
    assert told in str(error.value)


def test_activation_order_ends_the_start_in_one_line(zoo: Zoo, tmp_path: Path):
    integers, _ = write_packed(zoo(DENSE), tmp_path, "gptq")
    path = integers / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["desc_act"] = True
    path.write_text(json.dumps(config))
    said = refusal_of(integers, dtype="bfloat16")
    assert "gptq with desc_act=true is not supported" in said
