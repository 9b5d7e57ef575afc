"""A small random checkpoint of each multimodal family.

Families of vision_zoo and other files are referenced by name. `unmade_families` lists families
without a small checkpoint.
"""

from collections.abc import Callable
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

from vllm_davinci_testing.engines import (
    minimax_checkpoint,
    more_multimodal,
    omni_multimodal,
    vision_zoo,
)
from vllm_davinci_testing.engines.gemma3_checkpoint import gemma3_prompt, write_gemma3
from vllm_davinci_testing.engines.kimi_k3_family import KIMI_K3
from vllm_davinci_testing.engines.minimax_checkpoint import write_minimax
from vllm_davinci_testing.engines.model_zoo import EOS_ID
from vllm_davinci_testing.engines.multimodal_family import (
    AROUND,
    AUDIO,
    BREAK,
    END,
    GLOBAL,
    IDS,
    IMAGE,
    PATCH,
    PINPOINTS,
    SIDE,
    VIDEO,
    MultimodalFamily,
    text_fields,
    vision_fields,
    written,
)
from vllm_davinci_testing.engines.paligemma_checkpoint import write_paligemma
from vllm_davinci_testing.engines.whisper_checkpoint import SAMPLING_RATE

# Qwen2-Audio's inputs are padded to this length, the only one that vLLM accepts.
SECONDS_OF_SOUND = 30


def _llava(kind: str, **grid: Any) -> MultimodalFamily:
    """Describes a LLaVA. grid: possible tile grids of images; empty for the first LLaVA"""

    def config() -> transformers.PretrainedConfig:
        return getattr(transformers, f"{kind}Config")(
            text_config=text_fields(),
            vision_config=vision_fields("clip_vision_model", projection_dim=64),
            image_token_index=IDS[IMAGE],
            **grid,
        )

    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        images = transformers.LlavaNextImageProcessor if grid else transformers.CLIPImageProcessor
        return getattr(transformers, f"{kind}Processor")(
            image_processor=images(
                size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, **grid
            ),
            tokenizer=tokenizer,
            patch_size=PATCH,
            vision_feature_select_strategy="default",
            image_token=IMAGE,
            num_additional_image_tokens=1,
        )

    return MultimodalFamily(written(config, processor))


def _llava_onevision() -> MultimodalFamily:
    def config() -> transformers.PretrainedConfig:
        return transformers.LlavaOnevisionConfig(
            text_config=text_fields("qwen2"),
            vision_config=vision_fields("siglip_vision_model", vision_use_head=False),
            image_token_index=IDS[IMAGE],
            video_token_index=IDS[VIDEO],
            image_grid_pinpoints=PINPOINTS,
        )

    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        size = {"height": SIDE, "width": SIDE}
        return transformers.LlavaOnevisionProcessor(
            image_processor=transformers.LlavaOnevisionImageProcessor(
                size=size, image_grid_pinpoints=PINPOINTS
            ),
            tokenizer=tokenizer,
            video_processor=transformers.LlavaOnevisionVideoProcessor(size=size),
            num_image_tokens=(SIDE // PATCH) ** 2,
            vision_feature_select_strategy="full",
            image_token=IMAGE,
            video_token=VIDEO,
        )

    return MultimodalFamily(written(config, processor))


def _pixtral_processor(merged: int) -> Callable[[Any], transformers.ProcessorMixin]:
    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        return transformers.PixtralProcessor(
            image_processor=transformers.PixtralImageProcessor(
                size={"longest_edge": 2 * SIDE},
                patch_size={"height": PATCH * merged, "width": PATCH * merged},
            ),
            tokenizer=tokenizer,
            patch_size=PATCH,
            spatial_merge_size=merged,
            image_token=IMAGE,
            image_break_token=BREAK,
            image_end_token=END,
        )

    return processor


def _of_pixtral(
    make: Callable[..., transformers.PretrainedConfig], merged: int, **options: Any
) -> MultimodalFamily:
    def config() -> transformers.PretrainedConfig:
        return make(
            text_config=text_fields("mistral"),
            vision_config=vision_fields("pixtral", image_size=2 * SIDE, head_dim=64),
            image_token_index=IDS[IMAGE],
            **options,
        )

    return MultimodalFamily(written(config, _pixtral_processor(merged)))


def _pixtral() -> MultimodalFamily:
    whole = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return _of_pixtral(transformers.LlavaConfig, 1, **whole)


def _idefics3(
    config_class: str = "Idefics3Config",
    kind: str = "idefics3_vision",
    processors: tuple[str, ...] = ("Idefics3Processor", "Idefics3ImageProcessor"),
    patch: int = PATCH,
    side: int = SIDE,
) -> MultimodalFamily:
    def config() -> transformers.PretrainedConfig:
        return getattr(transformers, config_class)(
            text_config=text_fields(),
            vision_config=vision_fields(kind, patch_size=patch, image_size=side),
            image_token_id=IDS[IMAGE],
            scale_factor=2,
            pad_token_id=EOS_ID,
            tie_word_embeddings=False,
        )

    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        whole, images, *videos = (getattr(transformers, name) for name in processors)
        sizes = {"size": {"longest_edge": 2 * side}, "max_image_size": {"longest_edge": side}}
        more = {"video_processor": videos[0](**sizes)} if videos else {}
        return whole(
            image_processor=images(**sizes),
            tokenizer=tokenizer,
            image_seq_len=(side // patch // 2) ** 2,
            chat_template=tokenizer.chat_template,
            **more,
        )

    names = {
        "fake_image_token": AROUND,
        "image_token": IMAGE,
        "global_image_token": GLOBAL,
        "end_of_utterance_token": "<end_of_utterance>",
    }
    return MultimodalFamily(
        written(config, processor, tokens=names),
    )


def _aria() -> MultimodalFamily:
    """Squares of 7 rows and columns of patches: images of other shapes are padded."""
    side, patch = 980, 140  # the side is its processor's

    def config() -> transformers.PretrainedConfig:
        return transformers.AriaConfig(
            text_config=text_fields("aria_text", moe_num_experts=4, moe_num_shared_experts=1),
            vision_config=vision_fields("idefics3_vision", image_size=side, patch_size=patch),
            image_token_index=IDS[IMAGE],
            projector_patch_to_query_dict={(side // patch) ** 2: 32},
        )

    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        return transformers.AriaProcessor(
            image_processor=transformers.AriaImageProcessor(),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template,
            size_conversion={side: 32},
        )

    return MultimodalFamily(written(config, processor, tokens={"image_token": IMAGE}))


def _qwen2_audio() -> MultimodalFamily:
    auto_class = "Qwen2AudioForConditionalGeneration"

    def config() -> transformers.PretrainedConfig:
        return transformers.Qwen2AudioConfig(
            audio_config={
                "num_mel_bins": 16,
                "d_model": 128,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 192,
                "max_source_positions": 50 * SECONDS_OF_SOUND,
            },
            text_config=text_fields("qwen2"),
            audio_token_index=IDS[AUDIO],
        )

    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        return transformers.Qwen2AudioProcessor(
            feature_extractor=transformers.WhisperFeatureExtractor(
                feature_size=16, sampling_rate=SAMPLING_RATE, chunk_length=SECONDS_OF_SOUND
            ),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template,
        )

    return MultimodalFamily(
        written(config, processor, "AutoModelForMultimodalLM"),
        place=f"<|audio_bos|>{AUDIO}<|audio_eos|>",
        modality="audio",
        auto_class=auto_class,
    )


def _cohere2_vision() -> MultimodalFamily:
    def config() -> transformers.PretrainedConfig:
        return transformers.Cohere2VisionConfig(
            text_config=text_fields("cohere2", layer_types=["full_attention"] * 2),
            vision_config=vision_fields("siglip_vision_model", vision_use_head=False),
            image_token_id=IDS[IMAGE],
            alignment_intermediate_size=192,
        )

    def processor(tokenizer: Any) -> transformers.ProcessorMixin:
        return transformers.Cohere2VisionProcessor(
            image_processor=transformers.Cohere2VisionImageProcessor(
                size={"height": SIDE, "width": SIDE},
                patch_size=SIDE // PATCH // 2,
                crop_to_patches=True,
                min_patches=1,
                max_patches=4,
            ),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template,
        )

    names = {
        "boi_token": BREAK,
        "eoi_token": END,
        "image_token": IMAGE,
        "img_line_break_token": AROUND,
    }
    return MultimodalFamily(written(config, processor, tokens=names))


def _of_vision_zoo(name: str) -> MultimodalFamily:
    return MultimodalFamily(
        lambda directory: vision_zoo.write_vision_checkpoint(name, directory),
        place=vision_zoo.prompt(1, ""),
    )


FAMILIES: dict[str, MultimodalFamily] = {
    "aria": _aria(),
    "cohere2_vision": _cohere2_vision(),
    "gemma3": MultimodalFamily(write_gemma3, place=gemma3_prompt("", "")),
    "idefics3": _idefics3(),
    "kimi_k3": KIMI_K3,
    "llava": _llava("Llava"),
    "llava_next": _llava("LlavaNext", image_grid_pinpoints=PINPOINTS),
    "llava_onevision": _llava_onevision(),
    "minimax_m3_vl": MultimodalFamily(write_minimax, place=minimax_checkpoint.IMAGE),
    "mistral3": _of_pixtral(transformers.Mistral3Config, 2, spatial_merge_size=2),
    "paligemma": MultimodalFamily(write_paligemma, place=""),
    "pixtral": _pixtral(),
    "qwen2_audio": _qwen2_audio(),
    "smolvlm": _idefics3(
        "SmolVLMConfig",
        "smolvlm_vision",
        ("SmolVLMProcessor", "SmolVLMImageProcessor", "SmolVLMVideoProcessor"),
        patch=8,  # transformers requires a multiple of this as tokens per image
        side=64,
    ),
    **more_multimodal.FAMILIES,
    **omni_multimodal.FAMILIES,
    **{name: _of_vision_zoo(name) for name in vision_zoo.MODELS},
}


# Families without a checkpoint here, and the reason. Others only wait for a small configuration and
# a processor.
UNMADE = {
    "qianfan_ocr": "transformers writes its tensors under names that vLLM does not read",
    "diffusion_gemma": "writes blocks by diffusion: no greedy token follows from those before it",
    "ernie4_5_vl_moe": "vLLM reads fields that transformers' configuration keeps in text_config",
    "granite_speech": "its spectrograms need the package torchaudio",
    "granite_speech_plus": "its spectrograms need the package torchaudio",
    "gemma3n": "its encoder of images is in the package timm",
    "llava_next_video": "its file has image_newline, which vLLM's definition lacks",
    "shieldgemma2": "classifies images and writes no text",
    "voxtral": "vLLM reads its prompts with mistral_common's tokenizers, and all of them are large",
}


def unmade_families() -> dict[str, str]:
    """Returns, sorted, the multimodal types of both libraries that this module lacks, with
    reasons.
    """
    from vllm.model_executor.models import registry

    by_class = {
        name: model_type
        for mapping in (
            modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )
        for model_type, name in mapping.items()
        if isinstance(name, str)
    }
    shared = {by_class[name] for name in registry._MULTIMODAL_MODELS if name in by_class}
    later = "no small configuration and processor are written yet"
    return {name: UNMADE.get(name, later) for name in sorted(shared - {*FAMILIES})}
