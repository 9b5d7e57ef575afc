"""Step-time tables: another engine's table is refused, with the differences."""

import json
from pathlib import Path

import pytest
from vllm.config import CUDAGraphMode, DeviceConfig, ModelConfig, VllmConfig

from vllm_davinci.core import components
from vllm_davinci.core.config.parsing import get_config, parse_config
from vllm_davinci.core.config.step_costs import (
    SURELY_FASTER_SHARDED,
    costs_file,
    engine_of_costs,
    refuse_costs_of_others,
)
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.resolution import resolve

MODEL = Path(__file__).parents[4] / "checkpoints" / "tiny_llama"


@pytest.fixture
def asked(vllm_config: VllmConfig) -> VllmConfig:
    return VllmConfig(
        device_config=DeviceConfig(device="npu"), model_config=ModelConfig(str(MODEL))
    )


def described(asked: VllmConfig) -> dict[str, object]:
    return dict(engine_of_costs(asked, get_config(asked)))


def test_a_file_for_this_engine_is_accepted(asked: VllmConfig, tmp_path: Path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"engine": described(asked), "steps": []}))
    refuse_costs_of_others(str(file), asked, get_config(asked))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chip", "Ascend310P3"),
        ("tensor_parallel_size", 16),
        ("architecture", "LlamaForever"),
        ("expert_tensor_parallel_size", 8),
        ("order", "published"),
        ("routed_experts", 384),
        ("attention_heads", 1),
    ],
)
def test_a_file_for_another_engine_is_refused_with_the_differences(asked, tmp_path, name, value):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"engine": described(asked) | {name: value}}))
    with pytest.raises(ConfigurationError, match=f"another engine: {name} {value!r}, here"):
        refuse_costs_of_others(str(file), asked, get_config(asked))


def test_engines_that_share_experts_in_another_way_or_replay_graphs_have_other_files(asked):
    asked.parallel_config.tensor_parallel_size = 4
    asked.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    of_options = [{}, {"expert_tensor_parallel_size": 1}, {"overlap": "published"}]
    files = [engine_of_costs(asked, parse_config(options)) for options in of_options]
    assert [file["expert_tensor_parallel_size"] for file in files] == [4, 1, 4]
    assert [file["order"] for file in files] == ["lean", "lean", "published"]
    asked.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    with_graphs = engine_of_costs(asked, parse_config({}))
    assert {**files[0], "replays_decodes": True} == with_graphs != files[0]
    asked.parallel_config.enable_expert_parallel = True
    whole = engine_of_costs(asked, parse_config({}))
    assert whole["expert_tensor_parallel_size"] == 1


def test_sizes_that_vary_by_layer_count_with_their_maximum(asked: VllmConfig):
    asked.model_config.hf_text_config.num_experts_per_tok = [2, 8]
    assert described(asked)["experts_per_token"] == 8


@pytest.mark.parametrize("content", ["", "[]", '{"steps": []}', '{"engine": 3}'])
def test_a_file_that_names_no_engine_is_refused(asked: VllmConfig, tmp_path: Path, content: str):
    file = tmp_path / "costs.json"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match="does not say what engine it was made for"):
        refuse_costs_of_others(str(file), asked, get_config(asked))


def test_a_missing_file_is_reported(asked: VllmConfig, tmp_path: Path):
    with pytest.raises(ConfigurationError, match="is not a file"):
        refuse_costs_of_others(str(tmp_path / "none.json"), asked, get_config(asked))


FASTEST = {"dbo.enabled": True, "dbo.split": "token", "dbo.first_share": 0.53}


class Files:
    """A provider that finds and makes these files."""

    def __init__(self, found: Path | None, made: Path | None = None) -> None:
        self.found, self.made = found, made
        self.asked: list[list[str]] = []

    def find(self, engine: dict[str, object]) -> Path | None:
        return self.found

    def make(self, engine: object, model: str, options: list[str]) -> tuple[Path | None, str]:
        self.asked.append([model, *options])
        return self.made, "it was tried"


@pytest.fixture
def costs(asked: VllmConfig, tmp_path: Path) -> Path:
    asked.parallel_config.tensor_parallel_size = 2
    file = tmp_path / "costs.json"
    content = {"engine": described(asked), "steps": [], "decodes": [], "options": FASTEST}
    file.write_text(json.dumps(content))
    return file


def resolved(
    asked: VllmConfig, files: Files, monkeypatch: pytest.MonkeyPatch, **options: object
) -> Path | None:
    """Returns the file by which an engine decides after its options are resolved at start-up."""
    monkeypatch.setattr(components, "step_costs_provider", lambda: files)
    asked.additional_config = options
    resolve(asked, {}, may_make=True)
    return costs_file(get_config(asked))


def test_the_file_of_this_engine_is_found(asked, costs, monkeypatch):
    assert resolved(asked, Files(costs), monkeypatch, overlap="auto") == costs
    assert resolved(asked, Files(costs), monkeypatch) == costs
    assert resolved(asked, Files(None), monkeypatch, step_costs=str(costs)) == costs


def test_a_found_file_refines_enabled_features_and_enables_none(asked, costs, monkeypatch):
    assert resolved(asked, Files(costs), monkeypatch) == costs
    # If dbo options were set, a warning would say that they have no effect.
    assert not get_config(asked).dbo.model_fields_set
    assert resolved(asked, Files(costs), monkeypatch, dbo={"enabled": True}) == costs
    dbo = get_config(asked).dbo
    assert (dbo.enabled, dbo.split, dbo.first_share) == (True, "token", 0.53)
    given = {"enabled": True, "split": "request"}
    assert resolved(asked, Files(costs), monkeypatch, dbo=given) == costs
    dbo = get_config(asked).dbo
    assert (dbo.enabled, dbo.split, dbo.first_share) == (True, "request", 0.53)


@pytest.mark.parametrize("overlap", [None, "auto", "published"])
def test_thresholds_that_are_given_are_not_replaced(asked, costs, monkeypatch, overlap):
    dbo = {"min_total_tokens_to_split": 1 << 30}
    assert resolved(asked, Files(costs), monkeypatch, overlap=overlap, dbo=dbo) is None


def test_files_of_one_data_parallel_rank_do_not_decide_dispatch_methods(asked, costs, monkeypatch):
    given = {"moe_communication": "all_to_all"}
    assert resolved(asked, Files(costs), monkeypatch, overlap="auto", **given) is None
    asked.parallel_config.data_parallel_size = 2
    assert resolved(asked, Files(costs), monkeypatch, overlap="auto", **given) == costs


def test_null_asks_for_the_fixed_rules(asked, costs, monkeypatch):
    assert resolved(asked, Files(costs), monkeypatch, step_costs=None, overlap="auto") is None
    assert get_config(asked).dbo.split == "request"


def test_auto_takes_the_options_that_were_the_fastest(asked, costs, monkeypatch):
    assert resolved(asked, Files(costs), monkeypatch, overlap="auto", dbo={"first_share": 0.6})
    dbo = get_config(asked).dbo
    # First_share was given.
    assert (dbo.enabled, dbo.split, dbo.first_share) == (True, "token", 0.6)


def test_auto_creates_a_missing_file(asked, costs, monkeypatch):
    files = Files(None, costs)
    assert resolved(asked, files, monkeypatch, overlap="auto") == costs
    ((model, *options),) = files.asked
    assert model == str(MODEL)
    assert "--tensor-parallel-size=2" in options
    assert '--additional-config={"overlap": "auto", "step_costs": null}' in options


def test_without_auto_no_file_is_created(asked, costs, monkeypatch):
    files = Files(None, costs)
    assert resolved(asked, files, monkeypatch) is None
    assert files.asked == []


def test_a_file_that_cannot_be_created_leaves_the_fixed_rules(asked, costs, monkeypatch):
    assert resolved(asked, Files(None, None), monkeypatch, overlap="auto") is None
    assert get_config(asked).dbo.enabled


@pytest.mark.parametrize(
    ("stated", "first"),
    [
        ({"sequence_parallel_over_ranges": True}, 512),
        ({}, 2048),  # smaller sizes gain only with the stated figures
    ],
)
def test_auto_shards_from_where_steps_gain_over_the_ranges(
    asked, costs, monkeypatch, stated, first
):
    content = json.loads(costs.read_text())
    content["options"] |= {"sequence_parallel.enabled": True, "sequence_parallel.min_tokens": 512}
    costs.write_text(json.dumps(content | stated))
    resolved(asked, Files(costs), monkeypatch, overlap="auto")
    assert get_config(asked).sequence_parallel.min_tokens == first
    resolved(asked, Files(costs), monkeypatch, overlap="auto", sequence_parallel={"min_tokens": 9})
    assert get_config(asked).sequence_parallel.min_tokens == 9  # a given value stays


def test_auto_without_a_file_leaves_small_steps_whole(asked, monkeypatch):
    asked.parallel_config.tensor_parallel_size = 2
    resolved(asked, Files(None), monkeypatch, overlap="auto", step_costs=None)
    assert get_config(asked).sequence_parallel.min_tokens == SURELY_FASTER_SHARDED
