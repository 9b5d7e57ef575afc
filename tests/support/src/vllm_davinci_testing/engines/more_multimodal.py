"""More small multimodal checkpoints: image and audio encoders with sizes of their own."""

from collections.abc import Callable
from typing import Any

import transformers

from vllm_davinci_testing.engines.model_zoo import EOS_ID
from vllm_davinci_testing.engines.multimodal_family import (
    AUDIO,
    BREAK,
    END,
    IDS,
    IMAGE,
    PATCH,
    SIDE,
    VOCAB_SIZE,
    MultimodalFamily,
    text_fields,
    vision_fields,
    written,
)
from vllm_davinci_testing.engines.whisper_checkpoint import SAMPLING_RATE

MELS = 16  # bands of a spectrogram
SECONDS_OF_SOUND = 4  # length of an input, whose encoder joins four outputs into one
TOKENS_OF_LLAMA4 = (
    "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>",
    "<|tile_y_separator|>",
)  # fmt: skip
TOKENS_OF_SPEECH = ("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")


def _id(more: tuple[str, ...], token: str) -> int:
    """Returns the id of a family's own token, after the common ones."""
    return VOCAB_SIZE + more.index(token)


def _paddleocr_vl() -> MultimodalFamily:
    def config() -> transformers.PretrainedConfig:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
        return transformers.PaddleOCRVLConfig(
            text_config=text_fields("paddleocr_vl_text", rope_parameters=rope),
            vision_config=vision_fields("paddleocr_vl_vision"),
            image_token_id=IDS[IMAGE],
            video_token_id=IDS["<video>"],
            vision_start_token_id=IDS[BREAK],
            vision_end_token_id=IDS[END],
            tie_word_embeddings=False,
        )

    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        size = {"shortest_edge": 28 * 28, "longest_edge": 280 * 280}
        return transformers.PaddleOCRVLProcessor(
            image_processor=transformers.PaddleOCRVLImageProcessor(patch_size=PATCH, size=size),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template,
        )

    def change(network: Any) -> None:
        network.model.visual.vision_model.embeddings.interpolation_align_corners = False

    return MultimodalFamily(
        written(config, processor, tokens={"image_token": IMAGE}),
        place=BREAK + IMAGE + END,
        changed="align_corners = False in transformers: vLLM interpolates positions that way",
        change=change,
    )


def _llama4() -> MultimodalFamily:
    def config() -> transformers.PretrainedConfig:
        text = text_fields(
            "llama4_text",
            vocab_size=VOCAB_SIZE + len(TOKENS_OF_LLAMA4),
            intermediate_size_mlp=192,
            num_local_experts=4,
            num_hidden_layers=4,
            interleave_moe_layer_step=2,
            attention_chunk_size=128,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
        vision = vision_fields(
            "llama4_vision_model",
            intermediate_size=512,
            vision_output_dim=128,
            projector_input_dim=128,
            projector_output_dim=128,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
        return transformers.Llama4Config(
            text_config=text,
            vision_config=vision,
            boi_token_index=_id(TOKENS_OF_LLAMA4, "<|image_start|>"),
            eoi_token_index=_id(TOKENS_OF_LLAMA4, "<|image_end|>"),
            image_token_index=_id(TOKENS_OF_LLAMA4, "<|patch|>"),
        )

    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        size = {"height": SIDE, "width": SIDE}
        return transformers.Llama4Processor(
            image_processor=transformers.Llama4ImageProcessor(size=size, max_patches=4),
            tokenizer=tokenizer,
            patch_size=PATCH,
            chat_template=tokenizer.chat_template,
        )

    return MultimodalFamily(
        written(config, processor, more_tokens=TOKENS_OF_LLAMA4), place="<|image|>"
    )


def _sound_processor(kind: str, **options: Any) -> Callable[[Any], transformers.ProcessorMixin]:
    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        return getattr(transformers, kind)(
            feature_extractor=transformers.WhisperFeatureExtractor(
                feature_size=MELS, sampling_rate=SAMPLING_RATE, chunk_length=SECONDS_OF_SOUND
            ),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template,
            **options,
        )

    return processor


def _glmasr() -> MultimodalFamily:
    def config() -> transformers.PretrainedConfig:
        return transformers.GlmAsrConfig(
            audio_config={
                "model_type": "glmasr_encoder",
                "hidden_size": 128,
                "intermediate_size": 512,  # four outputs are one input of the projector
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": MELS,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                },
            },
            text_config=text_fields(),
            audio_token_id=IDS[AUDIO],
            tie_word_embeddings=False,
        )

    return MultimodalFamily(
        written(
            config,
            _sound_processor("GlmAsrProcessor", audio_token=AUDIO),
            "AutoModelForMultimodalLM",
        ),
        place=f"<|audio_bos|>{AUDIO}<|audio_eos|>",
        modality="audio",
        auto_class="AutoModelForMultimodalLM",
    )


def _qwen3_asr() -> MultimodalFamily:
    def config() -> transformers.PretrainedConfig:
        return transformers.Qwen3ASRConfig(
            audio_config={
                "model_type": "qwen3_asr_encoder",
                "num_mel_bins": MELS,
                "d_model": 128,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 192,
                "downsample_hidden_size": 32,
                "output_dim": 128,
            },
            text_config=text_fields("qwen3", vocab_size=VOCAB_SIZE + len(TOKENS_OF_SPEECH)),
            audio_token_id=_id(TOKENS_OF_SPEECH, "<|audio_pad|>"),
            pad_token_id=EOS_ID,
            eos_token_id=EOS_ID,
        )

    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        return transformers.Qwen3ASRProcessor(
            feature_extractor=transformers.Qwen3ASRFeatureExtractor(feature_size=MELS),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template,
        )

    names = {
        "audio_token": "<|audio_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    return MultimodalFamily(
        written(config, processor, "AutoModelForMultimodalLM", names, TOKENS_OF_SPEECH),
        place="<|audio_start|><|audio_pad|><|audio_end|>",
        modality="audio",
        auto_class="AutoModelForMultimodalLM",
    )


def _gemma4() -> MultimodalFamily:
    patch = 4  # pools of 3 by 3 patches, and 70 tokens, the fewest that its processor supports

    def config() -> transformers.PretrainedConfig:
        text = text_fields(
            "gemma4_text",
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=12,
            global_head_dim=64,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCAB_SIZE,
            tie_word_embeddings=True,
        )
        return transformers.Gemma4Config(
            text_config=text,
            vision_config=vision_fields(
                "gemma4_vision",
                patch_size=patch,
                num_key_value_heads=2,
                position_embedding_size=64,
                default_output_length=70,
            ),
            audio_config=None,
            boi_token_id=IDS[BREAK],
            eoi_token_id=IDS[END],
            image_token_id=IDS[IMAGE],
            video_token_id=IDS["<video>"],
            audio_token_id=IDS[AUDIO],
            boa_token_id=IDS["<|audio_bos|>"],
            eoa_token_index=IDS["<|audio_eos|>"],
        )

    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        sizes = {"patch_size": patch, "max_soft_tokens": 70}
        return transformers.Gemma4Processor(
            feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
            image_processor=transformers.Gemma4ImageProcessor(**sizes),
            tokenizer=tokenizer,
            video_processor=transformers.Gemma4VideoProcessor(**sizes),
            chat_template=tokenizer.chat_template,
            image_seq_length=70,
        )

    names = {
        "image_token": IMAGE,
        "boi_token": BREAK,
        "eoi_token": END,
        "audio_token": AUDIO,
        "boa_token": "<|audio_bos|>",
        "eoa_token": "<|audio_eos|>",
    }
    return MultimodalFamily(written(config, processor, tokens=names, more_tokens=("<|video|>",)))


FAMILIES = {
    "gemma4": _gemma4(),
    "glmasr": _glmasr(),
    "llama4": _llama4(),
    "paddleocr_vl": _paddleocr_vl(),
    "qwen3_asr": _qwen3_asr(),
}
