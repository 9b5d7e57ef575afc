"""Methods and options of speculative decoding, and which of them this release serves."""

from typing import TYPE_CHECKING

from vllm_davinci.core.errors import RELEASE, ConfigurationError

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

# Their drafters run a model, in the worker and on the device.
WITH_MODEL = ("mtp", "eagle", "eagle3", "draft_model")
SERVED = ("ngram", "suffix", "custom_class", *WITH_MODEL)
# Other methods of vLLM, and why they are not served.
REFUSED = {
    "ngram_gpu": "vLLM compiles it for CUDA; 'ngram' has the same drafts",
    "extract_hidden_states": "it drafts nothing, and hands hidden states to a KV connector",
    "dflash": "its kernel for the inputs of a block of drafts has no stand-in",
    "dspark": "its kernel for the inputs of a block of drafts has no stand-in",
}

# vLLM calls the further layers of many models "mtp". By its class for them, models that are served.
MTP_SERVED = {
    "DeepSeekMTPModel": "DeepSeek-V3, R1",
    "DeepseekV32MTPModel": "DeepSeek-V3.2, GLM-5",
    "ErnieMTPModel": "ERNIE 4.5 with experts",
    "ExaoneMoeMTP": "K-EXAONE",
    "Glm4MoeMTPModel": "GLM-4.5, 4.6, 4.7",
    "HYV3MTPModel": "Hy3",
    "MiMoMTPModel": "MiMo",
    "Qwen3NextMTP": "Qwen3-Next",
    "Qwen3_5MTP": "Qwen3.5",
    "Qwen3_5MoeMTP": "Qwen3.5 with experts",
}
_OWN_DRAFTER = "its drafter in vLLM is a class of its own, which counts nothing on the host"
_STATES = "layers of the model keep states of a kind that is not served"
_IMAGES = "the model takes images, beside which MTP has not been tried"
_UNTRIED = "no small model of it has been tried"
_OTHERS_CHIPS = "vLLM has the model for other vendors' chips alone"
# The others, and why they are not.
MTP_REFUSED = {
    "BailingMoeV25MTPModel": _STATES,
    "BailingMoeV3MTPModel": _STATES,
    "DeepSeekV4MTPModel": _OTHERS_CHIPS,
    "Dots3NoteMTPModel": _OTHERS_CHIPS,
    "Exaone4_5_MTP": _IMAGES,
    "Gemma4MTPModel": _OWN_DRAFTER,
    "Glm4MoeLiteMTPModel": "vLLM reads the model's first layer in its place",
    "Glm5NextMTPModel": _STATES,
    "GlmOcrMTPModel": _IMAGES,
    "HYV4MTPModel": _OTHERS_CHIPS,
    "InklingMTPModel": _OTHERS_CHIPS,
    "InternS2MobiusMTP": _IMAGES,
    "KimiK3MTPModel": _OTHERS_CHIPS,
    "LongCatFlashMTPModel": _UNTRIED,
    "MiMoV2MTPModel": _UNTRIED,
    "MiMoV2OmniMTPModel": _IMAGES,
    "MiniMaxM3MTP": _OTHERS_CHIPS,
    "NemotronHMTPModel": _UNTRIED,
    "OpenPanguMTPModel": _UNTRIED,
    "ParseAuxMTPModel": "vLLM's V1 runner has no drafter for it",
    "Qwen4ExpMTP": _OTHERS_CHIPS,
    "Step3p5MTP": _OWN_DRAFTER,
    "Step5MTP": _OTHERS_CHIPS,
    "TransformersForMTP": _UNTRIED,
    "TransformersMoEForMTP": _UNTRIED,
}


def check_speculation(vllm_config: "VllmConfig") -> None:
    """Raises ConfigurationError for a method or an option that this release does not serve."""
    asked = vllm_config.speculative_config
    if asked is None:
        return
    if asked.method not in SERVED:
        why = REFUSED.get(str(asked.method))
        raise ConfigurationError(
            f"not available in {RELEASE}: speculative decoding of method {asked.method!r} "
            f"(--speculative-config){f', because {why}' if why else ''}. Use one of "
            f"{', '.join(SERVED)}, or start without it."
        )
    refused = _refused(asked) | _refused_beside(asked, vllm_config)
    if reasons := [why for why, is_asked in refused.items() if is_asked]:
        raise ConfigurationError(
            f"not available in {RELEASE}: {'; '.join(reasons)}. Change that in "
            "--speculative-config, or start without it."
        )
    if asked.method in WITH_MODEL:
        _require_fit(asked)


def _refused(asked: "SpeculativeConfig") -> dict[str, bool]:
    """By reason, whether it holds for the options of --speculative-config."""
    return {
        f'rejection_sample_method {asked.rejection_sample_method!r} ("standard" and '
        '"synthetic" are)': asked.rejection_sample_method not in ("standard", "synthetic"),
        **_refused_layers(asked),
        "parallel_drafting": asked.parallel_drafting,
        "use_heterogeneous_vocab": asked.use_heterogeneous_vocab,
        "use_local_argmax_reduction": asked.use_local_argmax_reduction,
        f"draft_lm_head_quantization {asked.draft_lm_head_quantization!r} (the drafter's head is "
        "the model's)": asked.draft_lm_head_quantization is not None,
        "num_speculative_tokens_per_batch_size (a number of drafts for all batches is)": (
            asked.num_speculative_tokens_per_batch_size is not None
        ),
        "enable_adaptive_verification": asked.enable_adaptive_verification,
    }


def _refused_layers(asked: "SpeculativeConfig") -> dict[str, bool]:
    """The same for the model's own layers that predict further tokens."""
    if asked.method == "draft_model":
        read = [*MTP_SERVED, *MTP_REFUSED]
        return {
            f"a drafter whose layers for further tokens are all that vLLM reads of it ({each}); a "
            "model of another family is": True
            for each in asked.draft_model_config.architectures
            if each in read
        }
    if asked.method != "mtp":
        return {}
    others = [each for each in asked.draft_model_config.architectures if each not in MTP_SERVED]
    takes_images = asked.target_model_config.multimodal_config is not None
    return {f"method 'mtp', because {_IMAGES}": takes_images} | {
        f"method 'mtp' of {each}, because {MTP_REFUSED.get(each, _UNTRIED)} (MTP of "
        f"{'; '.join(MTP_SERVED.values())} is)": True
        for each in others
    }


def _refused_beside(asked: "SpeculativeConfig", vllm_config: "VllmConfig") -> dict[str, bool]:
    """By reason, whether it holds for what is asked beside --speculative-config."""
    parallel = vllm_config.parallel_config
    return {
        "speculative decoding over pipeline stages (--pipeline-parallel-size "
        f"{parallel.pipeline_parallel_size}), which compute several batches at a time, and vLLM "
        "hands on the drafts of the newest alone": parallel.pipeline_parallel_size > 1,
    }


def _require_fit(asked: "SpeculativeConfig") -> None:
    """Raises ConfigurationError for a drafter that belongs to another model."""
    drafter, target = asked.draft_model_config, asked.target_model_config
    sizes = {"vocabulary": (drafter.get_vocab_size(), target.get_vocab_size())}
    if asked.method in ("eagle", "mtp"):
        sizes["hidden size"] = (drafter.get_hidden_size(), target.get_hidden_size())
    for what, (own, other) in sizes.items():
        if own != other:
            raise ConfigurationError(
                f"The drafter {drafter.model} has a {what} of {own}, and {target.model} has "
                f"{other}: it drafts for another model. Give one that was made for this model in "
                "--speculative-config."
            )
    tp_sizes = [
        each.tensor_parallel_size
        for each in (asked.draft_parallel_config, asked.target_parallel_config)
    ]
    if tp_sizes[0] != tp_sizes[1]:
        raise ConfigurationError(
            f"The drafter is divided among {tp_sizes[0]} ranks, and the model among {tp_sizes[1]}: "
            f"set draft_tensor_parallel_size to {tp_sizes[1]} in --speculative-config."
        )
