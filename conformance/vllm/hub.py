"""Stand-ins for hub models that vLLM's tests name: random weights, two layers.

A stand-in has the original model's architecture and vocabulary size, and heads of 64 entries. All
share a byte-level tokenizer, trained on Python's standard library, with the original's special
tokens at their ids. Stand-ins are written once, beside the wheel cache, in the layout of a hub's
cache.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import wheel_cache

DIRECTORY = wheel_cache.cache_directory().parent / "conformance-hub-2"
LEARNED_WORDS = 12_000
# Spreads logits, so that the most probable token is not a tie.
SPREAD = 0.15
IMAGE = "<image>"


@dataclass(frozen=True)
class Model:
    """
    architecture: class of transformers
    vocabulary:   number of entries
    special:      ids of special tokens
    roles:        special token that is bos_token, eos_token, pad_token
    context:      maximum tokens
    settings:     further fields of the configuration
    vision:       fields of the image encoder's configuration; a text has <image> for an image
    """

    architecture: str
    vocabulary: int
    special: dict[str, int]
    roles: dict[str, str]
    context: int
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    vision: dict[str, Any] = field(default_factory=dict)


_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": SPREAD,
    "tie_word_embeddings": True,
}
_OPT = Model(
    "OPTForCausalLM",
    50272,
    {"<pad>": 1, "</s>": 2},
    {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"},
    2048,
    {
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "ffn_dim": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "init_std": SPREAD,
    },
    "float16",
)
# No bos_token, so that texts do not begin with it.
_GPT2 = Model(
    "GPT2LMHeadModel",
    50257,
    {"<|endoftext|>": 50256},
    {"eos_token": "<|endoftext|>"},
    1024,
    {"n_embd": 128, "n_layer": 2, "n_head": 2, "initializer_range": SPREAD},
    "float16",
)
_LLAMA = Model(
    "LlamaForCausalLM",
    32000,
    {"<unk>": 0, "<s>": 1, "</s>": 2},
    {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"},
    8192,
    _SMALL,
)

_WITHOUT_HEAD_DIM = {name: value for name, value in _SMALL.items() if name != "head_dim"}


def _qwen(architecture: str, length: int, sizes: dict[str, Any]) -> Model:
    return Model(
        architecture,
        151936,
        {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645},
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        length,
        sizes,
    )


MODELS = {
    "distilbert/distilgpt2": _GPT2,
    "gpt2": _GPT2,
    "openai-community/gpt2": _GPT2,
    "facebook/opt-125m": _OPT,
    "facebook/opt-350m": _OPT,
    "hmellor/tiny-random-LlamaForCausalLM": _LLAMA,
    "JackFram/llama-160m": replace(_LLAMA, context=2048),
    "meta-llama/Llama-3.2-1B": Model(
        "LlamaForCausalLM",
        128256,
        {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|eot_id|>": 128009},
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        16384,
        _SMALL,
    ),
    "meta-llama/Llama-3.2-1B-Instruct": Model(
        "LlamaForCausalLM",
        128256,
        {"<|begin_of_text|>": 128000, "<|eot_id|>": 128009, "<|finetune_right_pad_id|>": 128004},
        {
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "pad_token": "<|finetune_right_pad_id|>",
        },
        16384,
        _SMALL,
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Model(
        "LlamaForCausalLM",
        49152,
        {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
        8192,
        _SMALL,
    ),
    "BAAI/bge-base-en-v1.5": Model(
        "BertModel",
        30522,
        {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102},
        {"bos_token": "[CLS]", "eos_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"},
        512,
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "initializer_range": SPREAD,
        },
        "float16",
    ),
    "Qwen/Qwen1.5-7B": _qwen("Qwen2ForCausalLM", 32768, _WITHOUT_HEAD_DIM),
    "Qwen/Qwen3-0.6B": _qwen("Qwen3ForCausalLM", 40960, _SMALL),
    "llava-hf/llava-1.5-7b-hf": Model(
        "LlavaForConditionalGeneration",
        32064,
        {"<unk>": 0, "<s>": 1, "</s>": 2, IMAGE: 32000, "<pad>": 32001},
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
        4096,
        {**_SMALL, "tie_word_embeddings": False},
        "float16",
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 336,
            "patch_size": 14,
        },
    ),
}


def make_missing() -> None:
    """Writes missing stand-ins."""
    for name, model in MODELS.items():
        revision = hashlib.sha256(name.encode()).hexdigest()[:40]
        folder = DIRECTORY / "hub" / f"models--{name.replace('/', '--')}"
        if (folder / "refs" / "main").exists():
            continue
        print(f"writing a stand-in for {name}", flush=True)
        snapshot = folder / "snapshots" / revision
        _write_model(snapshot, model, seed=int(revision[:8], 16))
        _write_tokenizer(snapshot, model)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(
            revision, encoding="utf-8"
        )  # written last: the stand-in is complete


def _write_model(directory: Path, model: Model, seed: int) -> None:
    import torch
    import transformers

    architecture = getattr(transformers, model.architecture)
    ids = {f"{role}_id": model.special[token] for role, token in model.roles.items()}
    settings = {
        **model.settings,
        **ids,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.context,
    }
    if model.vision:
        settings = {
            "text_config": {"model_type": "llama", **settings},
            "vision_config": {"model_type": "clip_vision_model", **model.vision},
            "image_token_index": model.special[IMAGE],
        }
    config = architecture.config_class(**settings)
    config.architectures = [model.architecture]
    config.dtype = model.dtype
    torch.manual_seed(seed)
    architecture(config).to(getattr(torch, model.dtype)).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(ids), encoding="utf-8")


@cache
def _learned() -> tuple[list[str], list[tuple[str, str]]]:
    """Returns words by id, and the merges that produce them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train(
        sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("*.py"))),
        trainers.BpeTrainer(
            vocab_size=LEARNED_WORDS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    learned = json.loads(tokenizer.to_str())["model"]
    words = sorted(learned["vocab"], key=learned["vocab"].get)
    return words, [tuple(merge) for merge in learned["merges"]]


def _vocabulary(model: Model) -> Iterator[tuple[str, int]]:
    special = {number: token for token, number in model.special.items()}
    words = iter(_learned()[0])
    for number in range(model.vocabulary):
        yield special.get(number) or next(words, f"\u0120w{number}"), number


def _write_tokenizer(directory: Path, model: Model) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(dict(_vocabulary(model)), _learned()[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in model.special]
    )
    if (first := model.roles.get("bos_token")) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, model.special[first])]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=model.context, **model.roles
    )
    fast.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    if not model.vision:
        fast.save_pretrained(directory)
        return
    side = model.vision["image_size"]
    images = CLIPImageProcessor(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    LlavaProcessor(
        images,
        fast,
        patch_size=model.vision["patch_size"],
        vision_feature_select_strategy="default",
        chat_template=fast.chat_template,
        image_token=IMAGE,
        num_additional_image_tokens=1,
    ).save_pretrained(directory)
