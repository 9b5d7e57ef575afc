"""Speculative decoding: the methods and options that this release supports."""

from collections.abc import Callable
from typing import Any

from vllm_davinci.core.config.architectures import ARCHITECTURES, IMAGES, UNTRIED, takes_images
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import Engine, Feature, refused

FLAG = "--speculative-config"
# Methods whose drafters run a model on the device.
WITH_MODEL = ("mtp", "eagle", "eagle3", "draft_model", "dspark")
# Methods whose drafters are Python on the host.
ON_HOST = ("suffix", "custom_class")
SERVED = ("ngram", *ON_HOST, *WITH_MODEL)
# Other methods of vLLM, and why they are not supported.
REFUSED = {
    "ngram_gpu": "vLLM compiles it for CUDA; 'ngram' has the same drafts",
    "extract_hidden_states": "it drafts nothing: it passes hidden states to a KV connector",
    "dflash": "no small model of it has been tried",
}
# The supported drafter of method "dspark", and required fields of its checkpoint's configuration.
DSPARK = "DSparkDraftModel"
DSPARK_FIELDS = ("dspark_target_layer_ids", "dspark_markov_rank", "dspark_noise_token_id")
# Supported drafters of method "mtp" (extra layers of many models): vLLM's class -> the models.
MTP_SERVED = {name: row.drafts_for for name, row in ARCHITECTURES.items() if row.drafts_for}
MTP_REFUSED = {name: row.no_drafts for name, row in ARCHITECTURES.items() if row.no_drafts}


def _asked(engine: Engine) -> Any:
    return engine.vllm.speculative_config


def _is_other_method(engine: Engine) -> bool:
    return _asked(engine) is not None and _asked(engine).method not in SERVED


def method_on_host(asked: Any) -> str | None:
    """The method that `settle` has replaced by "ngram", or None.

    asked: vLLM's SpeculativeConfig, whose model is "ngram", "suffix", or the user's class
    """
    if asked.method != "ngram" or asked.model in (None, "ngram"):
        return None
    return "suffix" if asked.model == "suffix" else "custom_class"


def settle(engine: Engine) -> None:
    """Raises ConfigurationError for a drafter that does not match the model."""
    asked = _asked(engine)
    if asked.method in ON_HOST:
        # vLLM's V2 runner lacks these methods; our drafter replaces the runner's n-gram drafter.
        asked.method, asked.prompt_lookup_min, asked.prompt_lookup_max = "ngram", 1, 1
        reason = "the host drafts after each step, and the number of drafts varies"
        engine.set(engine.vllm.scheduler_config, "async_scheduling", False, reason)
    if asked.method not in WITH_MODEL:
        return
    drafter, target = asked.draft_model_config, asked.target_model_config
    if asked.method == "dspark" and (
        missing := [
            each for each in DSPARK_FIELDS if getattr(drafter.hf_config, each, None) is None
        ]
    ):
        raise ConfigurationError(
            f"{FLAG}: the checkpoint {drafter.model} has no DSpark layers, because its config.json "
            f"lacks {', '.join(missing)}. Use method 'mtp', or a checkpoint with these layers."
        )
    sizes = {"vocabulary": (drafter.get_vocab_size(), target.get_vocab_size())}
    if asked.method in ("eagle", "mtp"):
        sizes["hidden size"] = (drafter.get_hidden_size(), target.get_hidden_size())
    for what, (own, other) in sizes.items():
        if own != other:
            raise ConfigurationError(
                f"{FLAG}: the drafter {drafter.model} has a {what} of {own}, and {target.model} "
                f"has {other}, so it drafts for another model. Name one made for this model."
            )
    tp_sizes = [
        each.tensor_parallel_size
        for each in (asked.draft_parallel_config, asked.target_parallel_config)
    ]
    if tp_sizes[0] != tp_sizes[1]:
        raise ConfigurationError(
            f"{FLAG}: draft_tensor_parallel_size ({tp_sizes[0]}) must equal the model's tensor "
            f"parallel size ({tp_sizes[1]}). Set it to {tp_sizes[1]}."
        )


def _other_mtp(engine: Engine) -> list[str]:
    """Unsupported drafters of method "mtp"."""
    asked = _asked(engine)
    if asked is None or asked.method != "mtp":
        return []
    return [each for each in asked.draft_model_config.architectures if each not in MTP_SERVED]


def _why_not_mtp(engine: Engine) -> str:
    served = f"MTP of {'; '.join(MTP_SERVED.values())} is"
    reasons = [f"{each}: {MTP_REFUSED.get(each, UNTRIED)}" for each in _other_mtp(engine)]
    return f"{'; '.join(reasons)} ({served})"


def _layers_alone(engine: Engine) -> list[str]:
    """Draft models of which vLLM reads only the multi-token prediction layers."""
    asked = _asked(engine)
    if asked is None or asked.method != "draft_model":
        return []
    read = {*MTP_SERVED, *MTP_REFUSED}
    return [each for each in asked.draft_model_config.architectures if each in read]


def _refused(
    option: str, title: str, is_given: Callable[[Any], bool], because: str = ""
) -> Feature:
    """An option of --speculative-config that is not served."""
    return Feature(
        f"{option} of {FLAG}",
        title,
        lambda engine: (
            _asked(engine) is not None and not _is_other_method(engine) and is_given(_asked(engine))
        ),
        is_served=False,
        because=because,
        as_given=lambda engine: f"{option} {getattr(_asked(engine), option)!r} of {FLAG}",
    )


FEATURES = (
    Feature(
        FLAG,
        "speculative decoding",
        lambda e: _asked(e) is not None,
        excludes={
            "--pipeline-parallel-size": "pipeline stages compute several batches at a time, and "
            "vLLM passes on only the newest batch's drafts"
        },
        settle=settle,
    ),
    Feature(
        f"several MTP modules of {FLAG}",
        "MTP of several modules",
        lambda e: (asked := _asked(e)) is not None and asked.use_multi_module_mtp(),
    ),
    refused(
        f"method of {FLAG}",
        "other methods of speculative decoding",
        _is_other_method,
        as_given=lambda e: f"method {_asked(e).method!r} of {FLAG}",
        because=lambda e: REFUSED.get(str(_asked(e).method), ""),
        instead=f"Use one of {', '.join(SERVED)}.",
    ),
    refused(
        f"method 'mtp' of {FLAG}",
        "MTP of other models",
        lambda e: bool(_other_mtp(e)),
        because=_why_not_mtp,
    ),
    refused(
        f"method 'mtp' of {FLAG} with images",
        "MTP of models with images",
        lambda e: (
            _asked(e) is not None
            and _asked(e).method == "mtp"
            and takes_images(_asked(e).target_model_config)
        ),
        because=IMAGES,
    ),
    refused(
        f"method 'dspark' of {FLAG}",
        "DSpark of other models",
        lambda e: (
            (asked := _asked(e)) is not None
            and asked.method == "dspark"
            and asked.draft_model_config.architectures != [DSPARK]
        ),
        because="only DSpark of DeepSeek-V4 is supported",
    ),
    refused(
        f"method 'draft_model' of {FLAG}",
        "a drafter of which vLLM reads only the multi-token prediction layers",
        lambda e: bool(_layers_alone(e)),
        because=lambda e: f"vLLM reads only {', '.join(_layers_alone(e))} of it",
        instead="Use a drafter of another family.",
    ),
    _refused(
        "rejection_sample_method",
        "another rejection method",
        lambda asked: asked.rejection_sample_method not in ("standard", "synthetic"),
        'only "standard" and "synthetic" are supported',
    ),
    _refused(
        "parallel_drafting",
        "parallel drafts",
        lambda asked: asked.parallel_drafting and asked.method != "dspark",  # vLLM sets it
    ),
    _refused(
        "use_heterogeneous_vocab",
        "drafters with another vocabulary",
        lambda asked: asked.use_heterogeneous_vocab,
    ),
    _refused(
        "use_local_argmax_reduction",
        "drafts chosen on each rank",
        lambda asked: asked.use_local_argmax_reduction,
    ),
    _refused(
        "draft_lm_head_quantization",
        "a quantized head of the drafter",
        lambda asked: asked.draft_lm_head_quantization is not None,
        "the drafter uses the model's head",
    ),
    _refused(
        "num_speculative_tokens_per_batch_size",
        "a number of drafts for each batch size",
        lambda asked: asked.num_speculative_tokens_per_batch_size is not None,
        "one number for all batches is served",
    ),
    _refused(
        "enable_adaptive_verification",
        "adaptive verification",
        lambda asked: asked.enable_adaptive_verification,
    ),
)
