"""Small checkpoints of Qwen's Omni models, of BLIP-2 and LFM2-VL."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from vllm_davinci_testing.engines.multimodal_family import (
    AUDIO,
    BREAK,
    END,
    GLOBAL,
    IDS,
    IMAGE,
    PATCH,
    SIDE,
    VIDEO,
    MultimodalFamily,
    text_fields,
    vision_fields,
    written,
)
from vllm_davinci_testing.engines.whisper_checkpoint import SAMPLING_RATE

MELS = 16  # bands of a spectrogram
SECONDS_OF_SOUND = 4
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
TOKENS_OF_OMNI = {
    "image_token": IMAGE,
    "audio_token": AUDIO,
    "video_token": VIDEO,
    "vision_bos_token": BREAK,
    "vision_eos_token": END,
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}


def _answers(network: Any) -> None:
    """Calls the part that writes text: a whole Omni model can only generate."""
    network.forward = network.thinker.forward


def _text_alone(network: Any) -> None:
    """Answers requests without an image, which transformers' whole network refuses."""
    whole = network.forward
    network.forward = lambda **inputs: (
        whole if "pixel_values" in inputs else network.language_model
    )(**inputs)


def _omni_processor(version: str, patch: int, tokenizer: Any) -> transformers.ProcessorMixin:
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (20 * patch) ** 2}
    return getattr(transformers, f"{version}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(patch_size=patch, size=size),
        video_processor=transformers.Qwen2VLVideoProcessor(patch_size=patch, size=size),
        feature_extractor=transformers.WhisperFeatureExtractor(
            feature_size=MELS, sampling_rate=SAMPLING_RATE, chunk_length=SECONDS_OF_SOUND
        ),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


def _omni(
    version: str,
    audio: dict[str, Any],
    vision: dict[str, Any],
    text: dict[str, Any],
    modality: str,
    waits_for: str = "",
) -> MultimodalFamily:
    """Describes an Omni model without its talker. modality: of the family's requests"""

    def config() -> transformers.PretrainedConfig:
        index = "index" if version == "Qwen2_5Omni" else "id"
        return getattr(transformers, f"{version}Config")(
            thinker_config={
                "audio_config": {
                    "num_mel_bins": MELS,
                    "d_model": 128,
                    "encoder_layers": 2,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 192,
                    "output_dim": 128,
                    **audio,
                },
                "vision_config": {
                    "depth": 2,
                    "hidden_size": 128,
                    "intermediate_size": 192,
                    "num_heads": 2,
                    "out_hidden_size": 128,
                    **vision,
                },
                "text_config": {**text_fields(), **text},
                f"audio_token_{index}": IDS[AUDIO],
                f"image_token_{index}": IDS[IMAGE],
                f"video_token_{index}": IDS[VIDEO],
                "audio_start_token_id": IDS["<|audio_bos|>"],
                "audio_end_token_id": IDS["<|audio_eos|>"],
                "vision_start_token_id": IDS[BREAK],
                "vision_end_token_id": IDS[END],
            },
            enable_audio_output=False,
        )

    processor = partial(_omni_processor, version, vision["patch_size"])
    write_parts = written(config, processor, "AutoModelForMultimodalLM", TOKENS_OF_OMNI)

    def write(directory: Path) -> Path:
        torch.save({}, directory / "spk_dict.pt")  # transformers reads voices of Qwen2.5-Omni
        return write_parts(directory)

    place = BREAK + IMAGE + END if modality == "image" else f"<|audio_bos|>{AUDIO}<|audio_eos|>"
    auto_class = f"{version}ForConditionalGeneration"
    return MultimodalFamily(
        write,
        place=place,
        modality=modality,
        auto_class=auto_class,
        waits_for=waits_for,
        change=_answers,
    )


def _qwen2_5_omni(modality: str) -> MultimodalFamily:
    vision = {"patch_size": PATCH, "window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    text = {"model_type": "qwen2_5_omni_text", "rope_parameters": ROPE}
    audio = {"n_window": 20, "max_source_positions": 200}
    waits = "vLLM runs transformers' encoder, which reads lengths from the device"
    return _omni("Qwen2_5Omni", audio, vision, text, modality, waits)


def _qwen3_omni(modality: str) -> MultimodalFamily:
    vision = {
        "patch_size": 16,
        "num_position_embeddings": 64,
        "image_size": 128,
        "apply_vit_abs_pos_embed": True,
        "deepstack_visual_indexes": [0],
    }
    text = {
        "model_type": "qwen3_omni_moe_text",
        "rope_parameters": {**ROPE, "mrope_interleaved": True},
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    audio = {"downsample_hidden_size": 32, "n_window": 50, "n_window_infer": 100}
    return _omni("Qwen3OmniMoe", audio, vision, text, modality)


def _blip_2() -> MultimodalFamily:
    queries = 8

    def config() -> transformers.PretrainedConfig:
        return transformers.Blip2Config(
            vision_config=vision_fields("blip_2_vision_model"),
            qformer_config={
                "hidden_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 192,
                "encoder_hidden_size": 128,
            },
            text_config=text_fields("opt", ffn_dim=192, word_embed_proj_dim=128),
            num_query_tokens=queries,
            image_token_index=IDS[IMAGE],
        )

    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        size = {"height": SIDE, "width": SIDE}
        return transformers.Blip2Processor(
            transformers.BlipImageProcessor(size=size), tokenizer, num_query_tokens=queries
        )

    return MultimodalFamily(written(config, processor), place="", change=_text_alone)


def _lfm2_vl() -> MultimodalFamily:
    def config() -> transformers.PretrainedConfig:
        return transformers.Lfm2VlConfig(
            text_config=text_fields(
                "lfm2",
                layer_types=["conv", "full_attention"],
                block_dim=128,
                conv_dim=128,
                block_auto_adjust_ff_dim=False,
            ),
            vision_config=vision_fields(
                "siglip2_vision_model", num_patches=64, vision_use_head=False
            ),
            image_token_id=IDS[IMAGE],
            projector_hidden_size=128,
            tie_word_embeddings=True,
        )

    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        return transformers.Lfm2VlProcessor(
            image_processor=transformers.Lfm2VlImageProcessor(
                encoder_patch_size=PATCH,
                min_image_tokens=4,
                max_image_tokens=64,
                do_image_splitting=False,
                tile_size=112,
                max_num_patches=256,
            ),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template,
        )

    names = {
        "image_token": IMAGE,
        "image_start_token": BREAK,
        "image_end_token": END,
        "image_thumbnail": GLOBAL,
    }
    return MultimodalFamily(
        written(config, processor, tokens=names),
        waits_for="its encoder reads from the device how many patches each image has",
    )


FAMILIES = {
    "blip-2": _blip_2(),
    "lfm2_vl": _lfm2_vl(),
    "qwen2_5_omni": _qwen2_5_omni("image"),
    "qwen2_5_omni audio": _qwen2_5_omni("audio"),
    "qwen3_omni_moe": _qwen3_omni("image"),
    "qwen3_omni_moe audio": _qwen3_omni("audio"),
}
