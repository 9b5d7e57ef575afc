"""A DeepSeek checkpoint with rotated hidden states, as exported by ModelSlim's QuaRot.

The residual stream is multiplied by an orthogonal matrix Q; layers' weights include its inverse,
and norms' weights are folded into the next layers. In exact arithmetic the model is unchanged.

The weights of a small model's last norm are all of similar size, so a drafter would also work
without them. Here some change sign, and the next weights change it back.
"""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# A layer -> the norm before it, by names inside a decoder layer.
AFTER_NORMS = {
    r"self_attn\.(q_a_proj|kv_a_proj_with_mqa|q_proj)": "input_layernorm",
    r"mlp\.(gate|gate_proj|up_proj|.*experts.*\.(gate|up)_proj)": "post_attention_layernorm",
}
OUTPUTS = re.compile(r"(self_attn\.o_proj|mlp\..*down_proj|mlp\.down_proj)\.weight$")
SIGNED = re.compile(r"(^model\.norm|^lm_head|\.hnorm|shared_head\.(norm|head))\.weight$")
LAYER = re.compile(r"^(model\.layers\.\d+\.)(.*)$")


def rotated(source: Path, destination: Path) -> Path:
    """Writes the checkpoint in fp32, with rot.weight and a description of float tensors only."""
    shutil.copytree(source, destination)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(destination.glob("*.safetensors")):
        tensors |= {name: each.float() for name, each in load_file(path).items()}
        path.unlink()
    width = tensors["model.norm.weight"].numel()
    signs = torch.randint(2, (width,), generator=torch.Generator().manual_seed(4)) * 2.0 - 1
    for name in tensors:
        if SIGNED.search(name):
            tensors[name] = tensors[name] * signs
    drawn = torch.randn(width, width, generator=torch.Generator().manual_seed(3)).double()
    turn = torch.linalg.qr(drawn)[0]
    made = {name: _turned(name, each, tensors, turn) for name, each in tensors.items()}
    norm = tensors["model.norm.weight"].double()
    rotation = (turn.T @ (norm.unsqueeze(1) * turn)).float()
    save_file(made, destination / "model.safetensors", metadata={"format": "pt"})
    save_file({"rot.weight": rotation}, destination / "rot.safetensors")
    described: dict[str, object] = dict.fromkeys(made, "FLOAT")
    described["is_rot_used"] = True
    (destination / "quant_model_description.json").write_text(json.dumps(described))
    return destination


def _turned(
    name: str, tensor: torch.Tensor, tensors: dict[str, torch.Tensor], turn: torch.Tensor
) -> torch.Tensor:
    """Returns one tensor of the rotated checkpoint."""
    weight = tensor.double()
    layer = LAYER.match(name)
    if name == "model.norm.weight" or re.search(
        r"(layernorm|enorm|hnorm|head\.norm)\.weight", name
    ):
        is_inside = "kv_a_layernorm" in name or "q_a_layernorm" in name
        return tensor if is_inside else torch.ones_like(tensor)
    if name.endswith("embed_tokens.weight"):
        weight = weight @ turn
    elif name == "lm_head.weight":
        weight = (weight * tensors["model.norm.weight"].double()) @ turn
    elif name.endswith("shared_head.head.weight") and layer:
        weight = (weight * tensors[f"{layer[1]}shared_head.norm.weight"].double()) @ turn
    elif name.endswith("eh_proj.weight") and layer:
        norms = [tensors[f"{layer[1]}{norm}.weight"].double() for norm in ("enorm", "hnorm")]
        halves = [half * norm for half, norm in zip(weight.chunk(2, 1), norms, strict=True)]
        weight = turn.T @ torch.cat([half @ turn for half in halves], 1)
    elif OUTPUTS.search(name):
        weight = turn.T @ weight
    elif layer:
        for pattern, norm in AFTER_NORMS.items():
            if re.fullmatch(pattern + r"\.weight", layer[2]):
                weight = (weight * tensors[f"{layer[1]}{norm}.weight"].double()) @ turn
    return weight.float().contiguous()
