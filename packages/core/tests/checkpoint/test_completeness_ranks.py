"""Several ranks refuse a checkpoint with missing or extra tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from vllm_davinci_testing.engines.family_zoo import small_config
from vllm_davinci_testing.processes.ranks import check_ranks

PROGRAM = Path(__file__).with_name("completeness_rank.py")
TP2, EP = {"tensor_parallel_size": 2}, {"enable_expert_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": TP2, "tp2_ep": {**TP2, **EP}}
LAYOUTS |= {"pp2": {"pipeline_parallel_size": 2}}
EXPERT = "model.layers.1.mlp.experts"
Tensors = dict[str, torch.Tensor]


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: each for name, each in tensors.items() if part not in name}


def also(name: str, like: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensors[like].clone()}


# Change to an intact checkpoint -> a name that the error must contain.
SPOILT: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no_layer": (without("model.layers.1."), "model.layers.1."),
    "no_expert": (without(f"{EXPERT}.5."), f"{EXPERT}.5."),
    "no_norm": (without("model.norm."), "model.norm.weight"),
    "no_head": (without("lm_head."), "lm_head.weight"),
    "one_expert_more": (
        also(f"{EXPERT}.8.up_proj.weight", f"{EXPERT}.5.up_proj.weight"),
        f"{EXPERT}.8.",
    ),
    "part_of_a_layer_more": (
        also("model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        "model.layers.1.mlp.up_proj.weight",
    ),
}


def by_expert(tensors: Tensors) -> Tensors:
    """Returns a transformers model's tensors expert by expert, as in released files.

    Saving also splits experts, unless another import in the process has disabled this in
    transformers.
    """
    split: Tensors = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.partition(".experts.")
        for expert in range(tensor.shape[0] if part.endswith("_proj") else 0):
            whole, of_expert = tensor[expert], f"{prefix}.experts.{expert}"
            if part == "down_proj":
                split[f"{of_expert}.down_proj.weight"] = whole.contiguous()
                continue
            gate, up = whole.chunk(2)
            split[f"{of_expert}.gate_proj.weight"] = gate.contiguous()
            split[f"{of_expert}.up_proj.weight"] = up.contiguous()
        if not part.endswith("_proj"):
            split[name] = tensor
    return split


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The intact checkpoint comes first; its first layer is dense, the second has 8 experts."""
    directory = tmp_path_factory.mktemp("checkpoints")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(
            small_config("deepseek_v3"), dtype=torch.bfloat16
        )
    network.save_pretrained(directory / "whole")
    tensors = by_expert(network.state_dict())
    save_file(tensors, directory / "whole" / "model.safetensors", metadata={"format": "pt"})
    path = directory / "whole" / "config.json"
    # The released layout, which transformers does not write.
    path.write_text(json.dumps({**json.loads(path.read_text()), "topk_method": "noaux_tc"}))
    made = [directory / "whole"]
    for name, (spoil, _) in SPOILT.items():
        made.append(directory / name)
        made[-1].mkdir()
        save_file(spoil(tensors), made[-1] / "model.safetensors", metadata={"format": "pt"})
        (made[-1] / "config.json").write_bytes(path.read_bytes())
    return made


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=() if name == "tp2_ep" else pytest.mark.thorough)
        for name in LAYOUTS
    ],
)
def test_at_least_one_rank_names_missing_and_extra_tensors(layout, checkpoints):
    setting = {"layout": LAYOUTS[layout], "checkpoints": [str(each) for each in checkpoints]}
    said: dict[str, list[str]] = {}
    for printed in check_ranks(PROGRAM, 2, json.dumps(setting)):
        (line,) = (line for line in printed.splitlines() if line.startswith("said: "))
        for name, error in json.loads(line.removeprefix("said: ")).items():
            said.setdefault(name, []).append(error)
    assert "whole" not in said
    wrong = {
        name: said.get(name, "no error")
        for name, (_, named) in SPOILT.items()
        if not any(named in error for error in said.get(name, []))
    }
    assert not wrong
