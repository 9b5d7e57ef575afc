"""Random EAGLE heads for a Llama, in the format of published heads."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from vllm_davinci_testing.engines.transformers_reference import TransformersReference

AUXILIARY_LAYERS = (1, 3, 5)
# Mean loss of a fitted head's drafts, at which each is right.
CERTAIN = 1e-3


Draw = Callable[..., torch.Tensor]


def random_eagle3(
    target: Path,
    destination: Path,
    draft_vocabulary: int = 2048,
    layers: Sequence[int] = AUXILIARY_LAYERS,
) -> Path:
    """Writes an EAGLE-3 head, which drafts the first tokens of the target's vocabulary.

    layers: layers of the target whose hidden states the head reads
    """
    config, draw = _config(target), _drawn_by(4)
    width = config["hidden_size"]
    tensors = {
        "d2t": torch.zeros(draft_vocabulary, dtype=torch.int64),
        "t2d": torch.arange(config["vocab_size"]) < draft_vocabulary,
        "fc.weight": draw(width, len(layers) * width),
        "midlayer.hidden_norm.weight": _ones(width),
        "midlayer.input_layernorm.weight": _ones(width),
        **_layer("midlayer", config, draw, 2 * width),
        "norm.weight": _ones(width),
        "lm_head.weight": draw(draft_vocabulary, width),
    }
    changes = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": draft_vocabulary,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
    }
    return _write(destination, config | changes, tensors)


def fit_eagle3(
    head: Path,
    layers: Sequence[int],
    target: TransformersReference,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_drafts: int,
) -> None:
    """Changes a head's output weights so that it drafts these texts: wrong inputs lose its drafts.

    layers: those of `random_eagle3`, whose vocabulary has all tokens of the continuations
    texts:  prompts and their continuations, which the target generates
    """
    weights, config = load_file(head / "model.safetensors"), _config(head)
    computes = _Eagle3(weights, config)
    states, tokens = [], []
    with torch.no_grad():
        for prompt, after in texts:
            text = [*prompt, *after]
            seen = target.network(torch.tensor([text]), output_hidden_states=True).hidden_states
            combined = torch.cat([seen[layer][0] for layer in layers], dim=-1)
            known = functional.linear(combined, computes.weights["fc"])
            for end in range(len(prompt), len(text) - num_drafts):
                inputs = known[:end]
                for number in range(num_drafts):
                    newest = computes.states(seen[0][0, 1 : len(inputs) + 1], inputs)[-1:]
                    inputs = torch.cat([inputs, newest])
                    states.append(computes.normed(newest))
                    tokens.append(text[end + 1 + number])
    rows, wanted = torch.cat(states), torch.tensor(tokens)
    fitted = torch.zeros(config["draft_vocab_size"], rows.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([fitted], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        result = functional.cross_entropy(rows @ fitted.t(), wanted)
        result.backward()
        return result

    while float(loss().detach()) > CERTAIN:
        optimizer.step(loss)
    save_file(weights | {"lm_head.weight": fitted.detach()}, head / "model.safetensors")


class _Eagle3:
    """An EAGLE-3 head's layer in fp32, without a cache; all of its norms have weights of one."""

    def __init__(self, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        shorter = {name.split(".")[-2]: each for name, each in weights.items() if "." in name}
        self.weights = {name: each.float() for name, each in shorter.items()}
        self._config = config

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], eps=self._config["rms_norm_eps"])

    def states(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's outputs before the norm. embedded, hidden: [num_tokens, hidden_size], of
        each next token and of the states that the head reads. Returns a tensor like hidden."""
        both, weights = (
            torch.cat([self.normed(embedded), self.normed(hidden)], dim=-1),
            self.weights,
        )
        query, key, value = (
            functional.linear(both, weights[f"{name}_proj"])
            .unflatten(1, (-1, self._config["head_dim"]))
            .transpose(0, 1)
            for name in "qkv"
        )
        out = functional.scaled_dot_product_attention(
            self._rotated(query), self._rotated(key), value, is_causal=True, enable_gqa=True
        )
        hidden = hidden + functional.linear(out.transpose(0, 1).flatten(1), weights["o_proj"])
        x = self.normed(hidden)
        gate, up = (functional.linear(x, weights[f"{name}_proj"]) for name in ("gate", "up"))
        return hidden + functional.linear(functional.silu(gate) * up, weights["down_proj"])

    def _rotated(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotates the first `rotary_dim` entries. heads: [num_heads, num_tokens, head_dim]"""
        size = self._config.get("rotary_dim", heads.shape[-1])
        factors = self._config["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(heads.shape[1]), factors)
        first, second, rest = heads.split([size // 2, size // 2, heads.shape[-1] - size], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        turned = first * cos - second * sin, second * cos + first * sin, rest
        return torch.cat(turned, dim=-1)


def random_eagle(target: Path, destination: Path) -> Path:
    """Writes an EAGLE head, which drafts with the target's own vocabulary."""
    config, draw = _config(target), _drawn_by(5)
    width = config["hidden_size"]
    tensors = {"fc.weight": draw(width, 2 * width), **_layer("layers.0", config, draw, width)}
    changes = {"architectures": ["EagleLlamaForCausalLM"]}
    return _write(destination, config | changes, tensors)


def _config(target: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    config |= config.pop("text_config", {})
    of_llama = {"model_type": "llama", "hidden_act": "silu"}
    return config | of_llama | {"num_hidden_layers": 1, "tie_word_embeddings": False}


def _drawn_by(seed: int) -> Draw:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.03).to(torch.bfloat16)

    return draw


def _ones(width: int) -> torch.Tensor:
    return torch.ones(width, dtype=torch.bfloat16)


def _layer(
    prefix: str, config: dict[str, Any], draw: Draw, num_inputs: int
) -> dict[str, torch.Tensor]:
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        f"{prefix}.post_attention_layernorm.weight": _ones(width),
        f"{prefix}.self_attn.q_proj.weight": draw(queries, num_inputs),
        f"{prefix}.self_attn.k_proj.weight": draw(keys, num_inputs),
        f"{prefix}.self_attn.v_proj.weight": draw(keys, num_inputs),
        f"{prefix}.self_attn.o_proj.weight": draw(width, queries),
        f"{prefix}.mlp.gate_proj.weight": draw(inner, width),
        f"{prefix}.mlp.up_proj.weight": draw(inner, width),
        f"{prefix}.mlp.down_proj.weight": draw(width, inner),
    }


def _write(destination: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    destination.mkdir()
    save_file(tensors, destination / "model.safetensors")
    (destination / "config.json").write_text(json.dumps(config))
    return destination
