"""Norms with biases, and block-wise fp8 weights, equal transformers with the same numbers."""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from vllm import SamplingParams

from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci_testing.engines.fp8_checkpoint import (
    deepseek_of_blocks,
    dequantized,
    write_block_fp8,
)
from vllm_davinci_testing.engines.int8_checkpoint import rewrite, tensors_of
from vllm_davinci_testing.engines.likelihood import CLOSE
from vllm_davinci_testing.engines.model_zoo import fill_with_normal_weights, write_tokenizer
from vllm_davinci_testing.engines.transformers_reference import TransformersReference, assert_greedy

BIAS = 0.3  # standard deviation of the norms' biases

Quantize = Callable[..., Path]


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param("tiny_llama", "W8A8", id="dense_static", marks=pytest.mark.thorough),
        pytest.param("tiny_llama", "W8A8_DYNAMIC", id="dense", marks=pytest.mark.thorough),
        pytest.param("tiny_deepseek", "W8A8_DYNAMIC", id="latent"),
    ],
)
def test_biases_of_norms_equal_transformers(model, kind, request, quantize, text, likelihood_of):
    source = request.getfixturevalue(model)
    directory = quantize(source, kind, name=f"biased-{model}")
    reference = TransformersReference(source)

    def expected() -> float:
        rows = reference.logprobs(text)[:-1]
        return float(rows.gather(1, torch.tensor(text[1:]).unsqueeze(1)).mean())

    tensors = tensors_of(directory)
    description = json.loads((directory / DESCRIPTION).read_text())
    generator = torch.Generator().manual_seed(0)

    def add_to(norm: torch.nn.Module, name: str) -> None:
        bias = (torch.randn(norm.weight.shape, generator=generator) * BIAS).bfloat16()
        tensors[f"{name}.bias"], description[f"{name}.bias"] = bias, kind
        norm.register_forward_hook(lambda module, inputs, output: output + bias.float())

    found = []
    for kinds in (("input_layernorm", "q_a_layernorm"), ("kv_a_layernorm", "post_attention")):
        found.append(expected())
        for name, module in reference.network.named_modules():
            if any(part in name for part in kinds):
                add_to(module, name)
    found.append(expected())
    # Each kind of bias has an effect.
    assert min(abs(one - other) for one, other in pairwise(found)) > 2 * CLOSE, found
    rewrite(directory, tensors, description)
    actual = likelihood_of(directory)
    assert abs(actual - found[-1]) < CLOSE


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Writes a small DeepSeek-V3 with block-wise fp8 weights, and the equivalent floats."""
    config = deepseek_of_blocks(vocab_size=512, scoring_func="sigmoid", max_position_embeddings=512)
    directory = tmp_path_factory.mktemp("fp8")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(config)
        fill_with_normal_weights(network)
    network.save_pretrained(directory / "source")
    blocks = write_block_fp8(directory / "source", directory / "blocks")
    floats = directory / "floats"
    shutil.copytree(directory / "source", floats)
    save_file(dequantized(blocks), floats / "model.safetensors", metadata={"format": "pt"})
    for checkpoint in (blocks, floats):
        write_tokenizer(checkpoint)
    return blocks, floats


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_fp8_in_blocks_gives_the_tokens_of_its_floats(ranks, fp8, start_engine, prompts):
    blocks, floats = fp8
    options = {"tensor_parallel_size": ranks, "enable_expert_parallel": ranks > 1}
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with start_engine(blocks, **options) as engine:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts[:16]], greedy)
        assert "which become floats of twice their size" in engine.log_text()
    assert_greedy(TransformersReference(floats), prompts[:16], outputs, 16)


@pytest.mark.thorough
def test_block_fp8_becomes_int8_with_the_option(fp8, likelihood_of, text):
    blocks, floats = fp8
    within = [token % 512 for token in text]
    rows = TransformersReference(floats).logprobs(within)[:-1]
    expected = float(rows.gather(1, torch.tensor(within[1:]).unsqueeze(1)).mean())
    with_int8 = likelihood_of(blocks, quantization="ascend", text=within)
    assert 0 < abs(with_int8 - expected) < CLOSE
