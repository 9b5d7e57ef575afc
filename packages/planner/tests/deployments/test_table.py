"""The table of deployments: every row can be selected, and states its source."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_davinci.core.weight_files.files import read_header
from vllm_davinci.planner.deployments import table
from vllm_davinci.planner.deployments.checkpoint import description, write_checkpoint
from vllm_davinci.planner.deployments.table import Deployment, all_deployments, deployment
from vllm_davinci.planner.dry_run.engine_arguments import PhantomEngineArgs, parse
from vllm_davinci.planner.errors import DeploymentError
from vllm_davinci.vnpu.timing import load_machine

pytestmark = pytest.mark.nightly("planning")

ROWS = all_deployments()


def test_there_are_prefills_and_decodes_of_many_models_on_both_chips() -> None:
    assert len(ROWS) >= 60
    assert len({row.checkpoint.config for row in ROWS.values()}) >= 25
    roles = Counter(row.role for row in ROWS.values())
    assert min(roles["mixed"], roles["prefill"], roles["decode"]) >= 10
    chips = Counter(row.chip.removeprefix("ascend")[:4] for row in ROWS.values())
    assert min(chips["910b"], chips["910c"]) >= 20


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_one_that_a_dry_run_takes(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    parsed = parse([f"--model={tmp_path}"], row.arguments())
    machine = load_machine(row.chip, row.topology)
    ranks = PhantomEngineArgs.for_machine(parsed, "balanced", machine).world_size
    assert 1 <= ranks <= 64
    on_one_host = 8 if row.topology in ("node-of-8", "nodes-of-8") else 16
    assert row.hosts == -(-ranks // on_one_host)
    assert row.source and row.checkpoint.source
    assert row.requests * row.prompt_tokens > 0 and row.output_tokens > 0


def test_layers_have_the_types_that_a_checkpoint_says() -> None:
    checkpoint = deployment("deepseek-r1-a3-decode-dp32").checkpoint
    types = description(checkpoint.configuration(), checkpoint.quantization)
    assert types["model_quant_type"] == "W8A8"
    layer = "model.layers.60"
    found = {
        name: types[f"{layer}.{name}"]
        for name in (
            "self_attn.q_a_proj.weight",
            "self_attn.kv_b_proj.weight",
            "mlp.gate.weight",
            "mlp.experts.255.down_proj.weight_scale",
            "mlp.shared_experts.up_proj.weight",
        )
    }
    assert list(found.values()) == ["W8A8", "FLOAT", "FLOAT", "W8A8_DYNAMIC", "W8A8_DYNAMIC"]
    assert "model.layers.2.mlp.down_proj.weight" in types  # the first three layers are dense
    assert f"{layer}.mlp.experts.256.down_proj.weight" not in types
    assert types["lm_head.weight"] == "FLOAT"


def test_layers_of_deepseek_v4_have_released_names() -> None:
    checkpoint = deployment("deepseek-v4-flash-a3-dp4-tp4").checkpoint
    types = description(checkpoint.configuration(), checkpoint.quantization)
    expected = {
        "layers.0.attn.wq_a": "W8A8_DYNAMIC",
        "layers.2.attn.wo_a": "FLOAT",
        "layers.2.attn.compressor.wkv": "FLOAT",
        "layers.2.attn.indexer.wq_b": "W8A8_DYNAMIC",
        "layers.2.attn.indexer.weights_proj": "FLOAT",
        "layers.42.ffn.gate": "FLOAT",
        "layers.42.ffn.experts.255.w2": "W8A8_DYNAMIC",
        "mtp.0.ffn.shared_experts.w1": "W8A8_DYNAMIC",
        "head": "FLOAT",
    }
    assert {name: types[f"{name}.weight"] for name in expected} == expected
    pro = deployment("deepseek-v4-pro-a3-dp2-tp16").checkpoint
    of_pro = description(pro.configuration(), pro.quantization)
    assert of_pro["layers.60.ffn.experts.383.w2.weight"] == "W4A8_DYNAMIC"
    assert of_pro["layers.60.ffn.shared_experts.w2.weight"] == "W8A8_DYNAMIC"
    # This layer compresses 128 tokens and has no indexer.
    assert "layers.3.attn.indexer.wq_b.weight" not in types
    assert "layers.1.attn.compressor.wkv.weight" not in types  # this layer has only a window


def test_layers_of_kimi_k3_are_of_both_kinds_of_attention() -> None:
    checkpoint = deployment("kimi-k3-w4a8-a3-dp4-tp16").checkpoint
    types = description(checkpoint.configuration(), checkpoint.quantization)
    expected = {
        "layers.0.mlp.down_proj": "W8A8_DYNAMIC",
        "layers.0.self_attn.f_a_proj": "W8A8_DYNAMIC",
        "layers.0.self_attn.g_proj": "W8A8_DYNAMIC",
        "layers.92.self_attn.g_proj": "W8A8_DYNAMIC",
        "layers.92.self_attn.kv_b_proj": "FLOAT",
        "layers.92.block_sparse_moe.experts.895.w2": "W4A8_DYNAMIC",
        "layers.92.block_sparse_moe.shared_experts.up_proj": "W8A8_DYNAMIC",
        "layers.92.block_sparse_moe.gate": "FLOAT",
    }
    found = {name: types[f"language_model.model.{name}.weight"] for name in expected}
    assert found == expected
    assert "language_model.model.layers.92.self_attn.f_a_proj.weight" not in types  # an MLA layer


def test_packed_experts_have_headers_and_no_bytes(tmp_path: Path) -> None:
    write_checkpoint(deployment("kimi-k2-thinking-a3-tp16").checkpoint, tmp_path)
    tensors = read_header(tmp_path / "model.safetensors")
    expert = "model.layers.60.mlp.experts.383.down_proj"
    assert tensors[f"{expert}.weight_packed"].shape == (7168, 2048 // 8)
    assert tensors[f"{expert}.weight_scale"].shape == (7168, 2048 // 32)
    assert not [name for name in tensors if ".experts." not in name or ".layers.0." in name]
    assert (tmp_path / "model.safetensors").stat().st_blocks < 200_000  # blocks of 512 bytes


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(DeploymentError, match="Did you mean 'deepseek-r1-a3-dp4-tp4'"):
        deployment("deepseek-r1-a3-dp4tp4")


ROW = """
[checkpoints.C]
config = "qwen3-8b"
source = "S"
[deployments.{name}]
checkpoint = "{checkpoint}"
role = "{role}"
chip = "ascend910b2"
topology = "node-of-8"
hosts = 1
source = "S"
{more}
"""
GOOD = {"name": "d", "checkpoint": "C", "role": "mixed", "more": "options = ''"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "table").mkdir()
    monkeypatch.setattr(table, "_FOLDER", tmp_path)
    all_deployments.cache_clear()
    yield tmp_path / "table"
    monkeypatch.undo()
    all_deployments.cache_clear()


def test_a_row_of_a_new_file_is_read(folder: Path) -> None:
    (folder / "own.toml").write_text(ROW.format(**GOOD))
    row = deployment("d")
    assert isinstance(row, Deployment)
    assert (row.arguments(), row.requests, row.checkpoint.quantization) == ([], 4, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": "B"}, "is of checkpoint 'B', which is in no file. Known: C"),
        ({"role": "both"}, "role is one of mixed, prefill, decode"),
        ({"more": ""}, r"lacks \['options'\]"),
        ({"more": "options = ''\nhost = 2"}, r"has \['host'\] that is not known"),
    ],
)
def test_a_wrong_row_names_its_mistake(folder: Path, change: dict[str, str], message: str) -> None:
    (folder / "own.toml").write_text(ROW.format(**{**GOOD, **change}))
    with pytest.raises(DeploymentError, match=message):
        all_deployments()


def test_two_rows_of_one_name_are_refused(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / f"{name}.toml").write_text(ROW.format(**GOOD))
    with pytest.raises(DeploymentError, match="exists twice"):
        all_deployments()
