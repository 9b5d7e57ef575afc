"""Small checkpoints of pooling models with random weights: embeddings, classes, scores."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import normalize

from vllm_davinci_testing.engines.model_zoo import (
    BOS_ID,
    EOS_ID,
    NUM_BYTES,
    fill_with_normal_weights,
    write_tokenizer,
)

NO, YES = "no", "yes"  # tokens of Qwen3-Reranker's two answers
NO_ID = NUM_BYTES + 2
YES_ID = NO_ID + 1
PAD_ID = 1  # XLM-R's padding token: positions begin after it, and no prompt has it
NUM_LABELS = 3

_SIZES: dict[str, Any] = {
    "vocab_size": YES_ID + 1,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


@dataclass(frozen=True)
class PoolingModel:
    """One checkpoint.

    auto_class: name of transformers' class
    task:       a method of vllm.LLM
    expected:   computes the result [n] from transformers' network and a prompt's tokens
    fields:     fields of its configuration in addition to the common ones
    modules:    sentence-transformers modules, whose files tell vLLM how to pool
    engine:     arguments of vllm.LLM
    """

    name: str
    model_type: str
    auto_class: str
    task: str
    expected: Callable[[Any, torch.Tensor], torch.Tensor]
    fields: dict[str, Any] = field(default_factory=dict)
    modules: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)


def _state(network: Any, tokens: torch.Tensor) -> torch.Tensor:
    return network(tokens).last_hidden_state[0]


def _first(network: Any, tokens: torch.Tensor) -> torch.Tensor:
    return normalize(_state(network, tokens)[0], dim=-1)


def _mean(network: Any, tokens: torch.Tensor) -> torch.Tensor:
    return normalize(_state(network, tokens).mean(0), dim=-1)


def _last(network: Any, tokens: torch.Tensor) -> torch.Tensor:
    return normalize(_state(network, tokens)[-1], dim=-1)


def _yes(network: Any, tokens: torch.Tensor) -> torch.Tensor:
    answers = network(tokens).logits[0, -1, [NO_ID, YES_ID]]
    return answers.softmax(-1)[1:]


def _classes(network: Any, tokens: torch.Tensor) -> torch.Tensor:
    return network(tokens).logits[0].softmax(-1)


def _score(network: Any, tokens: torch.Tensor) -> torch.Tensor:
    return network(tokens).logits[0].sigmoid()


_QWEN3 = {"num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": True}
# As in released checkpoints: vLLM requires it for XLM-R, and transformers 5 no longer writes it.
_ABSOLUTE = {"position_embedding_type": "absolute"}
_XLM_R = {"pad_token_id": PAD_ID, "type_vocab_size": 1, "layer_norm_eps": 1e-5, **_ABSOLUTE}
_MODERN = {
    "pad_token_id": EOS_ID,
    "cls_token_id": BOS_ID,
    "sep_token_id": EOS_ID,
    "num_hidden_layers": 4,
    "local_attention": 16,
    "global_attn_every_n_layers": 3,
}
MODELS = (
    PoolingModel("qwen3_embedding", "qwen3", "AutoModel", "embed", _last, _QWEN3, "lasttoken"),
    PoolingModel(
        "qwen3_reranker",
        "qwen3",
        "AutoModelForCausalLM",
        "classify",
        _yes,
        _QWEN3,
        engine={
            "hf_overrides": {
                "architectures": ["Qwen3ForSequenceClassification"],
                "classifier_from_token": [NO, YES],
                "is_original_qwen3_reranker": True,
            }
        },
    ),
    PoolingModel("bge_m3", "xlm-roberta", "AutoModel", "embed", _first, _XLM_R, "cls"),
    PoolingModel(
        "bge_reranker_v2_m3",
        "xlm-roberta",
        "AutoModelForSequenceClassification",
        "classify",
        _score,
        {**_XLM_R, "num_labels": 1},
    ),
    # Without a pooling file, as in older checkpoints, vLLM uses the first token.
    PoolingModel("bert_first", "bert", "AutoModel", "embed", _first, {"pad_token_id": EOS_ID}),
    PoolingModel(
        "bert_mean", "bert", "AutoModel", "embed", _mean, {"pad_token_id": EOS_ID}, "mean"
    ),
    PoolingModel(
        "bert_classes",
        "bert",
        "AutoModelForSequenceClassification",
        "classify",
        _classes,
        {"pad_token_id": EOS_ID, "num_labels": NUM_LABELS},
    ),
    PoolingModel(
        "roberta_mean", "roberta", "AutoModel", "embed", _mean, {"pad_token_id": PAD_ID}, "mean"
    ),
    # Layers with windows of 8 tokens on each side, and layers with full attention.
    PoolingModel("modernbert_mean", "modernbert", "AutoModel", "embed", _mean, _MODERN, "mean"),
)
BY_NAME = {model.name: model for model in MODELS}


def write_pooling(model: PoolingModel, directory: Path, seed: int = 0) -> Path:
    """Writes configuration, fp32 weights, tokenizer and modules; returns the directory."""
    config = transformers.AutoConfig.for_model(model.model_type, **{**_SIZES, **model.fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = getattr(transformers, model.auto_class).from_config(config, dtype=torch.float32)
        fill_with_normal_weights(network)
    network.save_pretrained(directory)
    write_tokenizer(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([NO, YES])
    tokenizer.save_pretrained(directory)
    if model.modules is not None:
        _write_modules(directory, model.modules)
    return directory


def _write_modules(directory: Path, pooling: str) -> None:
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "lasttoken")
    chosen = {f"pooling_mode_{mode}": mode.startswith(pooling) for mode in modes}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(chosen))


class PoolingReference:
    """Runs a checkpoint in transformers, on the CPU in fp32."""

    def __init__(self, model: PoolingModel, checkpoint: Path) -> None:
        self._model = model
        self._network = (
            getattr(transformers, model.auto_class)
            .from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
            .eval()
        )

    @torch.inference_mode()
    def expected(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._model.expected(self._network, torch.tensor([list(tokens)]))

    @torch.inference_mode()
    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """Returns token-wise embeddings [tokens, hidden_size] of unit length."""
        return normalize(_state(self._network, torch.tensor([list(tokens)])), dim=-1)
