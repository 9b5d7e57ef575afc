"""`vllm-davinci config`: the table, the JSON output, and impossible engines."""

import json
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.forked import run_command

MODULE = "vllm_davinci.meta"
MODEL = Path(__file__).parents[3] / "checkpoints" / "tiny_deepseek"
OPTIONS = (
    "--tensor-parallel-size=2",
    "-cc.cudagraph_mode=FULL",
    '--additional-config={"overlap": "auto", "step_costs": null, "enable_cpu_binding": true}',
)


def test_values_come_with_source_and_reason():
    done = run_command(MODULE, "config", MODEL, "--json", "--", *OPTIONS, VNPU_DEVICES="1")
    assert done.status == 0, done.stderr
    answer = json.loads(done.stdout[done.stdout.index('{"vLLM"') :])
    of_vllm = {each["key"]: each for each in answer["vLLM"]}
    mode = of_vllm["cudagraph_mode"]
    assert (mode["value"], mode["source"]) == ("FULL_DECODE_ONLY", "release")
    assert mode["reason"].endswith("asked for: -cc.cudagraph_mode=FULL")
    assert of_vllm["experts' tokens of decodes"]["value"] == "all_gather"
    options = {each["key"]: each for each in answer["additional_config"]}
    assert options["enable_cpu_binding"]["source"] == "additional_config"
    assert (options["dbo.enabled"]["value"], options["dbo.enabled"]["source"]) == (True, "model")
    assert options["enable_weight_nz_layout"] == {
        "key": "enable_weight_nz_layout",
        "value": False,
        "source": "default",
        "reason": "",
    }


@pytest.mark.nightly("planning")
def test_the_table_can_leave_out_defaults():
    options = ("--changed", "--", "--max-num-seqs=3")
    done = run_command(MODULE, "config", str(MODEL), *options, COLUMNS="150")
    assert done.status == 0, done.stderr
    assert "--max-num-seqs 3" in done.stdout
    assert "enable_weight_nz_layout" not in done.stdout


def test_an_impossible_engine_is_answered_with_the_reason():
    option = '--additional-config={"gate_eplb": true}'
    done = run_command(MODULE, "config", str(MODEL), "--", option)
    assert done.status == 1
    assert "'gate_eplb' = true is refused: they are balanced repeatedly" in done.stderr
    assert "Traceback" not in done.stderr
