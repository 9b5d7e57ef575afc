"""Rate of transferring a prompt's blocks between engines, compared with one equally large copy.

One engine computes prompts; the other receives and verifies their blocks, then computes one step.
Each has a process. The two processes also send as many bytes through one socket (TCP, loopback).
"""

import argparse
import socket
import statistics
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from child import AskedChild
from result import Kind, Result, Row

PROCESS_LIMIT_S = 300
CARRIERS = {"nixl": "NixlConnector", "mooncake": "MooncakeConnector"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--carriers", nargs="+", choices=sorted(CARRIERS), default=sorted(CARRIERS))
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)


def run(args: argparse.Namespace) -> Result:
    rows = []
    for carrier in args.carriers:
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(Path(scratch), carrier, args.prompt_tokens, args.rounds)
        rows += rows_of(carrier, found)
    return Result(
        ours="blocks that come from another engine: read, checked, and copied to the device",
        baseline="as many bytes through one socket between the same processes; for the time to "
        "the first token: the prompt computed again",
        rows=rows,
        bounded_by="copies from process to process, from host to device, and sums over the bytes",
    )


def rows_of(carrier: str, found: dict[str, Any]) -> list[Row]:
    megabytes = found["num_bytes"] / 1e6
    blocks, of_socket = (
        [megabytes / each for each in found[key]] for key in ("come_s", "socket_s")
    )
    return [
        Row.median(
            f"{carrier}: rate of {megabytes:.0f} MB of blocks",
            "MB/s",
            blocks,
            of_socket,
            bound=megabytes / statistics.median(found["copy_s"]),
            note="bound: one copy in memory",
        ),
        Row.median(
            f"{carrier}: time to the first token",
            "ms",
            found["over_s"],
            found["computed_s"],
            scale=1e3,
        ),
        Row(
            f"{carrier}: tokens of a prompt that come over",
            "tokens",
            found["tokens"],
            Kind.COUNTED,
            baseline=found["asked_tokens"],
        ),
    ]


def measure(scratch: Path, carrier: str, prompt_tokens: int, rounds: int) -> dict[str, Any]:
    """Measures transfers between two engines in turn; neither engine has other work."""
    options = {
        "connector": CARRIERS[carrier],
        "model": str(scratch / "model"),
        "prompt_tokens": prompt_tokens,
        "port": free_port(),
    }
    children = []
    found: dict[str, Any] = {key: [] for key in TIMES}
    with ExitStack() as stack:
        for role in ("kv_producer", "kv_consumer"):
            # The first engine writes the model.
            children.append(stack.enter_context(child({**options, "role": role})))
            children[-1].answer()
        for number in range(1 + rounds):
            once = ask_once(*children, options, number)
            if number:  # the first transfer connects the engines
                for key in TIMES:
                    found[key].append(once[key])
        return {**found, **{key: once[key] for key in ("num_bytes", "tokens", "asked_tokens")}}


TIMES = ("come_s", "over_s", "computed_s", "socket_s", "copy_s")


def ask_once(
    prefills: AskedChild, decodes: AskedChild, options: dict[str, Any], number: int
) -> dict[str, Any]:
    """Computes a prompt in one engine and continues it in the other; then copies once through a
    socket.
    """
    told = prefills.ask({"do": "prefill", "seed": number})
    over = decodes.ask({"do": "decode", "seed": number, "told": told})
    computed_s = decodes.ask({"do": "compute", "seed": 1000 + number})
    port = decodes.ask({"do": "listen"})
    sent = prefills.ask({"do": "send", "port": port, "num_bytes": over["num_bytes"]})
    received = decodes.ask({"do": "received_bytes"})
    assert received == sent
    copy_s = decodes.ask({"do": "copy", "num_bytes": over["num_bytes"]})
    return {
        **over,
        "computed_s": computed_s,
        "socket_s": decodes.ask({"do": "seconds"}),
        "copy_s": copy_s,
        "asked_tokens": options["prompt_tokens"],
    }


def child(options: dict[str, Any]) -> AskedChild:
    port = options["port"]
    asked_at = port if options["role"] == "kv_producer" else free_port()
    more = {
        "UCX_TLS": "tcp",  # as between hosts
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(asked_at),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
    }
    return AskedChild("serving.kv_transfer_process", options, PROCESS_LIMIT_S, more)


def free_port() -> int:
    with closing(socket.socket()) as opened:
        opened.bind(("127.0.0.1", 0))
        number: int = opened.getsockname()[1]
        return number
