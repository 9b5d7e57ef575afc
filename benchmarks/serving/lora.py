"""Steps with adapters, compared with steps without them and with merged weights.

Each engine has one process. Host alone: processor time of the launching thread, while operators do
no work (VNPU_COMPUTE=0). Whole: tokens per second relative to merged weights, on this machine's
processor; a chip's products of several slots have other costs. Also tokens per second of processor
time, which other programs affect least.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from child import measured
from result import Kind, Result, Row

PROCESS_LIMIT_S = 900
CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny_llama"
HOST_ALONE = {"VNPU_COMPUTE": "0", "TASK_QUEUE_ENABLE": "0"}
SETTINGS = ("requests", "steps", "rounds", "rank", "slots")
# Name -> adapters that requests use in turn; 0: none.
CASES = {"no adapter": [0], "one adapter": [1], "four adapters": [1, 2, 3, 4]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--steps", type=int, default=32, help="generated tokens per request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=4, help="value of --max-loras")


def run(args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        adapters = [_write_adapter(directory / str(seed), args.rank, seed) for seed in range(1, 5)]
        merged = _write_merged(directory / "merged", adapters[0])
        shared = {key: getattr(args, key) for key in ("requests", "steps", "rounds")}
        shared |= {"adapters": list(map(str, adapters))}
        lora = {"enable_lora": True, "max_loras": args.slots, "max_lora_rank": args.rank}

        def found(model: Path, engine: dict[str, Any], host_alone: bool) -> dict[str, Any]:
            cases = CASES if engine else {"plain": [0]}
            options = {**shared, "model": str(model), "engine": engine, "cases": cases}
            more = HOST_ALONE if host_alone else {}
            answer = measured("serving.lora_process", options, PROCESS_LIMIT_S, more)
            return {
                name: {key: statistics.median(of[key] for of in rounds) for key in rounds[0]}
                for name, rounds in answer.items()
            }

        layers = json.loads((CHECKPOINT / "config.json").read_text())["num_hidden_layers"]
        rows = _host_rows(found(CHECKPOINT, {}, True), found(CHECKPOINT, lora, True), layers)
        rows += _whole_rows(found(merged, {}, False), found(CHECKPOINT, lora, False))
    return Result(
        ours="an engine with --enable-lora",
        baseline="a plain engine; for tokens per second, of merged weights",
        rows=rows,
        settings={key: getattr(args, key) for key in SETTINGS} | HOST_ALONE,
        seed=1,
        bounded_by="four launches of each linear layer; the products with all slots",
    )


def _host_rows(plain: dict[str, Any], lora: dict[str, Any], layers: int) -> list[Row]:
    base = plain["plain"]
    rows = []
    for name, of in lora.items():
        more = (of["launches"] - base["launches"]) / layers
        rows.append(
            Row(
                f"{name}: launches of an eager forward",
                "",
                of["launches"],
                Kind.COUNTED,
                baseline=base["launches"],
                note=f"{more:g} more per layer",
            )
        )
        for key, step in (
            ("step_seconds", "an eager step"),
            ("graph_step_seconds", "a step from graphs"),
        ):
            ours, baseline = of[key] * 1e3, base[key] * 1e3
            what = f"{name}: host time of {step}"
            rows.append(Row(what, "ms", ours, Kind.MEASURED, baseline=baseline))
    return rows


def _whole_rows(merged: dict[str, Any], lora: dict[str, Any]) -> list[Row]:
    kinds = {
        "tokens_per_second": "tokens per second",
        "tokens_per_processor_second": "tokens per second of processor time",
    }
    return [
        Row(f"{name}: {kind}", "tokens/s", of[key], Kind.MEASURED, baseline=merged["plain"][key])
        for key, kind in kinds.items()
        for name, of in lora.items()
    ]


def _linear_weights() -> dict[str, torch.Tensor]:
    """Reads the checkpoint's weights by layer name."""
    tensors = {}
    for file in sorted(CHECKPOINT.glob("*.safetensors")):
        tensors |= load_file(file)
    return {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if name.endswith("_proj.weight")
    }


def _write_adapter(directory: Path, rank: int, seed: int) -> Path:
    """Writes an adapter for all linear layers; its alpha equals the rank."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in _linear_weights().items():
        size_out, size_in = weight.shape
        a = torch.randn(rank, size_in, generator=generator) / size_in**0.5
        b = torch.randn(size_out, rank, generator=generator) * weight.float().std() / rank**0.5
        prefix = f"base_model.model.{name}.lora_"
        tensors |= {f"{prefix}A.weight": a, f"{prefix}B.weight": b}
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in _linear_weights()})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def _write_merged(directory: Path, adapter: Path) -> Path:
    """Writes the checkpoint with the adapter's deltas added to its weights."""
    pairs = load_file(adapter / "adapter_model.safetensors")
    directory.mkdir()
    for file in CHECKPOINT.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            for name, tensor in tensors.items():
                prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
                if f"{prefix}A.weight" in pairs:
                    delta = pairs[f"{prefix}B.weight"] @ pairs[f"{prefix}A.weight"]
                    tensors[name] = (tensor.float() + delta).to(tensor.dtype)
            save_file(tensors, directory / file.name, metadata={"format": "pt"})
        elif file.is_file():
            (directory / file.name).write_bytes(file.read_bytes())
    return directory
