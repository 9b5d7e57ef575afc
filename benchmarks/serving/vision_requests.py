"""Sends requests with images to a server, with both forms of its encoder.

`vllm serve` runs a small Qwen3-VL with an encoder of 27 blocks. The client is vLLM's own, `vllm
bench serve --backend openai-chat --dataset-name random-mm`, once per form and round. Between rounds
the worker changes its form (`/collective_rpc`, vLLM's endpoint for development). Operators compute
and then sleep for a given time (VNPU_PACE) in a thread of the device. Server, engine, device and
client share the host's cores, so only the difference between the two forms is meaningful.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from result import Kind, Result, Row
from vllm_davinci_testing.engines import vision_zoo
from vllm_davinci_testing.engines.server_process import VLLM, ServerProcess

CLIENT_LIMIT_S = 600
CALL_LIMIT_S = 60
FORMS = {"ours": "keep_lengths_on_the_host", "blocking": "read_lengths_in_every_block"}
MODEL = "qwen3_vl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=100, help="requests per form and round")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=27, help="number of encoder blocks")
    parser.add_argument("--side", type=int, default=112, help="size of an image, in pixels")
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument(
        "--pace", type=int, default=1, help="microseconds per operator; a timer adds 60"
    )
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Result:
    found: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model = vision_zoo.write_vision_checkpoint(
            MODEL, directory / "model", args.seed, encoder_blocks=args.blocks
        )
        server = start(model, directory, args)
        try:
            server.wait_until_ready()
            # Warm up: the server's first image of a size, and its first step of each kind.
            bench(server, model, args, 8, seed=args.seed)
            for number in range(1, args.rounds + 1):
                # Both forms get the same requests, and no results are cached (see `start`).
                for form, method in FORMS.items():
                    Console().print(f"round {number}/{args.rounds}: {form}")
                    change_form(server, method)
                    seed = args.seed + number
                    found[form].append(bench(server, model, args, args.requests, seed))
        finally:
            server.kill()
    return Result(
        ours="lengths from the host",
        baseline="a blocking copy per block",
        rows=_rows(found),
        device="vnpu, policy threads",
        bounded_by=(
            "server, engine, device and client on the host's cores, which also decode images and "
            "cut them into patches"
        ),
    )  # fmt: skip


def start(model: Path, directory: Path, args: argparse.Namespace) -> ServerProcess:
    return ServerProcess(
        model,
        directory / "log.txt",
        "--served-model-name=vision",
        "--enforce-eager",
        "--dtype=bfloat16",
        "--max-model-len=512",
        "--max-num-seqs=32",
        # Otherwise the second form would use the first one's cached results.
        "--no-enable-prefix-caching",
        "--mm-processor-cache-gb=0",
        f"--kv-cache-memory-bytes={96 << 20}",
        '--limit-mm-per-prompt={"image": 1, "video": 0}',
        "--worker-extension-cls=serving.blocking_encoder.BlockingEncoder",
        environment={
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "VNPU_SCHEDULE": "threads",
            "VNPU_PACE": f"aclnn={args.pace}",
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
            ),
        },
    )


def change_form(server: ServerProcess, method: str) -> None:
    answer = httpx.post(
        f"{server.url}/collective_rpc", json={"method": method}, timeout=CALL_LIMIT_S
    )
    answer.raise_for_status()


def bench(
    server: ServerProcess, model: Path, args: argparse.Namespace, requests: int, seed: int
) -> dict[str, Any]:
    """Returns the results saved by `vllm bench serve`.

    Raises RuntimeError with its last lines if it fails.
    """
    directory = server.log.parent
    done = subprocess.run(
        [
            *VLLM, "bench", "serve", "--backend=openai-chat", "--endpoint=/v1/chat/completions",
            f"--base-url={server.url}", "--model=vision", f"--tokenizer={model}",
            "--dataset-name=random-mm", f"--num-prompts={requests}", f"--request-rate={args.rate}",
            "--random-input-len=16", f"--random-output-len={args.output_tokens}", "--ignore-eos",
            "--random-mm-base-items-per-request=1",
            '--random-mm-limit-mm-per-prompt={"image": 1, "video": 0}',
            f"--random-mm-bucket-config={{({args.side}, {args.side}, 1): 1.0}}",
            f"--seed={seed}", "--metric-percentiles=50,99",
            "--save-result", "--save-detailed", f"--result-dir={directory}",
            "--result-filename=result.json",
        ],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=CLIENT_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(
            f"vllm bench serve ended with {done.returncode}:\n"
            f"{(done.stdout + done.stderr)[-3000:]}\nThe server's last lines:\n{server.tail()}"
        )
    result: dict[str, Any] = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    return result


def _rows(found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    ours, blocking = ([ttft for each in found[form] for ttft in each["ttfts"]] for form in FORMS)
    low, median, high = (1e3 * value for value in statistics.quantiles(ours, n=4))
    asked, completed = (
        {form: sum(each[key] for each in rounds) for form, rounds in found.items()}
        for key in ("num_prompts", "completed")
    )
    return [
        Row(
            "requests that failed", "", asked["ours"] - completed["ours"], Kind.COUNTED,
            at_most=0,
            note=f"of {asked['ours']}; blocking: {asked['blocking'] - completed['blocking']}",
        ),
        Row(
            "time to the first token, median", "ms", median, Kind.MEASURED,
            baseline=1e3 * statistics.median(blocking), quartiles=(low, high),
        ),
        *(
            Row(
                f"time to the first token, {name}", "ms",
                statistics.mean(each[key] for each in found["ours"]), Kind.MEASURED,
                baseline=statistics.mean(each[key] for each in found["blocking"]),
            )
            for name, key in (("mean", "mean_ttft_ms"), ("99th percentile", "p99_ttft_ms"))
        ),
        Row(
            "time per output token, median", "ms",
            statistics.median(each["median_tpot_ms"] for each in found["ours"]), Kind.MEASURED,
            baseline=statistics.median(each["median_tpot_ms"] for each in found["blocking"]),
        ),
    ]  # fmt: skip
