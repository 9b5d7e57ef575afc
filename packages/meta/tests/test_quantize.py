"""`vllm-davinci check-model` and `vllm-davinci quantize` need no device."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_davinci.meta import core_access, quantize
from vllm_davinci.meta.__main__ import main
from vllm_davinci_testing.processes.forked import run_command

MODULE = "vllm_davinci.meta"
COMMAND = ("-m", MODULE)


def test_a_checkpoint_is_quantized_and_checked_without_a_device(run_without_device, tmp_path: Path):
    source, made = tmp_path / "source", tmp_path / "made"
    source.mkdir()
    tensors = {"model.layers.0.mlp.down_proj.weight": torch.randn(8, 16)}
    save_file(tensors | {"lm_head.weight": torch.ones(4, 8)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    done = run_without_device(*COMMAND, "quantize", str(source), str(made))
    assert done.returncode == 0, done.stderr
    assert "matrices: 1 FLOAT, 1 W8A8_DYNAMIC" in done.stdout
    assert "100 %" in done.stderr

    checked = run_command(MODULE, "check-model", made, "--json")
    assert checked.status == 0, checked.stderr
    report = json.loads(checked.stdout)
    assert report["can_load"] is True
    assert {kind["name"]: kind["loads"] for kind in report["kinds"]} == {
        "lm_head": "FLOAT",
        "model.layers.*.mlp.down_proj": "W8A8_DYNAMIC",
    }

    (made / "quant_model_description.json").write_text('{"lm_head.weight": "W9"}')
    refused = run_command(MODULE, "quantize", source, tmp_path / "other", "--type", "W4A16")
    assert refused.status == 1
    assert "--type W4A16 is not written. Choose one of FLOAT, W8A16, W8A8" in refused.output
    refused = run_command(MODULE, "check-model", made)
    assert refused.status == 1
    assert "problem: lm_head.weight has quantization type 'W9'" in refused.stdout
    assert "cannot be loaded as it is" in refused.stdout


# Options of a command that writes a new directory -> the mistake in them.
BAD_OPTIONS = {
    "--type W8A8_DYNAMC": "did you mean W8A8_DYNAMIC?",
    "--type nonsense": "choose one of FLOAT, W4A16",
    "--type W8A8": "needs --calibrate FILE",
    "--type W8A8 --calibrate nowhere.txt": "nowhere.txt is not a file",
    "--type FLOAT --calibrate README.md": "--type FLOAT does not",
    "--budget 3%": "need --calibrate FILE",
    "--calibration-tokens 0": "must be at least 1",
    "": "has no config.json",
}


@pytest.mark.parametrize(("given", "told"), BAD_OPTIONS.items())
def test_bad_options_are_answered_before_anything_is_loaded(
    given, told, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(core_access, "prepare", lambda: pytest.fail("core was to be imported"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("text")
    assert main(["quantize", ".", "out", *given.split()]) == 2
    assert told in capsys.readouterr().err.replace("\n", " ")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("")
    assert main(["quantize", ".", "out"]) == 2
    assert "name a new one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "share"), [("3%", 0.03), ("1.5", 0.015), ("none", float("inf")), ("0", 0.0)]
)
def test_a_budget_is_a_percentage(given: str, share: float):
    parser = argparse.ArgumentParser()
    quantize.add_arguments(parser)
    assert parser.parse_args(["a", "b", "--budget", given]).budget == pytest.approx(share)


@pytest.mark.parametrize("given", ["-1%", "much", "nan", ""])
def test_a_budget_that_is_not_a_percentage_is_refused(given, capsys):
    parser = argparse.ArgumentParser()
    quantize.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["a", "b", f"--budget={given}"])
    assert "no percentage such as 3%" in capsys.readouterr().err
