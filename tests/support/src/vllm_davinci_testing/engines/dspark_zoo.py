"""DSpark layers for a small DeepSeek-V4, and their drafts computed by transformers' modules."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from vllm_davinci_testing.engines.transformers_reference import TransformersReference

LAYERS, RANK, NOISE = (1, 3), 16, 250
COUNT = 2  # number of draft layers
FILE = "dspark.safetensors"
FIELDS = {
    "dspark_target_layer_ids": [*LAYERS],
    "dspark_markov_rank": RANK,
    "dspark_noise_token_id": NOISE,
    "dspark_block_size": 5,
    "n_mtp_layers": COUNT,
}


class DraftsWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    model_runner: Any

    def record_drafts(self) -> None:
        """Starts recording steps with drafts; one request at a time, without graphs."""
        self._drafts: list[tuple[int, list[int]]] = []
        speculator = self.model_runner.speculator

        def record(module: Any, inputs: Any, kwargs: dict[str, Any]) -> None:
            if len(kwargs["positions"]) == speculator.num_speculative_steps + 1:
                drafts = speculator.draft_tokens[0].tolist()
                self._drafts.append((int(kwargs["positions"][0]), drafts))

        self.model_runner.get_model().register_forward_pre_hook(record, with_kwargs=True)

    def recorded_drafts(self) -> list[tuple[int, list[int]]]:
        """Returns, for each step, the number of tokens before the newest one, and the drafts."""
        taken, self._drafts = self._drafts, []
        return taken


DRAFTS_TOLD = {"worker_extension_cls": f"{__name__}.{DraftsWorker.__name__}"}


def with_dspark(source: Path, destination: Path) -> Path:
    """Copies a checkpoint; adds draft layers (disturbed copies of the last layer) and random heads.

    A large bias makes drafts depend on the token before.
    """
    shutil.copytree(source, destination)
    target = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    size, last = config["hidden_size"], f"layers.{config['num_hidden_layers'] - 1}."
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors = {}
    for number in range(COUNT):
        for name, tensor in target.items():
            if name.startswith(last):
                noise = drawn(*tensor.shape, scale=0.1 * float(tensor.float().std()))
                tensors[name.replace(last, f"mtp.{number}.")] = tensor + noise
    end = f"mtp.{COUNT - 1}."
    tensors |= {f"{end}{n}": t for n, t in target.items() if n.startswith(("hc_head_", "norm."))}
    vocabulary = len(target["embed.weight"])
    tensors |= {
        "mtp.0.main_proj.weight": drawn(size, size * len(LAYERS), scale=0.1),
        "mtp.0.main_norm.weight": 1 + drawn(size, scale=0.1),
        f"{end}markov_head.markov_w1.weight": drawn(vocabulary, RANK, scale=1.0),
        f"{end}markov_head.markov_w2.weight": drawn(vocabulary, RANK, scale=0.1),
        f"{end}confidence_head.proj.weight": drawn(1, size + RANK, scale=0.1),
    }
    stored = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(stored, destination / FILE, metadata={"format": "pt"})
    ratios = [*config["compress_ratios"][: config["num_hidden_layers"]], *[0] * COUNT]
    config |= {**FIELDS, "compress_ratios": ratios, "num_nextn_predict_layers": COUNT}
    (destination / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return destination


class DSparkReference:
    """The equations of DSpark, with transformers' modules and no cache, in fp32."""

    def __init__(self, checkpoint: Path, directory: Path) -> None:
        """directory: receives a checkpoint with the drafter's last layers, head and norm"""
        self._model = TransformersReference(checkpoint).network
        self._own = load_file(checkpoint / FILE)
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        first, end = config["num_hidden_layers"], f"mtp.{COUNT - 1}."
        tensors = load_file(checkpoint / "model.safetensors")
        for name, tensor in self._own.items():
            if name.startswith((f"{end}hc_head_", f"{end}norm.")):
                tensors[name.removeprefix(end)] = tensor
            else:
                number, _, part = name.removeprefix("mtp.").partition(".")
                tensors[f"layers.{first + int(number)}.{part}"] = tensor
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config["num_hidden_layers"] += COUNT
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        self._drafter = TransformersReference(directory).network

    @torch.inference_mode()
    def drafts(self, text: list[int], count: int) -> list[int]:
        """Returns drafts for a text whose last token the model has not read."""
        context, base = len(text) - 1, self._drafter.model
        seen: list[Tensor] = []
        hooks = [
            self._model.model.layers[layer].register_forward_hook(
                lambda module, given, output: seen.append(output.mean(dim=2))
            )
            for layer in LAYERS
        ]
        self._model(torch.tensor([text[:-1]]))
        for hook in hooks:
            hook.remove()
        known = nn.functional.linear(torch.cat(seen, dim=-1), self._own["mtp.0.main_proj.weight"])
        known = self._norm("mtp.0.main_norm.weight", known)
        tokens = torch.tensor([[text[-1], *[NOISE] * (count - 1)]])
        streams = base.embed_tokens(tokens).unsqueeze(2).repeat(1, 1, base.config.hc_mult, 1)
        for layer in base.layers[-COUNT:]:
            post, comb, x = layer.attn_hc(streams)
            x = self._attend(layer.self_attn, layer.input_layernorm(x), known, context)
            streams = post.unsqueeze(-1) * x.unsqueeze(2) + comb.transpose(-1, -2) @ streams
            post, comb, x = layer.ffn_hc(streams)
            x = layer.mlp(layer.post_attention_layernorm(x), input_ids=tokens)
            streams = post.unsqueeze(-1) * x.unsqueeze(2) + comb.transpose(-1, -2) @ streams
        logits = self._drafter.lm_head(base.norm(base.hc_head(streams)))[0]
        before, after = (
            self._own[f"mtp.{COUNT - 1}.markov_head.markov_w{part}.weight"] for part in (1, 2)
        )
        drafts = [text[-1]]
        for row in logits:
            drafts.append(int((row + after @ before[drafts[-1]]).argmax()))
        return drafts[1:]

    def _attend(self, attention: Any, x: Tensor, known: Tensor, context: int) -> Tensor:
        """x: [1, count, hidden_size]; known: [1, context, hidden_size]. Returns a tensor like x."""
        count, window = x.shape[1], attention.sliding_window
        rotary = self._drafter.model.rotary_emb

        def rotated(rows: Tensor, first: int, sign: int = 1) -> Tensor:
            """rows: [1, heads, n, size] of consecutive positions"""
            positions = torch.arange(first, first + rows.shape[2]).unsqueeze(0)
            cos, sin = rotary(x, position_ids=positions, layer_type="main")
            return apply_rotary_pos_emb(rows, cos, sign * sin)

        compressed = attention.q_a_norm(attention.q_a_proj(x))
        query = attention.q_b_proj(compressed).view(1, count, -1, attention.head_dim)
        query = rotated(attention.q_b_norm(query.transpose(1, 2)), context)
        rows = torch.cat([known, x], dim=1)
        rows = rotated(attention.kv_norm(attention.kv_proj(rows)).unsqueeze(1), 0)
        rows = rows[:, :, max(0, context - window) :]
        scores = query @ rows.transpose(-1, -2) * attention.scaling
        sinks = attention.sinks.view(1, -1, 1, 1).expand(-1, -1, count, -1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        out = rotated(weights @ rows, context, -1).transpose(1, 2)
        grouped = out.reshape(1, count, attention.config.o_groups, -1)
        result: Tensor = attention.o_b_proj(attention.o_a_proj(grouped).flatten(2))
        return result

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._own[name]
        return nn.functional.rms_norm(x, weight.shape, weight, self._model.config.rms_norm_eps)
