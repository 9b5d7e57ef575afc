"""The definitions in this package, for lookup by core."""

from collections.abc import Mapping

# Version of vllm_davinci.core.components.ModelProvider for which this module was written.
api_version = 1

# Architecture in config.json -> class path, in the form of vLLM's ModelRegistry.
SEQUENCE_PARALLEL = {
    "DeepseekV2ForCausalLM": "vllm_davinci.models.deepseek:NPUDeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "vllm_davinci.models.deepseek:NPUDeepseekV3ForCausalLM",
    "LlamaForCausalLM": "vllm_davinci.models.llama:NPULlamaForCausalLM",
    "MistralForCausalLM": "vllm_davinci.models.llama:NPUMistralForCausalLM",
    "Qwen2ForCausalLM": "vllm_davinci.models.qwen:NPUQwen2ForCausalLM",
    "Qwen3ForCausalLM": "vllm_davinci.models.qwen:NPUQwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "vllm_davinci.models.qwen:NPUQwen3MoeForCausalLM",
}
# Drafters: multi-token prediction, and blocks of drafts.
DRAFTERS = {
    "DeepSeekV4MTPModel": "vllm_davinci.models.deepseek_v4_mtp:NPUDeepSeekV4MTP",
    "DSparkDraftModel": "vllm_davinci.models.deepseek_v4_dspark:NPUDSparkDeepseekV4",
    "DeepSeekMTPModel": "vllm_davinci.models.deepseek_mtp:NPUDeepSeekMTP",
    "DeepseekV32MTPModel": "vllm_davinci.models.deepseek_mtp:NPUDeepSeekMTP",
    "Qwen4ExpMTP": "vllm_davinci.models.qwen4_exp_mtp:NPUQwen4ExpMTP",
    "Glm5NextMTPModel": "vllm_davinci.models.glm5_next_mtp:NPUGlm5NextMTP",
}
MODELS = {
    **SEQUENCE_PARALLEL,
    **DRAFTERS,
    "AriaForConditionalGeneration": "vllm_davinci.models.idefics3:NPUAriaForConditionalGeneration",
    "DeepseekV4ForCausalLM": "vllm_davinci.models.deepseek_v4:NPUDeepseekV4ForCausalLM",
    "Gemma4ForConditionalGeneration": (
        "vllm_davinci.models.gemma4:NPUGemma4ForConditionalGeneration"
    ),
    "Glm5NextForCausalLM": "vllm_davinci.models.glm5_next:NPUGlm5NextForCausalLM",
    "Glm5NextForConditionalGeneration": (
        "vllm_davinci.models.glm5_next:NPUGlm5NextForConditionalGeneration"
    ),
    "GlmOcrForConditionalGeneration": "vllm_davinci.models.ocr:NPUGlmOcrForConditionalGeneration",
    "HYV4ForCausalLM": "vllm_davinci.models.hy_v4:NPUHYV4ForCausalLM",
    "Idefics3ForConditionalGeneration": (
        "vllm_davinci.models.idefics3:NPUIdefics3ForConditionalGeneration"
    ),
    "InternS1ForConditionalGeneration": (
        "vllm_davinci.models.internvl:NPUInternS1ForConditionalGeneration"
    ),
    "InternVLForConditionalGeneration": (
        "vllm_davinci.models.internvl:NPUInternS1ForConditionalGeneration"
    ),
    "KimiK3ForConditionalGeneration": (
        "vllm_davinci.models.kimi_k3:NPUKimiK3ForConditionalGeneration"
    ),
    "KimiLinearForCausalLM": "vllm_davinci.models.kimi_linear:NPUKimiLinearForCausalLM",
    "MiniMaxM3SparseForCausalLM": "vllm_davinci.models.minimax_m3:NPUMiniMaxM3ForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration": (
        "vllm_davinci.models.minimax_m3_vl:NPUMiniMaxM3ForConditionalGeneration"
    ),
    "NemotronHForCausalLM": "vllm_davinci.models.nemotron_h:NPUNemotronHForCausalLM",
    "PaddleOCRVLForConditionalGeneration": (
        "vllm_davinci.models.ocr:NPUPaddleOCRVLForConditionalGeneration"
    ),
    "Qwen2VLForConditionalGeneration": (
        "vllm_davinci.models.qwen_vl:NPUQwen2VLForConditionalGeneration"
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "vllm_davinci.models.qwen_vl:NPUQwen2_5_VLForConditionalGeneration"
    ),
    "Qwen3_5ForConditionalGeneration": (
        "vllm_davinci.models.qwen3_5:NPUQwen3_5ForConditionalGeneration"
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        "vllm_davinci.models.qwen3_5:NPUQwen3_5MoeForConditionalGeneration"
    ),
    "Qwen4ExpForCausalLM": "vllm_davinci.models.qwen4_exp:NPUQwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration": (
        "vllm_davinci.models.qwen4_exp:NPUQwen4ExpForConditionalGeneration"
    ),
    "Qwen3VLForConditionalGeneration": (
        "vllm_davinci.models.qwen3_vl:NPUQwen3VLForConditionalGeneration"
    ),
    "SmolVLMForConditionalGeneration": (
        "vllm_davinci.models.idefics3:NPUSmolVLMForConditionalGeneration"
    ),
}


def models() -> Mapping[str, str]:
    """Architecture -> class path."""
    return MODELS


def sequence_parallel_architectures() -> frozenset[str]:
    """Architectures whose layers can leave each rank with its shard of the tokens."""
    return frozenset(SEQUENCE_PARALLEL)
