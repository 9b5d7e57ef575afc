"""Measures dual-batch overlap in wall time: prefills on two ranks, whole and split, and a bound.

On the virtual NPU operators and collectives take artificial times, in proportion to the bytes that
they write, so that half a step takes half as long. They sleep instead of computing, so the host's
cores suffice for two ranks with a compute and a communication stream each. Traces show how much
communication was hidden; `--traces DIRECTORY` keeps them.

The dense model's intervals between collectives are equally long. With other models each half's
interval overlaps a collective of the other half, and the longer of the two counts.

`dense` and `deepseek` have one DP rank of two TP ranks. `dp_ranks` has two DP ranks of one TP rank,
which send tokens to experts and back by all-to-all. Routing differs between layers and halves, so
that no two intervals are equally long.
"""

import argparse
import json
import socket
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from child import measured
from multistream.step_trace import StepTrace, steps_of
from result import Kind, Result, Row
from vllm_davinci.vnpu import timeline
from vllm_davinci.vnpu.intervals import Interval, length

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
LIMIT_S = 300


@dataclass(frozen=True)
class Case:
    """A model on two ranks.

    checkpoint: a shipped one; changes: other values for its config.json
    pace:     VNPU_PACE with which computation and communication take about equally long
    engine:   arguments for vLLM's engine
    options:  its additional_config, without dbo
    dp_ranks: data-parallel ranks
    computes: True if operators do their arithmetic
    """

    checkpoint: str
    changes: dict[str, Any]
    pace: str
    engine: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    dp_ranks: int = 1
    computes: bool = False


# The hidden size exceeds the latent size, as in models that are not tiny.
DEEPSEEK = {
    "hidden_size": 1536,
    "q_lora_rank": 384,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 192,
    "intermediate_size": 1024,
}
TENSOR_PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
CASES = {
    "dense": Case(
        "tiny_llama",
        {},
        # An all-reduce takes as long as a reduce-scatter and an all-gather.
        "aclnnM=16000/MiB,aclnnFused=32000/MiB,all_reduce=48000/MiB,all_gather=24000/MiB,"
        "reduce_scatter=48000/MiB",
        TENSOR_PARALLEL,
    ),
    "deepseek": Case(
        "tiny_deepseek",
        DEEPSEEK,
        "aclnnM=2000/MiB,aclnnGrouped=2000/MiB,aclnnBatch=2000/MiB,aclnnFused=4000/MiB,"
        "aclnnMoe=100,all_=4000/MiB,reduce_scatter=8000/MiB",
        TENSOR_PARALLEL,
    ),
    "dp_ranks": Case(
        "tiny_deepseek",
        {"first_k_dense_replace": 0},
        "aclnnM=8000/MiB,aclnnGrouped=20000/MiB,aclnnFused=8000/MiB,all_to_all=44000/MiB",
        {"enable_expert_parallel": True},
        {"moe_communication": "all_to_all"},
        dp_ranks=2,
        computes=True,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="prompt tokens of each request")
    parser.add_argument("--repetitions", type=int, default=3, help="number of measured prefills")
    parser.add_argument(
        "--all-reduce",
        action="store_true",
        help="without sequence parallelism: every rank has all tokens",
    )
    parser.add_argument("--pace", help="value of VNPU_PACE for all cases")
    parser.add_argument("--traces", type=Path, help="keep the traces in this directory")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Result:
    rows: list[Row] = []
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        kept: Path = args.traces or Path(scratch)
        for name in args.models:
            case = CASES[name]
            model = Path(scratch) / name
            vocabulary = write_model(model, case, args.layers, args.tokens, args.seed)
            sides = {}
            for side in ("whole", "split"):
                console.print(f"{name}: {side}")
                sides[side] = _prefills(
                    args, case, model, vocabulary, side == "split", kept / f"{name}_{side}"
                )
            rows += _rows(name, sides["whole"], sides["split"])
    return Result(
        ours="two ubatches in turn (dbo.enabled)",
        baseline="whole steps",
        rows=rows,
        settings={
            "artificial_durations": {name: args.pace or CASES[name].pace for name in args.models},
            "ranks": 2,
        },
        device="vnpu, policy threads, artificial durations",
        bounded_by=(
            "the longer of computation and communication of the same run, and the part of the step "
            "that is not split; of the rest, the first half's first and the second half's last "
            "interval have nothing to hide under"
        ),
    )


def write_model(directory: Path, case: Case, num_layers: int, num_tokens: int, seed: int) -> int:
    """Writes a checkpoint, with weights only if values matter; returns its vocabulary size."""
    text = (CHECKPOINTS / case.checkpoint / "config.json").read_text(encoding="utf-8")
    configuration = {
        **json.loads(text),
        **case.changes,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 2 * num_tokens,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
    if case.computes:
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(directory)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return int(configuration["vocab_size"])


def _prefills(
    args: argparse.Namespace,
    case: Case,
    model: Path,
    vocabulary: int,
    is_split: bool,
    directory: Path,
) -> list[StepTrace]:
    """Runs the engine and returns its steps on the first DP rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def dp_rank(rank: int) -> list[Interval]:
        traces = directory / f"dp_rank_{rank}"
        traces.mkdir(parents=True, exist_ok=True)
        for old in traces.iterdir():
            old.unlink()
        options = {
            "model": str(model),
            "vocabulary": vocabulary,
            **{key: getattr(args, key) for key in ("tokens", "requests", "repetitions", "seed")},
            "engine": {**case.engine, "load_format": "auto" if case.computes else "dummy"},
            "additional_config": {
                **case.options,
                "dbo": {"enabled": is_split},
                **({"sequence_parallel": {"enabled": False}} if args.all_reduce else {}),
            },
        }
        place = {
            "VLLM_DP_SIZE": str(case.dp_ranks),
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port),
        }
        more = {
            **(place if case.dp_ranks > 1 else {}),
            "VNPU_SCHEDULE": "threads",
            "VNPU_COMPUTE": str(int(case.computes)),
            "VNPU_PACE": args.pace or case.pace,
            "VNPU_TRACE": str(traces),
            # The engine runs in the calling process, so that it sees all requests of a batch.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": "1",
        }
        part = "multistream.overlap_process"
        windows = measured(part, options, LIMIT_S, more, is_killed=False)
        return [(begin, end) for begin, end in windows]

    with ThreadPoolExecutor(case.dp_ranks) as threads:
        first, *_ = threads.map(dp_rank, range(case.dp_ranks))
    return steps_of(timeline.read([directory / "dp_rank_0"]), first)


def _rows(name: str, whole: list[StepTrace], split: list[StepTrace]) -> list[Row]:
    def milliseconds(steps: list[StepTrace]) -> list[float]:
        return [(step.end - step.begin) / 1000 for step in steps]

    times = milliseconds(split)
    step = split[times.index(min(times))]
    return [
        Row.median(
            f"{name}: prefill, from request to answer",
            "ms",
            times,
            milliseconds(whole),
            bound=statistics.median(step.bound() / 1000 for step in split),
        ),
        Row.median(
            f"{name}: the same against its bound",
            "x",
            [(step.end - step.begin) / step.bound() for step in split],
            at_most=1.08,
            note="bound: max(computation, communication) + unsplit part",
        ),
        Row.median(
            f"{name}: first half's communication under second half's computation",
            "share of the smaller",
            [step.hidden_share() for step in split],
            at_least=0.85,
        ),
        *(
            Row(name=f"{name}: {what} of a split prefill", unit="ms", ours=value / 1000,
                kind=Kind.MEASURED)
            for what, value in (
                ("computation", length(step.computing())),
                ("communication", length(step.communicating())),
                ("unsplit part", step.unsplit()),
            )
        ),
    ]  # fmt: skip
