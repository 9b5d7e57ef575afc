"""Loss from splitting DeepSeek-R1 W8A8's steps on 16 chips as step times decide."""

import random
from typing import Any

from published.deepseek_r1 import step_costs
from published.runs import EXPERT_PARALLEL, NEVER, PUBLISHED, Runs
from result import Kind, Row

GOAL_REGRET = 0.01
ALWAYS = {"min_total_tokens_to_split": 0, "min_prefill_tokens_to_split": 0}
# Steps of one prompt, at and beyond the sizes of the step-time table, the last two being chunks of
# longer prompts; then steps of four prompts of mixed lengths.
RANDOM, SEED = 200, 0  # steps of this many prompts of random lengths, three at a time
SIZES = (128, 192, 384, 768, 1536, 3072, 6144, 12288, 16384, 32768, 65536)
MIXED = (128, 1024, 64, 512, 2048, 256, 1024, 96, 8192, 2048, 1024, 512, 300, 40, 80, 60)
CHUNK = 16384


def host_ps(step: dict[str, Any]) -> int:
    ps: int = step["modelled"]["host_ps"]
    return ps


def regret_rows(runs: Runs) -> list[Row]:
    """Returns each step's time as decided, relative to the faster of whole and split."""
    costs = runs.directory / "costs.json"
    order = {**PUBLISHED, "dbo": {"split": "token"}}
    engine = ("--enforce-eager", EXPERT_PARALLEL, f"--max-num-batched-tokens={CHUNK}")
    step_costs(runs.chip, runs.topology, costs, *engine, config=order)
    rng = random.Random(SEED)
    lengths_at_random = tuple(round(2 ** rng.uniform(5, 14)) for _ in range(RANDOM))
    workloads = {
        "one prompt": (SIZES, 1),
        "four prompts of mixed lengths": (MIXED, 4),
        "three prompts of random lengths": (lengths_at_random, 3),
    }
    rows = []
    for name, (lengths, concurrency) in workloads.items():
        work = (
            *(f"--requests={len(lengths)}", f"--concurrency={concurrency}", "--output-tokens=1"),
            f"--prompt-tokens={','.join(map(str, lengths))}",
        )
        whole, split, decided = (
            runs.report(
                {**PUBLISHED, "dbo": {"split": "token", **dbo}, "step_costs": by}, *engine, *work
            )["steps"]
            for dbo, by in ((NEVER, None), (ALWAYS, None), ({}, str(costs)))
        )
        regrets = [
            (host_ps(found) / min(host_ps(a), host_ps(b)) - 1, sum(found["tokens"]))
            for a, b, found in zip(whole, split, decided, strict=True)
        ]
        regret, tokens = max(regrets)
        sizes = sorted(tokens for _, tokens in regrets)
        rows.append(
            Row(
                f"regret of the decision, steps of {name}", "share", regret, Kind.MODELLED,
                at_most=GOAL_REGRET,
                note=f"the largest, at {tokens} tokens, of {len(sizes)} steps of {sizes[0]} to "
                f"{sizes[-1]} tokens of prompts of up to {max(lengths)}",
            )
        )  # fmt: skip
    return rows
