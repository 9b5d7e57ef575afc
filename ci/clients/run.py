"""Serves the shipped checkpoints and calls them with published clients, as users do.

Run by `nox -s clients`, which installs the clients in a separate environment. Writes
results/clients/page.md, the source of docs/measurements/clients.md. Running some servers updates
earlier results.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from calls import Server

from vllm_davinci_testing.engines.adapters import write_adapter
from vllm_davinci_testing.engines.server_process import ForkedServer

from versions import ROOT, stamp  # isort: skip

RESULTS = ROOT / "results" / "clients"
HERE = Path(__file__).parent
PROGRAM_LIMIT_S = 1200
PROGRAMS = {
    "openai": "openai_calls.py",
    "anthropic": "anthropic_calls.py",
    "litellm": "litellm_calls.py",
    "lm-eval": "lm_eval_calls.py",
}
BENCH = "vllm bench serve"
WRONG = "## Not right"
# Variables that `vnpu run` sets.
OF_DEVICE = {"LD_LIBRARY_PATH", "LD_PRELOAD", "VNPU_ACTIVE", "ASCEND_HOME_PATH"}
ADAPTER = "adapter"
COMMON = (
    "--max-model-len=512",
    "--max-num-seqs=16",
    f"--kv-cache-memory-bytes={96 << 20}",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--shutdown-timeout=15",
)
EAGER = "--enforce-eager"
N_GRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 2}


@dataclass(frozen=True)
class Outcome:
    """answer: the answer, in a few words; error: None if it is correct."""

    answer: str
    error: str | None


Outcomes = dict[str, dict[str, Outcome]]  # outcomes by client and call


@dataclass(frozen=True)
class Served:
    """A server on the page: checkpoint, options, adapter."""

    name: str
    checkpoint: str
    options: tuple[str, ...]
    has_adapter: bool = False


SERVERS = (
    Served("llama, eager", "tiny_llama", (EAGER,)),
    Served("llama, graphs, LoRA", "tiny_llama", (), has_adapter=True),
    Served("llama, n-gram drafts", "tiny_llama", (f"--speculative-config={json.dumps(N_GRAM)}",)),
    Served("deepseek, eager", "tiny_deepseek", (EAGER,)),
    Served("deepseek, graphs, MTP", "tiny_deepseek", (f"--speculative-config={json.dumps(MTP)}",)),
)


def served(each: Served, directory: Path) -> Iterator[tuple[ForkedServer, Server]]:
    """Starts a server; stops it when the generator is closed."""
    checkpoint = ROOT / "checkpoints" / each.checkpoint
    options = [*COMMON, *each.options, f"--served-model-name={each.checkpoint}"]
    if each.has_adapter:
        network = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        adapter = write_adapter(network, directory / "adapter", rank=8, seed=1)
        options += ["--enable-lora", "--max-lora-rank=8", "--lora-modules", f"{ADAPTER}={adapter}"]
    log = directory / f"{each.name.replace(', ', '-').replace(' ', '-')}.log"
    process = ForkedServer(checkpoint, log, *options)
    try:
        process.wait_until_ready()
        adapter_name = ADAPTER if each.has_adapter else None
        has_drafts = any("speculative" in option for option in each.options)
        yield (
            process,
            Server(process.url, each.checkpoint, adapter_name, str(checkpoint), has_drafts),
        )
    finally:
        process.interrupt()
        process.wait_for_end()


def called(python: Path, program: str, server: Server) -> dict[str, Outcome]:
    """Runs a client's program against the server; returns its outcomes by call."""
    done = subprocess.run(
        [python, HERE / program, json.dumps(asdict(server))],
        capture_output=True,
        text=True,
        timeout=PROGRAM_LIMIT_S,
        check=False,
        # otherwise litellm downloads the prices of models, and waits for them
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"call"')]
    found = {line["call"]: Outcome(line["answer"], line["error"]) for line in lines}
    if done.returncode != 0:
        found["the program itself"] = Outcome("", done.stderr[-2000:])
    return found


def benchmarked(server: Server, directory: Path) -> dict[str, Outcome]:
    """Runs vLLM's own client under load, without a device; every request must succeed.

    Also, its output must not end with a list of Triton's objects.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OF_DEVICE}
    done = subprocess.run(
        [
            *(Path(sys.executable).with_name("vllm"), "bench", "serve", f"--model={server.model}"),
            *(f"--tokenizer={server.tokenizer}", f"--base-url={server.url}"),
            *("--dataset-name=random", "--random-input-len=48", "--random-output-len=24"),
            *("--num-prompts=48", "--request-rate=24", "--ignore-eos", "--save-result"),
            *(f"--result-dir={directory}", "--result-filename=bench.json"),
        ],
        capture_output=True,
        text=True,
        timeout=PROGRAM_LIMIT_S,
        check=False,
        env=environment,
    )
    answer, error = "", done.stderr[-2000:]
    if done.returncode == 0:
        result = json.loads((directory / "bench.json").read_text(encoding="utf-8"))
        answer = f"{result['completed']} answers, {result['total_output_tokens']} tokens"
        is_right = (result["completed"], result["total_output_tokens"]) == (48, 48 * 24)
        error = None if is_right and "nanobind" not in done.stderr else f"{answer}: {error}"
    return {"48 requests of 24 tokens, 24 per second": Outcome(answer, error)}


def releases(python: Path) -> str:
    """Lists the clients' names and releases."""
    program = "import importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in "
    done = subprocess.run(
        [python, "-c", f"{program}{sorted(PROGRAMS)!r}))"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def page(results: dict[str, Outcomes], clients: str) -> str:
    """Writes the page: a table of clients and servers, the answers of each client's calls, errors.

    results: by server
    clients: names and releases
    """
    names = dict.fromkeys(client for found in results.values() for client in found)
    lines = [
        "# Published clients",
        "",
        stamp("core", "models", "meta"),
        "",
        "The shipped checkpoints behind `vllm serve` on the virtual NPU, called by published",
        f"clients: {clients}, and vLLM's own, which has no device.",
        "A call is right if its answer has what was asked for (greedy texts repeat, streams add up",
        "to the whole, JSON fits its schema), or if a bad value is refused with its name.",
        "Counted; `nox -s clients` makes this page.",
        "",
        f"| client | {' | '.join(results)} |",
        f"| --- |{' --: |' * len(results)}",
    ]
    for client in names:
        cells = []
        for found in results.values():
            outcomes = found.get(client, {}).values()
            cells.append(f"{sum(each.error is None for each in outcomes)} of {len(outcomes)}")
        lines.append(f"| {client} | {' | '.join(cells)} |")
    checkpoints = list(dict.fromkeys(each.checkpoint for each in SERVERS if each.name in results))
    for client in names:
        lines += ["", f"## {client}", "", f"| call | {' | '.join(checkpoints)} |"]
        lines.append(f"| --- |{' --- |' * len(checkpoints)}")
        calls = dict.fromkeys(call for found in results.values() for call in found.get(client, {}))
        for call in calls:
            cells = [answer(results, checkpoint, client, call) for checkpoint in checkpoints]
            lines.append(f"| {call} | {' | '.join(cells)} |")
    errors = [
        f"- {server}, {client}, {call}: {outcome.error.strip().splitlines()[-1]}"
        for server, found in results.items()
        for client, outcomes in found.items()
        for call, outcome in outcomes.items()
        if outcome.error is not None
    ]
    if errors:
        lines += ["", WRONG, "", *errors]
    return "\n".join(lines) + "\n"


def answer(results: dict[str, Outcomes], checkpoint: str, client: str, call: str) -> str:
    """Returns the first correct answer of a checkpoint's servers, as a table cell."""
    for each in SERVERS:
        outcome = results.get(each.name, {}).get(client, {}).get(call)
        if each.checkpoint == checkpoint and outcome and outcome.error is None:
            return f"`` {outcome.answer} ``".replace("|", "\\|")
    return ""


def read_results(path: Path) -> dict[str, Outcomes]:
    """Reads results of earlier runs, by server; empty without a file."""
    if not path.exists():
        return {}
    return {
        server: {
            client: {call: Outcome(**outcome) for call, outcome in outcomes.items()}
            for client, outcomes in found.items()
        }
        for server, found in json.loads(path.read_text(encoding="utf-8")).items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="the clients' Python")
    parser.add_argument("names", nargs="*", help="prefixes of server names (default: all)")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    chosen = [s for s in SERVERS if not options.names or s.name.startswith(tuple(options.names))]
    file = RESULTS / "results.json"
    results = read_results(file) if options.names else {}
    clients = releases(options.python)
    text = ""
    for each in chosen:
        for _process, server in served(each, RESULTS):
            found: Outcomes = {}
            for client in (*PROGRAMS, BENCH):
                found[client] = (
                    benchmarked(server, RESULTS)
                    if client == BENCH
                    else called(options.python, PROGRAMS[client], server)
                )
                right = sum(outcome.error is None for outcome in found[client].values())
                print(f"{each.name}: {client} {right} of {len(found[client])}", flush=True)
                # Write after each client, so that an interrupted run leaves its results.
                results[each.name] = found
                results = {s.name: results[s.name] for s in SERVERS if s.name in results}
                file.write_text(json.dumps(results, indent=1, default=asdict), encoding="utf-8")
                text = page(results, clients)
                (RESULTS / "page.md").write_text(text, encoding="utf-8")
    wrong = text.partition(WRONG)[2]
    print(wrong or "all calls are right", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
