"""Moving scales between two modules leaves the model's results unchanged."""

from typing import Any

import pytest
import torch
import transformers

from vllm_davinci.core.export.pairs import find_pairs, fold, keeping
from vllm_davinci_testing.engines.deepseek_zoo import small_deepseek

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "biases": transformers.Qwen2Config(**{**SIZES, "head_dim": 16}),
    "norms of queries and keys": transformers.Qwen3Config(**SIZES),
    "latent attention and experts": small_deepseek(),
    "latent attention without experts": small_deepseek(first_k_dense_replace=2),
}
TOKENS = torch.arange(40).remainder(61)[None]


def make(config: transformers.PretrainedConfig) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                parameter.data.normal_(1.0, 0.3)
    return model.requires_grad_(False)


def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize("name", MODELS)
def test_moved_scales_change_no_logit(name: str):
    model = make(MODELS[name])
    expected = logits(model)
    pairs = find_pairs(model)
    assert {pair.kind for pair in pairs} == {"norm", "value", "up"}
    kept, refused = keeping(model, pairs, TOKENS)
    assert [pair.source for pair in kept] == [pair.source for pair in pairs] and not refused
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)  # tries and undoes it
    generator = torch.Generator().manual_seed(1)
    for pair in pairs:
        before = model.get_parameter(f"{pair.readers[0]}.weight").clone()
        fold(model, pair, torch.rand(len(pair.rows), generator=generator) * 4 + 0.2)
        assert not torch.equal(model.get_parameter(f"{pair.readers[0]}.weight"), before)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


def test_every_dense_layer_has_its_pairs():
    found = [(pair.source, pair.readers) for pair in find_pairs(make(MODELS["llama"]))]
    layer = "model.layers.1"
    assert (
        f"{layer}.input_layernorm",
        tuple(f"{layer}.self_attn.{part}_proj" for part in "qkv"),
    ) in found
    assert (
        f"{layer}.post_attention_layernorm",
        (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
    ) in found
    assert (f"{layer}.self_attn.v_proj", (f"{layer}.self_attn.o_proj",)) in found
    assert (f"{layer}.mlp.up_proj", (f"{layer}.mlp.down_proj",)) in found
    assert len(found) == 8


def test_the_norm_before_experts_keeps_its_scales():
    sources = {pair.source for pair in find_pairs(make(MODELS["latent attention and experts"]))}
    assert "model.layers.0.post_attention_layernorm" in sources
    assert "model.layers.1.post_attention_layernorm" not in sources
    assert "model.layers.1.self_attn.q_a_layernorm" in sources
    assert "model.layers.1.mlp.shared_experts.up_proj" in sources


def test_norms_that_add_one_to_their_weight_are_detected():
    model = make(transformers.GemmaConfig(**SIZES))
    expected = logits(model)
    kept, refused = keeping(model, find_pairs(model), TOKENS)
    assert {pair.kind for pair in kept} == {"value", "up"}
    assert "4 pairs of kind norm" in refused
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
