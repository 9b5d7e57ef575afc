"""Writes small checkpoints of multimodal families; makes their common requests."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from vllm_davinci_testing.engines import pictures
from vllm_davinci_testing.engines.model_zoo import EOS_ID, NUM_BYTES
from vllm_davinci_testing.engines.released_weights import write_network
from vllm_davinci_testing.engines.whisper_checkpoint import SAMPLING_RATE, SECONDS, sound

PATCH, SIDE = 14, 56
IMAGE, VIDEO, AUDIO = "<image>", "<video>", "<|AUDIO|>"
BREAK, END = "[IMG_BREAK]", "[IMG_END]"
AROUND, GLOBAL = "<fake_token_around_image>", "<global-img>"
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SPECIAL = (
    IMAGE, VIDEO, AUDIO, BREAK, END, AROUND, GLOBAL, "<end_of_utterance>", "<|audio_bos|>",
    "<|audio_eos|>", *TILES,
)  # fmt: skip
FIRST_ID = NUM_BYTES + 2
VOCAB_SIZE = FIRST_ID + len(SPECIAL)
IDS = {token: FIRST_ID + number for number, token in enumerate(SPECIAL)}
PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
# Width and height of each request's images.
SIZES = ([(56, 84)], [(112, 56)], [(60, 60)], [])

Request = dict[str, Any]


@dataclass(frozen=True)
class MultimodalFamily:
    """One family.

    write:      writes its checkpoint into a directory
    place:      placeholder for an image or audio in a prompt
    modality:   "image" or "audio"
    auto_class: name of transformers' class
    engine:     arguments of vllm.LLM
    waits_for:  why the definition's encoder waits for the device
    changed:    what `change` changes in transformers' network, and why
    reference:  makes the results of a family that transformers lacks; like MultimodalReference
    """

    write: Callable[[Path], Path]
    place: str = IMAGE
    modality: str = "image"
    auto_class: str = "AutoModelForImageTextToText"
    engine: tuple[tuple[str, Any], ...] = ()
    waits_for: str = ""
    changed: str = ""
    change: Callable[[Any], None] = lambda network: None
    reference: Callable[[Path], Any] | None = None

    def requests(self) -> list[Request]:
        """Makes requests in vLLM's form: one image or audio each, and one of text only."""
        every: list[Request] = []
        for number, sizes in enumerate(SIZES):
            request: Request = {"prompt": self.place * len(sizes) + f"case {number} of it"}
            if sizes and self.modality == "image":
                images = [pictures.image(*size, seed=number) for size in sizes]
                request["multi_modal_data"] = {"image": images}
            elif sizes:
                waves = sound(number, SECONDS - 0.5 * number)
                request["multi_modal_data"] = {"audio": [(waves, SAMPLING_RATE)]}
            every.append(request)
        return every


def text_fields(kind: str = "llama", **options: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "tie_word_embeddings": False,
        **options,
    }


def vision_fields(kind: str, **options: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        **options,
    }


def written(
    make_config: Callable[[], transformers.PretrainedConfig],
    make_processor: Callable[[Any], transformers.ProcessorMixin],
    auto_class: str = "AutoModelForImageTextToText",
    tokens: dict[str, str] | None = None,
    more_tokens: tuple[str, ...] = (),
) -> Callable[[Path], Path]:
    """Returns a function that writes a family's checkpoint.

    tokens:      names that its processor requests from the tokenizer
    more_tokens: special tokens that only this family has
    """

    def write(directory: Path) -> Path:
        write_network(make_config(), directory, 0, _fill_newline, auto_class)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, *more_tokens]})
        tokenizer.save_pretrained(directory)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            directory, model_specific_special_tokens=tokens or {}
        )
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        tokenizer.save_pretrained(directory)
        make_processor(tokenizer).save_pretrained(directory)
        return directory

    return write


def _fill_newline(network: Any) -> None:
    for name, parameter in network.named_parameters():
        if name.endswith("image_newline"):
            parameter.data.normal_()
