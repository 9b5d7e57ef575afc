"""Speculative decoding: settings that the start refuses by name."""

import re
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.config import VllmConfig
from vllm.config.speculative import SpeculativeMethod
from vllm.model_executor.models import ModelRegistry

from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import Engine
from vllm_davinci.core.features.speculation import (
    DSPARK,
    DSPARK_FIELDS,
    FEATURES,
    MTP_REFUSED,
    MTP_SERVED,
    REFUSED,
    SERVED,
    method_on_host,
)
from vllm_davinci_testing.engines.refusals import refused_by


def check_speculation(vllm_config: Any) -> None:
    """Raises the ConfigurationError that the start would raise."""
    engine = Engine(vllm_config, DavinciConfig())
    if said := refused_by(FEATURES, engine):
        raise ConfigurationError(said)
    row = FEATURES[0]
    assert row.settle is not None
    if row.is_asked(engine):
        row.settle(engine)


def model(**changes: Any) -> Any:
    default = {"vocabulary": 4096, "hidden": 256, "architectures": ["DeepSeekMTPModel"]}
    sizes: dict[str, Any] = {**default, **changes}
    return SimpleNamespace(
        model="a/model",
        architectures=sizes["architectures"],
        get_vocab_size=lambda: sizes["vocabulary"],
        get_hidden_size=lambda: sizes["hidden"],
        multimodal_config=sizes.get("images"),
    )


def asked(method: str, pipeline: int = 1, **changes: Any) -> VllmConfig:
    options = {
        "method": method,
        "rejection_sample_method": "standard",
        "parallel_drafting": False,
        "use_heterogeneous_vocab": False,
        "use_local_argmax_reduction": False,
        "draft_lm_head_quantization": None,
        "num_speculative_tokens_per_batch_size": None,
        "enable_adaptive_verification": False,
        "draft_model_config": model(),
        "target_model_config": model(),
        "draft_parallel_config": SimpleNamespace(tensor_parallel_size=2),
        "target_parallel_config": SimpleNamespace(tensor_parallel_size=2),
        "use_multi_module_mtp": lambda: False,
    }
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(**options | changes),
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline),
        scheduler_config=SimpleNamespace(async_scheduling=True),
    )
    return config


@pytest.mark.parametrize(
    ("method", "named"), [("suffix", "suffix"), ("custom_class", "a.Drafter"), ("ngram", "ngram")]
)
def test_methods_of_the_host_take_the_place_of_ngrams(method: str, named: str):
    config: Any = asked(method, model=named, prompt_lookup_min=3, prompt_lookup_max=5)
    for _ in range(2):
        check_speculation(config)
        found = config.speculative_config
        replaced = method != "ngram"
        assert found.method == "ngram"
        assert method_on_host(found) == (method if replaced else None)
        assert (found.prompt_lookup_min, found.prompt_lookup_max) == (
            (1, 1) if replaced else (3, 5)
        )
        assert config.scheduler_config.async_scheduling is not replaced


@pytest.mark.parametrize("method", SERVED)
def test_methods_that_are_served_start(method: str):
    names = {"mtp": "DeepSeekMTPModel", "dspark": DSPARK}
    drafter = model(architectures=[names.get(method, "LlamaForCausalLM")])
    drafter.hf_config = SimpleNamespace(**dict.fromkeys(DSPARK_FIELDS, 1))
    for sampling in ("standard", "synthetic"):
        check_speculation(
            asked(method, rejection_sample_method=sampling, draft_model_config=drafter)
        )


def methods() -> list[str]:
    def leaves(of: Any) -> list[str]:
        return [name for part in get_args(of) for name in leaves(part)] or [of]

    return leaves(SpeculativeMethod)


@pytest.mark.parametrize("method", sorted({*methods()} - {*SERVED}))
def test_every_other_method_of_vllm_is_refused_with_its_name(method: str):
    with pytest.raises(ConfigurationError, match=rf"^method '{method}'.*Use one of ngram"):
        check_speculation(asked(method))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rejection_sample_method": "block"}, "rejection_sample_method 'block'"),
        ({"rejection_sample_method": "fly"}, "rejection_sample_method 'fly'"),
        ({"pipeline": 2}, "--pipeline-parallel-size"),
        ({"draft_model_config": model(architectures=["New"])}, "New: no small model"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"use_heterogeneous_vocab": True}, "use_heterogeneous_vocab"),
        ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction"),
        ({"draft_lm_head_quantization": "fp8"}, "draft_lm_head_quantization 'fp8'"),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 2, 3]]},
            "num_speculative_tokens_per_batch_size",
        ),
        ({"enable_adaptive_verification": True}, "enable_adaptive_verification"),
    ],
)
def test_options_that_are_not_served_are_refused(changes: dict[str, Any], said: str):
    with pytest.raises(ConfigurationError, match=said):
        check_speculation(asked("mtp", **changes))


def of_vllm() -> list[str]:
    """Returns the names of vLLM's classes for MTP layers."""
    known = ModelRegistry.get_supported_archs()
    return sorted(
        name for name in known if re.search(r"MTP(Model)?$", name) and name[:5] != "Eagle"
    )


def test_every_mtp_model_of_vllm_is_served_or_refused():
    assert sorted([*MTP_SERVED, *MTP_REFUSED]) == of_vllm()


@pytest.mark.parametrize("name", sorted(MTP_REFUSED))
def test_mtp_of_other_models_is_refused_with_the_reason(name: str):
    reason = re.escape(MTP_REFUSED[name])
    with pytest.raises(ConfigurationError, match=f"'mtp' of .*{name}: {reason}"):
        check_speculation(asked("mtp", draft_model_config=model(architectures=[name])))


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_methods_are_refused_with_the_reason(method: str):
    with pytest.raises(ConfigurationError, match=f": {re.escape(REFUSED[method])}. Use one"):
        check_speculation(asked(method))


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("eagle3", {"draft_model_config": model(vocabulary=9)}, "a vocabulary of 9.*has 4096"),
        (
            "draft_model",
            {"draft_model_config": model(vocabulary=9, architectures=["LlamaForCausalLM"])},
            "a vocabulary of 9",
        ),
        ("eagle", {"draft_model_config": model(hidden=64)}, "hidden size of 64.*has 256"),
        (
            "draft_model",
            {
                "draft_model_config": model(architectures=["LlamaForCausalLM"]),
                "draft_parallel_config": SimpleNamespace(tensor_parallel_size=1),
            },
            "draft_tensor_parallel_size .*Set it to 2",
        ),
    ],
)
def test_a_drafter_of_another_model_is_refused(method: str, changes: dict[str, Any], said: str):
    with pytest.raises(ConfigurationError, match=said):
        check_speculation(asked(method, **changes))


def test_mtp_is_refused_for_multimodal_models():
    options = {"draft_model_config": model(architectures=["MiMoMTPModel"])}
    check_speculation(asked("mtp", **options))
    with pytest.raises(ConfigurationError, match="take images"):
        target = model(images=SimpleNamespace(get_limit_per_prompt={"image": 1, "video": 0}.get))
        check_speculation(asked("mtp", target_model_config=target, **options))
    unused = model(images=SimpleNamespace(get_limit_per_prompt={"image": 0, "video": 0}.get))
    check_speculation(asked("mtp", target_model_config=unused, **options))


def test_a_draft_model_may_be_smaller():
    smaller = model(hidden=64, architectures=["LlamaForCausalLM"])
    check_speculation(asked("draft_model", draft_model_config=smaller))


@pytest.mark.parametrize("name", ["DeepSeekMTPModel", "Qwen3NextMTP"])
def test_a_draft_model_of_which_vllm_reads_a_layer_is_refused(name: str):
    drafter = model(architectures=[name])
    with pytest.raises(ConfigurationError, match=f"vLLM reads only {name} of it"):
        check_speculation(asked("draft_model", draft_model_config=drafter))


def test_without_speculation_nothing_is_reported(vllm_config: VllmConfig):
    check_speculation(vllm_config)


def test_blocks_of_drafts_of_other_models_are_refused():
    drafter = model(architectures=["Qwen3DSparkModel"])
    with pytest.raises(ConfigurationError, match="DSpark of DeepSeek-V4 is"):
        check_speculation(asked("dspark", parallel_drafting=True, draft_model_config=drafter))
