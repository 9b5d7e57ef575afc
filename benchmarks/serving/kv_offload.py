"""Time to the first token of a prompt with its KV cache on the host, compared with recomputing it.

One engine alternates between a new prompt and a prompt that has its blocks only on the host. The
rate of its loads is compared with one contiguous copy of the same size from pinned memory.
"""

import argparse
from pathlib import Path

from child import measured
from result import Kind, Result, Row

PROCESS_LIMIT_S = 900
CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny_llama"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--prompt-tokens", type=int, default=896)
    parser.add_argument("--rounds", type=int, default=10)


def run(args: argparse.Namespace) -> Result:
    options = {
        "model": str(args.model),
        "prompt_tokens": args.prompt_tokens,
        "rounds": args.rounds,
    }
    found = measured("serving.kv_offload_process", options, PROCESS_LIMIT_S)
    return Result(
        ours="blocks that come from the host",
        baseline="the prompt computed again; for the rate: one copy of as many bytes",
        rows=[
            Row.median(
                "time to the first token", "ms", found["loaded_s"], found["computed_s"], scale=1e3
            ),
            Row(
                "tokens of a prompt that come from the host",
                "tokens",
                found["loaded_tokens"],
                Kind.COUNTED,
                baseline=args.prompt_tokens,
            ),
            *(
                Row(
                    f"rate of {name}s of 8 blocks of Qwen3-8B's cache, 151 MB",
                    "MB/s",
                    found[f"{name}_rate"] / 1e6,
                    Kind.MEASURED,
                    baseline=found["copy_rate"] / 1e6,
                )
                for name in ("load", "store")
            ),
        ],
        settings={"model": args.model.name},
        bounded_by="copies from host to device, and the rest of a step",
    )
