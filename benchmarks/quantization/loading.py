"""Time and memory to load quantized checkpoints, compared with their bf16 layers.

Loads a DeepSeek with random weights in bf16, in int8 (`vllm-davinci quantize`), and in block-wise
fp8, which becomes float or int8 while it is read. Each load has its own process, whose host memory
is sampled; memory is compared with one shard. Files are read once from the disk and once from the
page cache.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from child import measured, run_child
from result import Kind, Result, Row

PROCESS_LIMIT_S = 900
NUM_SHARDS = 4
# Limits: time relative to the float checkpoint, and host memory beyond the weights, in shards.
TIME_AT_MOST, SHARDS_AT_MOST = 1.2, 2.0
# State of the files: read from the disk, as at a server's first start, or cached.
PLACES = DISK, MEMORY = "disk", "the cache of files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=16, help="number in each of two layers")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the fastest counts")


def run(args: argparse.Namespace) -> Result:
    console = Console()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        console.print("writing the checkpoints")
        models = _write(scratch, args)
        found = {}
        os.sync()  # unwritten pages would stay in the page cache
        for name, (model, quantization) in models.items():
            console.print(f"loading {name}")
            runs = [_load(model, quantization, place) for place in PLACES * args.rounds]
            for place in PLACES:
                own = [run for run in runs if run["place"] == place]
                found[name, place] = {
                    key: min(run[key] for run in own) for key in ("seconds", "extra_bytes")
                }
        shard_bytes = max(path.stat().st_size for path in models["bf16"][0].glob("*.safetensors"))
    rows = [
        Row(
            name=f"load from {place}, {name}",
            unit="s",
            ours=figures["seconds"],
            baseline=found["bf16", place]["seconds"],
            kind=Kind.MEASURED,
            at_most=TIME_AT_MOST,
            note="weights only, of the quickest of the rounds",
        )
        for (name, place), figures in found.items()
        if name != "bf16"
    ]
    rows += [
        Row(
            name=f"host memory beyond the weights, {name} from {place}",
            unit="bytes",
            ours=figures["extra_bytes"],
            baseline=float(shard_bytes),
            kind=Kind.MEASURED,
            at_most=SHARDS_AT_MOST,
            note="largest anonymous memory while loading, less what was there before",
        )
        for (name, place), figures in found.items()
    ]
    return Result(
        ours="quantized",
        baseline="bf16, or one of its shards",
        rows=rows,
        settings={"shards": NUM_SHARDS},
        bounded_by="reading files, and copying into the device's memory",
    )


def _write(scratch: Path, args: argparse.Namespace) -> dict[str, tuple[Path, str | None]]:
    from vllm_davinci_testing.engines.fp8_checkpoint import write_block_fp8

    config = transformers.DeepseekV3Config(
        vocab_size=1024,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        moe_intermediate_size=args.hidden // 2,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=args.experts,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        topk_method="noaux_tc",
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    floats, whole = scratch / "bf16", scratch / "whole"
    network.save_pretrained(whole, max_shard_size="100GB")
    size = (whole / "model.safetensors").stat().st_size
    network.save_pretrained(floats, max_shard_size=size // NUM_SHARDS + 1)
    fp8 = write_block_fp8(whole, scratch / "fp8", NUM_SHARDS)
    int8 = scratch / "int8"
    run_child(["-m", "vllm_davinci.meta", "quantize", str(floats), str(int8)], PROCESS_LIMIT_S)
    return {
        "bf16": (floats, None),
        "int8": (int8, None),
        "fp8 to floats": (fp8, None),
        "fp8 to int8": (fp8, "ascend"),
    }


def _load(model: Path, quantization: str | None, place: str) -> dict[str, Any]:
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            advice = os.POSIX_FADV_DONTNEED if place == DISK else os.POSIX_FADV_WILLNEED
            os.posix_fadvise(file.fileno(), 0, 0, advice)
            while place == MEMORY and file.read(1 << 24):
                pass
    options = {"model": str(model), "quantization": quantization}
    figures = measured("quantization.loading_process", options, PROCESS_LIMIT_S)
    return {**figures, "place": place}
