"""A feature is one file, and an architecture one row, as CONTRIBUTING.md says."""

from pathlib import Path

import pytest

from vllm_davinci.core.features.registry import features
from vllm_davinci_testing.processes.programs import copied, insert, said_in

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages" / "core" / "src" / "vllm_davinci" / "core"

FEATURE = '''"""Toys."""

from vllm_davinci.core.features.feature import Feature

FEATURES = (
    Feature(
        "--seed 7",
        "toys",
        lambda e: e.model is not None and e.model.seed == 7,
        excludes={"--enable-lora": "toys do not adapt"},
        settle=lambda e: e.set(e.vllm.cache_config, "block_size", 256, "toys are large"),
        after=("settings of an NPU",),
    ),
)
'''
ARCHITECTURE = """
    "LlamaForCausalLM": Architecture(is_importable=False),
"""
PROGRAM = """
import importlib, json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm_davinci.core.config import architectures
from vllm_davinci.core.config.parsing import get_settings
from vllm_davinci.core.features import feature, registry, report

root, model, other = sys.argv[1:]
sys.path[:0] = [f"{root}/ci", f"{root}/conformance"]
page = importlib.import_module("features_page").features_page(
    registry.features().values(), architectures.ARCHITECTURES, feature.is_always
)

def made(model, **options):
    try:
        return EngineArgs(model=model, dtype="float32", **options).create_engine_config()
    except ValueError as error:
        return str(error)

engine = made(model, seed=7, block_size=128)
print(json.dumps({
    "file": registry.__file__,
    "page": [line for line in page.splitlines() if "toys" in line or "`LlamaForCausalLM`" in line],
    "in_use": [each[:] for each in report.feature_settings(engine) if each.key == "toys"],
    "changed": [each.told() for each in get_settings(engine) if each.key == "block_size"],
    "excluded": made(model, seed=7, enable_lora=True),
    "refused": made(other),
}))
"""


@pytest.mark.nightly("planning")  # an interpreter that imports vLLM from copies
def test_a_feature_is_one_file_and_an_architecture_one_row(tmp_path: Path):
    copy = copied(CORE, tmp_path)
    (copy / "features" / "toys.py").write_text(FEATURE, encoding="utf-8")
    head = "ARCHITECTURES: dict[str, Architecture] = {"
    insert(copy / "config" / "architectures.py", head, ARCHITECTURE)
    checkpoints = [str(ROOT / "checkpoints" / name) for name in ("tiny_deepseek", "tiny_llama")]
    seen = said_in(tmp_path, PROGRAM, str(ROOT), *checkpoints)
    why = "LoRA adapters (toys do not adapt)"
    assert f"| toys | `--seed 7` | {why} |" in seen["page"]
    assert "| `LlamaForCausalLM` | refused: vLLM's definition needs CUDA |" in seen["page"]
    assert seen["in_use"] == [["toys", True, "flag", "--seed 7"]]
    assert seen["changed"] == ["block_size = 256 (instead of 128: toys are large)"]
    assert "--enable-lora is not supported with --seed 7" in seen["excluded"]
    assert "because toys do not adapt. Remove one of the two." in seen["excluded"]
    assert "LlamaForCausalLM of" in seen["refused"]
    assert "needs a definition for NPUs (vLLM's needs kernels" in seen["refused"]


def test_what_a_feature_excludes_is_a_feature_and_one_of_both_has_a_flag():
    rows = features()
    for row in rows.values():
        for key in row.excludes:
            assert key in rows, f"{row.key} excludes {key!r}, which no row is: write the row's key"
            assert row.flag or rows[key].flag, f"{row.key} and {key} have no flag to remove"
            assert row.key not in rows[key].excludes, f"{row.key}, {key}: once is enough"
        assert set(row.after) <= set(rows), f"{row.key} settles after {row.after}"


def test_the_contributing_page_names_the_files_that_hold_the_rows():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "what it excludes | `core/features/NAME.py` |" in page
    assert "(recurrent state, MTP, bidirectional) | `core/config/architectures.py` |" in page
