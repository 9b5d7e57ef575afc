"""`vllm-davinci check-model` and `vllm-davinci quantize`, which need no device."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_davinci_testing.processes.forked import run_command

MODULE = "vllm_davinci.meta"
COMMAND = ("-m", MODULE)


def test_a_checkpoint_is_quantized_and_looked_at_without_a_device(
    run_without_device, tmp_path: Path
):
    source, made = tmp_path / "source", tmp_path / "made"
    source.mkdir()
    tensors = {"model.layers.0.mlp.down_proj.weight": torch.randn(8, 16)}
    save_file(tensors | {"lm_head.weight": torch.ones(4, 8)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    done = run_without_device(*COMMAND, "quantize", str(source), str(made))
    assert done.returncode == 0, done.stderr
    assert "matrices: 1 FLOAT, 1 W8A8_DYNAMIC" in done.stdout
    assert "100 %" in done.stderr

    done = run_without_device(*COMMAND, "check-model", str(made), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
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


def test_bad_options_are_answered_before_anything_is_loaded(run_without_device, tmp_path: Path):
    done = run_without_device(*COMMAND, "quantize", ".", str(tmp_path / "out"), "--type", "W8A8")
    assert done.returncode == 2
    assert "needs --calibrate FILE" in done.stderr
    (tmp_path / "file").write_text("")
    done = run_without_device(*COMMAND, "quantize", ".", str(tmp_path))
    assert done.returncode == 2
    assert "name a new one" in done.stderr
