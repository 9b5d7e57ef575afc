"""Comparisons of tokens with a reference, and forecasts of a model's memory."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from vllm_davinci.meta import compare, host_estimate, local_engine
from vllm_davinci.meta.errors import ModelFileError
from vllm_davinci_testing.processes.forked import run_command

MODULE = "vllm_davinci.meta"
WORDS = 8


def reference(tokens: torch.Tensor) -> SimpleNamespace:
    """A model that predicts t + 1 after token t; the logit of t + 2 is lower by 0.25."""
    logits = torch.zeros(1, tokens.shape[1], WORDS)
    for row, token in enumerate(tokens[0].tolist()):
        logits[0, row, (token + 1) % WORDS] = 2.0
        logits[0, row, (token + 2) % WORDS] = 1.75
    return SimpleNamespace(logits=logits)


def test_tokens_after_a_difference_are_compared_too():
    found = compare.compared(reference, [[0], [3, 4]], [[1, 2, 3], [5, 7, 0]])
    assert (found.prompts, found.equal_prompts) == (2, 1)
    assert (found.tokens, found.equal_tokens) == (6, 5)
    (difference,) = found.differences
    assert (difference.prompt, difference.position) == (1, 1)
    assert (difference.token, difference.expected) == (7, 6)
    assert difference.margin == pytest.approx(0.25)


def test_composed_prompts_are_always_the_same_and_a_few_are_long():
    prompts = compare.composed(40)
    assert prompts == compare.composed(40) != compare.composed(41)
    words = sorted(len(prompt.split()) for prompt in prompts)
    assert len(set(prompts)) == 40 and words[0] < 10 and words[20] < 150 and words[-3] > 700


def test_a_models_size_is_read_from_its_files(tmp_path: Path):
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    save_file({"a": torch.zeros(5, 7), "b": torch.zeros(2)}, tmp_path / "model.safetensors")
    size = host_estimate.size_of(tmp_path)
    assert size == host_estimate.ModelSize(parameters=37, layers=3, kv_values=3 * 2 * 2 * 8)
    more = [
        host_estimate.estimate(size, dtype, 1024, 512, import_s=1.0)
        for dtype in ("bfloat16", "float32")
    ]
    assert more[0].memory_bytes < more[1].memory_bytes
    assert more[0].seconds(8, 100, 4) > more[0].seconds(8, 10, 4) > more[0].start_s


@pytest.mark.parametrize(("longest", "requests", "blocks"), [(50, 3, 6), (128, 1, 2), (129, 8, 24)])
def test_every_request_has_room_in_the_cache(longest: int, requests: int, blocks: int):
    assert local_engine.cache_tokens(longest, requests) == blocks * local_engine.BLOCK_TOKENS


@pytest.mark.parametrize(
    ("soc", "dtype"), [(None, "float32"), ("reference", "float32"), ("Ascend910B3", "bfloat16")]
)
def test_the_virtual_device_computes_in_float32_by_default(soc, dtype, monkeypatch):
    monkeypatch.setenv("VNPU_ACTIVE", "1")
    monkeypatch.delenv("VNPU_SOC", raising=False)
    if soc is not None:
        monkeypatch.setenv("VNPU_SOC", soc)
    assert local_engine._default_dtype() == dtype


def test_a_path_without_a_model_is_reported_in_one_line(tmp_path: Path):
    with pytest.raises(ModelFileError, match=r"no readable config\.json"):
        host_estimate.size_of(tmp_path)
    for command in ("generate", "compare"):
        ended = run_command(MODULE, command, tmp_path / "none")
        assert ended.status == 1
        (line,) = ended.output.strip().splitlines()
        assert "there is no " in line
    ended = run_command(MODULE, "compare", tmp_path, "--prompts", tmp_path / "none")
    assert ended.status == 1
    assert "--prompts: " in ended.output
