"""Compares checkpoints' tokens with transformers' in fp32 on the CPU, with and without overlap."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_davinci.verify.case import Case
from vllm_davinci.verify.device import Device
from vllm_davinci.verify.engine_process import EngineRun
from vllm_davinci.verify.finding import Finding, Kind
from vllm_davinci.verify.ranks import answer_of_ranks
from vllm_davinci.verify.settings import Settings
from vllm_davinci.verify.trace import PROFILE

LIMIT_S = 600.0
RANKS = 2
# Maximum distance of logits whose order 16 bits can change, in standard deviations of all.
CLOSE = 0.25


def cases(settings: Settings, directory: Path) -> Iterator[Case]:
    for path in settings.checkpoints:
        checkpoint = Path(path)
        known: dict[str, Any] = {}
        yield Case(
            f"tokens/{checkpoint.name}",
            lambda checkpoint=checkpoint, known=known: _alone(checkpoint, known),  # type: ignore[misc]
        )
        if not _chooses_tokens(checkpoint):
            yield Case(
                f"tokens/{checkpoint.name} with overlap",
                lambda checkpoint=checkpoint, known=known: _overlapped(  # type: ignore[misc]
                    checkpoint, known, directory
                ),
            )


def _chooses_tokens(checkpoint: Path) -> bool:
    """True for sparse attention, which excludes the overlaps."""
    config = checkpoint / "config.json"
    return config.is_file() and "index_topk" in json.loads(config.read_text(encoding="utf-8"))


def _alone(checkpoint: Path, known: dict[str, Any]) -> Iterator[Finding]:
    answer = known["answer"] = _run(EngineRun(str(checkpoint), overlaps=False))
    name = f"tokens/{checkpoint.name}"
    close, wrong, first = _beside_the_definition(checkpoint, answer)
    details = {"prompts": answer["prompts"], **({"first wrong": first} if first else {})}
    yield Finding(name, answer["tokens"], passed=not wrong, details=details)
    yield Finding(f"{name}/other than in fp32, where two are close", close, Kind.NOTE)
    yield Finding(f"{name}/wrong", wrong, passed=not wrong)
    yield from _seconds(f"{name}/seconds", answer)


def _overlapped(checkpoint: Path, known: dict[str, Any], directory: Path) -> Iterator[Finding]:
    ranks = min(Device().torch.npu.device_count(), RANKS)
    if ranks > 1:  # ubatches take turns at collectives, which one rank does not have
        alone = _run(EngineRun(str(checkpoint), overlaps=False, ranks=ranks))
    else:
        alone = known.get("answer") or _run(EngineRun(str(checkpoint), overlaps=False))
    profile = str(directory / PROFILE / checkpoint.name)
    answer = _run(EngineRun(str(checkpoint), overlaps=True, profile=profile, ranks=ranks))
    name = f"tokens/{checkpoint.name} with overlap"
    equal = answer["tokens"] == alone["tokens"]
    details = {} if equal else {"without": alone["tokens"], "with": answer["tokens"]}
    yield Finding(name, "equal" if equal else "other tokens", passed=equal, details=details)
    yield from _seconds(f"{name}/seconds", answer)
    if Device().has_times:
        ratio = round(answer["seconds"] / alone["seconds"], 4)
        yield Finding(f"{name}/time over that without", ratio, Kind.FIGURE, "ratio")


def _seconds(name: str, answer: dict[str, Any]) -> Iterator[Finding]:
    if Device().has_times:
        yield Finding(name, round(answer["seconds"], 6), Kind.FIGURE, "s")


def _run(run: EngineRun) -> dict[str, Any]:
    """Runs one engine in separate processes and returns its answer. Raises VerificationError."""
    module = "vllm_davinci.verify.engine_process"
    return answer_of_ranks([module, run.encoded()], run.ranks, LIMIT_S)


def _beside_the_definition(
    checkpoint: Path, answer: dict[str, Any]
) -> tuple[int, int, dict[str, Any]]:
    """Counts tokens that differ from the reference's greedy choice: close ones, wrong ones; and the
    first wrong one."""
    import torch
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    close = wrong = 0
    first: dict[str, Any] = {}
    for prompt, tokens in zip(answer["prompts"], answer["tokens"], strict=True):
        with torch.inference_mode():
            logits = network(torch.tensor([[*prompt, *tokens]])).logits[0].float()
        rows = logits[len(prompt) - 1 : -1]
        for position, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            gap = float((row.max() - row[token]) / row.std())
            close += 0 < gap <= CLOSE
            wrong += gap > CLOSE
            if gap > CLOSE and not first:
                first = {"prompt": prompt, "position": position, "token": token,
                         "expected": int(row.argmax()), "gap": round(gap, 4)}  # fmt: skip
    return close, wrong, first
