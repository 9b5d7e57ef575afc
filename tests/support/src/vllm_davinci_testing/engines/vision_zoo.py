"""Small multimodal checkpoints with random weights: an image and video encoder, then text.

vLLM's image processors of these families need torchvision.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from vllm_davinci_testing.engines.glm4v_model import TOKENS_OF_VIDEOS, glm4v_config, glm4v_processor
from vllm_davinci_testing.engines.glm5_next_model import (
    fill_streams_and_pools,
    glm5_next_config,
    glm5_next_processor,
)
from vllm_davinci_testing.engines.internvl_model import internvl_config, internvl_processor
from vllm_davinci_testing.engines.model_zoo import (
    BOS,
    EOS,
    EOS_ID,
    NUM_BYTES,
    fill_with_normal_weights,
    write_tokenizer,
)
from vllm_davinci_testing.engines.qwen3_5_model import qwen3_5_config
from vllm_davinci_testing.engines.qwen4_exp_model import fill_convolutions, qwen4_exp_config
from vllm_davinci_testing.engines.released_weights import transpose_experts

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPECIAL = (VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
FIRST_SPECIAL_ID = NUM_BYTES + 2
VOCAB_SIZE = FIRST_SPECIAL_ID + len(SPECIAL)
START_ID, END_ID, IMAGE_ID, VIDEO_ID = range(FIRST_SPECIAL_ID, VOCAB_SIZE)

PATCH = 14
SMALLEST, LARGEST = 28 * 28, 280 * 280  # pixels per image


@dataclass(frozen=True)
class VisionModel:
    """One checkpoint.

    make_config:    makes its transformers configuration
    make_processor: makes its processor for text, images and videos, with a tokenizer
    takes_videos:   True if it supports videos
    more_tokens:    tokens that vLLM looks up by name, after the special ones
    needs_metadata: True if its processor needs the times of a video's frames
    fill:           fills parameters other than matrices and norms
    """

    name: str
    make_config: Callable[[], transformers.PretrainedConfig]
    make_processor: Callable[[Any], transformers.ProcessorMixin]
    takes_videos: bool = True
    more_tokens: tuple[str, ...] = ()
    needs_metadata: bool = False
    fill: Callable[[Any], None] = lambda network: None


def _text(**options: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "tie_word_embeddings": False,
        **options,
    }


_TOKENS = {
    "image_token_id": IMAGE_ID,
    "video_token_id": VIDEO_ID,
    "vision_start_token_id": START_ID,
    "vision_end_token_id": END_ID,
}


_TOKENS_OF_GLM = {
    "image_token_id": IMAGE_ID,
    "image_start_token_id": START_ID,
    "image_end_token_id": END_ID,
    "video_start_token_id": VOCAB_SIZE,
    "video_end_token_id": VOCAB_SIZE + 1,
    "video_token_id": VOCAB_SIZE + 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}


def _qwen2_5_vl() -> transformers.PretrainedConfig:
    return transformers.Qwen2_5_VLConfig(
        text_config=_text(rope_parameters=dict(_ROPE)),
        vision_config={
            "depth": 4,
            "hidden_size": 160,  # heads of 80
            "intermediate_size": 192,
            "num_heads": 2,
            "patch_size": PATCH,
            "window_size": 4 * PATCH,  # windows of two by two merged patches
            "fullatt_block_indexes": [1, 3],
            "out_hidden_size": 256,
            "tokens_per_second": 2,
        },
        **_TOKENS,
    )


def _qwen3_vl(has_experts: bool = False) -> transformers.PretrainedConfig:
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    }
    kind = transformers.Qwen3VLMoeConfig if has_experts else transformers.Qwen3VLConfig
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts["norm_topk_prob"] = True
    return kind(
        text_config=_text(head_dim=64, rope_parameters=rope, **(experts if has_experts else {})),
        vision_config={
            "depth": 2 if has_experts else 3,  # no answer contains an image token
            "hidden_size": 144,  # heads of 72
            "intermediate_size": 192,
            "num_heads": 2,
            "patch_size": PATCH,
            "out_hidden_size": 256,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **_TOKENS,
    )


def _exaone4_5() -> transformers.PretrainedConfig:
    return transformers.Exaone4_5_Config(
        text_config={
            "model_type": "exaone4",
            **_text(head_dim=64, sliding_window=None, layer_types=["full_attention"] * 2),
        },
        vision_config={
            "depth": 2,
            "hidden_size": 160,  # heads of 80
            "intermediate_size": 192,
            "num_heads": 2,
            "num_key_value_heads": 1,
            "patch_size": PATCH,
            "window_size": 4 * PATCH,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 256,
        },
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
    )


def _qwen2_vl() -> transformers.PretrainedConfig:
    return transformers.Qwen2VLConfig(
        text_config=_text(rope_parameters=dict(_ROPE)),
        vision_config={
            "depth": 3,
            "embed_dim": 128,
            "hidden_size": 256,  # the text model's
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": PATCH,
        },
        **_TOKENS,
    )


def _qwen_processor(kind: type, video_kind: Any) -> Callable[[Any], transformers.ProcessorMixin]:
    def make(tokenizer: Any) -> transformers.ProcessorMixin:
        return kind(
            image_processor=transformers.Qwen2VLImageProcessor(
                patch_size=PATCH,
                size={"shortest_edge": SMALLEST, "longest_edge": LARGEST},
                # As in released checkpoints: vLLM normalizes videos with the values for images.
                image_mean=video_kind.image_mean,
                image_std=video_kind.image_std,
            ),
            video_processor=video_kind(
                patch_size=PATCH,
                # Qwen3-VL: total pixels of all frames.
                size={"shortest_edge": SMALLEST, "longest_edge": LARGEST},
                do_sample_frames=False,
                cap_pixels_per_frame=False,
            ),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template,
        )

    return make


MODELS = {
    model.name: model
    for model in (
        VisionModel(
            "qwen2_5_vl",
            _qwen2_5_vl,
            _qwen_processor(transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor),
            needs_metadata=True,
        ),
        VisionModel(
            "qwen3_vl",
            _qwen3_vl,
            _qwen_processor(transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor),
            needs_metadata=True,
        ),
        VisionModel(
            "qwen3_vl_moe",
            partial(_qwen3_vl, has_experts=True),
            _qwen_processor(transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor),
            needs_metadata=True,
        ),
        VisionModel(
            "exaone4_5",
            _exaone4_5,
            _qwen_processor(
                transformers.models.exaone4_5.processing_exaone4_5.Exaone4_5_Processor,
                transformers.Qwen2VLVideoProcessor,
            ),
        ),
        VisionModel(
            "qwen2_vl",
            _qwen2_vl,
            _qwen_processor(transformers.Qwen2VLProcessor, transformers.Qwen2VLVideoProcessor),
        ),
        *(
            VisionModel(
                name,
                partial(qwen3_5_config, _text, PATCH, name.endswith("moe"), **_TOKENS),
                _qwen_processor(transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor),
                needs_metadata=True,
            )
            for name in ("qwen3_5", "qwen3_5_moe")
        ),
        VisionModel(
            "qwen4_exp",
            partial(qwen4_exp_config, _text, PATCH, **_TOKENS),
            _qwen_processor(transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor),
            needs_metadata=True,
            fill=fill_convolutions,
        ),
        VisionModel(
            "internvl",
            lambda: internvl_config(_text, IMAGE_ID),
            internvl_processor,
            takes_videos=False,
        ),
        *(
            VisionModel(
                name,
                partial(glm4v_config, _text, name, **_TOKENS_OF_GLM),
                lambda tokenizer: glm4v_processor(tokenizer, PATCH, SMALLEST, LARGEST),
                takes_videos=False,
                more_tokens=TOKENS_OF_VIDEOS,
            )
            for name in ("glm4v", "glm4v_moe", "glm_ocr")
        ),
        VisionModel(
            "glm5_next",
            partial(glm5_next_config, _text, **_TOKENS_OF_GLM),
            lambda tokenizer: glm5_next_processor(tokenizer, PATCH, SMALLEST, LARGEST),
            takes_videos=False,
            more_tokens=TOKENS_OF_VIDEOS,
            fill=fill_streams_and_pools,
        ),
    )
}


def write_vision_checkpoint(
    name: str, directory: Path, seed: int = 0, encoder_blocks: int | None = None
) -> Path:
    """Writes configuration, fp32 weights, tokenizer and processors; returns the directory.

    encoder_blocks: number of blocks of a Qwen's encoder; None: the small model's
    """
    model = MODELS[name]
    config = model.make_config()
    if encoder_blocks is not None:
        config.vision_config.depth = encoder_blocks
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        fill_with_normal_weights(network)
        model.fill(network)
    network.save_pretrained(directory)
    if config.model_type == "qwen3_vl_moe":
        transpose_experts(directory / "model.safetensors")
    write_tokenizer(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        directory,
        unk_token=EOS,  # otherwise Qwen3.5's class adds one before the special tokens
        model_specific_special_tokens={  # InternVL's processor looks them up
            "start_image_token": VISION_START,
            "end_image_token": VISION_END,
            "context_image_token": IMAGE_PAD,
            "image_token": IMAGE_PAD,
            "video_token": VIDEO_PAD,
        },
    )
    special = [*SPECIAL, *model.more_tokens]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    # The template has placeholders, which the server fills in for images and videos.
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    processor = model.make_processor(tokenizer)
    processor.save_pretrained(directory)
    # vLLM's video loaders read their processor's name from a separate file.
    processor.video_processor.save_pretrained(directory)
    return directory


def prompt(images: int, words: str = "what is this", videos: int = 0) -> str:
    """Returns a prompt with placeholders for images, then for videos."""
    places = [IMAGE_PAD] * images + [VIDEO_PAD] * videos
    return "".join(VISION_START + place + VISION_END for place in places) + words


__all__ = ["BOS", "EOS", "IMAGE_PAD", "MODELS", "VIDEO_PAD", "prompt", "write_vision_checkpoint"]
