"""`overlap` sets single options, but never one that is given."""

import pickle
import re
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode, VllmConfig

from vllm_davinci.core import components
from vllm_davinci.core.config.parsing import get_config, non_default_options, parse_config
from vllm_davinci.core.config.step_costs import SURELY_FASTER_SHARDED
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.dual_batch import FEATURES as DUAL_BATCH
from vllm_davinci.core.features.feature import Engine
from vllm_davinci.core.features.resolution import resolve

MULTISTREAM = {
    "torchair_graph_config.enable_multistream_mla": True,
    "torchair_graph_config.enable_multistream_moe": True,
}

SPARSE = "DeepseekV32ForCausalLM"
WHOLE = {"sequence_parallel.enabled": False}
LARGE = {"sequence_parallel.min_tokens": SURELY_FASTER_SHARDED}


class Model:
    """Describes a model: DeepSeek, or another architecture."""

    def __init__(self, is_deepseek: bool, architecture: str) -> None:
        self.use_mla = self.is_moe = is_deepseek
        self.architecture = "DeepseekV3ForCausalLM" if is_deepseek else architecture
        self.is_hybrid = self.has_inner_state = architecture == "JambaForCausalLM"
        self.hf_text_config = SimpleNamespace(n_shared_experts=1 if is_deepseek else None)
        if architecture == SPARSE:
            self.hf_text_config.index_topk = 2048


def check_overlap(vllm_config: VllmConfig) -> list[str]:
    """Returns warnings of a resolved engine about dual-batch overlap."""
    engine = Engine(vllm_config, get_config(vllm_config))
    for row in DUAL_BATCH:
        if row.settle is not None and row.is_asked(engine):
            row.settle(engine)
    return engine.warnings


def applied(
    vllm_config: VllmConfig,
    is_deepseek: bool = True,
    tp: int = 2,
    dp: int = 1,
    dcp: int = 1,
    architecture: str = "LlamaForCausalLM",
    **options: Any,
) -> tuple[dict[str, Any], list[str]]:
    """Returns the resulting options and messages. Resolves twice, like vLLM."""
    vllm_config.additional_config = {"step_costs": None, **options}
    vllm_config.model_config = Model(is_deepseek, architecture)
    vllm_config.parallel_config.tensor_parallel_size = tp
    vllm_config.parallel_config.data_parallel_size = dp
    vllm_config.parallel_config.decode_context_parallel_size = dcp
    first = resolve(vllm_config, {})
    again = resolve(vllm_config, {})
    assert (again.config, again.warnings, again.choices) == (first.config, [], [])
    assert get_config(vllm_config) is first.config
    assert pickle.loads(pickle.dumps(vllm_config.additional_config)).config == first.config
    told = [
        *first.warnings,
        *(choice.told().replace(" (overlap = 'auto': ", ": ") for choice in first.choices),
    ]
    found = non_default_options(first.requested)
    found.pop("step_costs")
    return found, told


@pytest.mark.parametrize(
    ("schedule", "is_deepseek", "expected"),
    [
        ("off", True, {"sequence_parallel.enabled": False}),
        ("off", False, {"sequence_parallel.enabled": False}),
        (
            "published",
            True,
            {"dbo.enabled": True, "sequence_parallel.enabled": False, **MULTISTREAM},
        ),
        ("published", False, {"dbo.enabled": True, "sequence_parallel.enabled": False}),
        ("lean", True, {"dbo.enabled": True, **MULTISTREAM}),
        ("lean", False, {"dbo.enabled": True}),
    ],
)
def test_a_schedule_sets_what_applies_to_the_model(schedule, is_deepseek, expected, vllm_config):
    options, notes = applied(vllm_config, is_deepseek, overlap=schedule)
    assert options == {"overlap": schedule, **expected}
    assert notes == []


def test_without_a_preset_single_options_decide(vllm_config: VllmConfig):
    assert applied(vllm_config) == ({}, [])


@pytest.mark.parametrize(
    ("engine", "expected", "reason"),
    [
        ({"tp": 1}, WHOLE, "dbo.enabled = false: one rank computes each layer alone"),
        ({"tp": 1}, WHOLE, "sequence_parallel.enabled = false: there is one tensor-parallel"),
        (
            {"tp": 2},
            {"dbo.enabled": True, **LARGE},
            "dbo.enabled = true: ranks communicate in each layer",
        ),
        (
            {"tp": 2},
            {"dbo.enabled": True, **LARGE},
            "enable_multistream_moe = false: no transfer of tokens",
        ),
        ({"tp": 2}, {"dbo.enabled": True, **LARGE}, "sequence_parallel.enabled = true: each rank"),
        (
            {"tp": 2, "is_deepseek": False},
            {"dbo.enabled": True, **LARGE},
            "sequence_parallel.enabled = true: each rank",
        ),
        (
            {"tp": 2, "is_deepseek": False, "architecture": "GemmaForCausalLM"},
            {"dbo.enabled": True, **WHOLE},
            "sequence_parallel.enabled = false: the definition of GemmaForCausalLM is not",
        ),
        (
            {"tp": 2},
            {"dbo.enabled": True, **LARGE},
            "enable_multistream_mla = false: without graph mode",
        ),
        ({"tp": 2, "dcp": 2}, LARGE, "dbo.enabled = false: ranks divide a context"),
        (
            {"tp": 2, "is_deepseek": False, "architecture": "JambaForCausalLM"},
            WHOLE,
            "dbo.enabled = false: layers have recurrent states",
        ),
        ({"tp": 2, "architecture": SPARSE}, LARGE, "dbo.enabled = false: attention is sparse"),
        ({"tp": 2, "architecture": SPARSE}, LARGE, "multistream_mla = false: attention is sparse"),
        (
            {"tp": 1, "dp": 2},
            {"dbo.enabled": True, "torchair_graph_config.enable_multistream_moe": True, **WHOLE},
            "enable_multistream_moe = true: tokens travel between DP ranks",
        ),
    ],
)
def test_auto_picks_for_the_engine_and_says_why(engine, expected, reason, vllm_config):
    options, notes = applied(vllm_config, **engine, overlap="auto")
    assert options == {"overlap": "auto", **expected}
    assert sum(reason in note for note in notes) == 1


def test_auto_uses_mla_s_side_stream_where_decodes_replay_graphs(vllm_config: VllmConfig):
    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    options, notes = applied(vllm_config, overlap="auto")
    assert options["torchair_graph_config.enable_multistream_mla"]
    assert sum("decodes replay graphs" in note for note in notes) == 1


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"tp": 1}, "there is one tensor-parallel rank"),
        (
            {"is_deepseek": False, "architecture": "GemmaForCausalLM"},
            "the definition of Gemma.* is not sequence parallel; those of Deepseek.*, Qwen3Moe",
        ),
        ({"dp": 2}, "DP ranks send the tokens of whole steps"),
    ],
)
def test_impossible_sequence_parallelism_is_refused_or_reported(engine, reason, vllm_config):
    def checked(**options: Any) -> list[str]:
        notes = applied(vllm_config, **engine, **options)[1]
        assert not get_config(vllm_config).sequence_parallel.enabled
        return notes

    with pytest.raises(ConfigurationError, match=f"is not possible because {reason}"):
        checked(sequence_parallel={"enabled": True})
    (note,) = checked(sequence_parallel={"min_tokens": 9})
    assert re.search(reason, note)
    (note,) = checked(overlap="lean")
    assert re.search(reason, note)
    assert checked() == []
    assert checked(sequence_parallel={"enabled": False, "min_tokens": 9}) == []


@pytest.mark.parametrize(
    "engine",
    [{}, {"is_deepseek": False}, {"is_deepseek": False, "dp": 2}],
    ids=["deepseek", "dense", "independent_dp_ranks"],
)
def test_possible_sequence_parallelism_needs_no_note(engine, vllm_config):
    options = {"enabled": True, "min_tokens": 9}
    assert applied(vllm_config, **engine, sequence_parallel=options)[1] == []
    assert get_config(vllm_config).sequence_parallel.enabled


def test_without_the_package_nothing_is_sequence_parallel(vllm_config, monkeypatch):
    find = components.find
    monkeypatch.setattr(
        components, "find", lambda role: {} if role is components.MODELS else find(role)
    )
    with pytest.raises(ConfigurationError, match="vllm-davinci-models is not installed"):
        applied(vllm_config, sequence_parallel={"enabled": True})


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"min_total_tokens_to_split": 9}, "dbo.min_total_tokens_to_split has no effect"),
        (
            {"enabled": True, "min_decode_tokens_to_split": 9},
            "dbo.min_decode_tokens_to_split has no effect: .* Add dbo.decode",
        ),
        (
            {"enabled": True, "split": "token", "imbalance_ratio": 0.2},
            "dbo.imbalance_ratio has no effect: dbo.split is 'token'",
        ),
    ],
)
def test_thresholds_without_effect_are_reported(options, note, vllm_config):
    applied(vllm_config, dbo=options)
    (given,) = check_overlap(vllm_config)
    assert re.match(note, given)


def test_auto_does_not_change_given_options(vllm_config: VllmConfig):
    options, notes = applied(
        vllm_config,
        overlap="auto",
        dbo={"enabled": False},
        torchair_graph_config={"enable_multistream_mla": True},
    )
    mla = {"torchair_graph_config.enable_multistream_mla": True}
    assert options == {"overlap": "auto", **mla, **LARGE}
    assert not any("dbo" in note or "mla" in note for note in notes)


def test_auto_does_without_the_package(vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(components, "stream_scheduler", lambda: None)
    options, notes = applied(vllm_config, overlap="auto")
    assert options == {"overlap": "auto"}
    assert any("vllm-davinci-multistream is not installed" in note for note in notes)
    assert not check_overlap(vllm_config)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": "off", "dbo": {"enabled": True}},
        {"overlap": "off", "torchair_graph_config": {"enable_multistream_moe": True}},
        {"overlap": "off", "sequence_parallel": {"enabled": True}},
        {"overlap": "published", "dbo": {"enabled": False}},
        {"overlap": "published", "sequence_parallel": {"enabled": True}},
        {"overlap": "lean", "sequence_parallel": {"enabled": False}},
        {"overlap": "lean", "torchair_graph_config": {"enable_multistream_mla": False}},
    ],
)
def test_a_single_option_against_the_schedule_is_refused(options: dict[str, Any]):
    (section,) = set(options) - {"overlap"}
    (name,) = options[section]
    with pytest.raises(ConfigurationError, match=rf"overlap = .*{section}\.{name} .*remove one"):
        parse_config(options)


def test_vllm_s_flag_against_the_schedule_is_refused(vllm_config: VllmConfig):
    vllm_config.parallel_config.enable_dbo = True
    with pytest.raises(ConfigurationError, match=r"overlap = 'off' stands for dbo\.enabled"):
        applied(vllm_config, overlap="off")


def test_a_variable_yields_to_the_schedule(vllm_config: VllmConfig):
    vllm_config.additional_config = {"overlap": "off"}
    (note,) = resolve(vllm_config, {"VLLM_ASCEND_ENABLE_DBO": "1"}).warnings
    assert "has no effect: additional_config sets overlap = 'off'" in note
    assert not get_config(vllm_config).dbo.enabled


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ConfigurationError, match="'overlap' is 'fast'"):
        parse_config({"overlap": "fast"})
