"""Serves a small random model of every text family and says which give transformers' tokens.

Run by `nox -s zoo`; `-- FAMILY...` names families, all that vLLM and transformers have without.
Writes results/zoo/page.md, which is docs/measurements/models.md, from all results that are in
results/zoo/families: a run of some families leaves the others' there.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

from versions import ROOT, stamp

RESULTS = ROOT / "results" / "zoo"
NUM_PROMPTS, MAX_TOKENS = 8, 16
LENGTHS = (1, 2, 33, 127, 128, 129, 60, 150)
REFUSALS = ("UnsupportedFeatureError", "ConfigurationError", "CheckpointError", "not available in")
PAGE = f"""# Models of every family

{{stamp}}

A small random model of every family of text models that vLLM {{vllm}} and transformers {{transformers}}
both have, served in fp32 on the virtual NPU: {NUM_PROMPTS} prompts of 1 to {max(LENGTHS)} tokens, {MAX_TOKENS} greedy tokens
each, compared with transformers' on the CPU. `nox -s zoo` makes this page. Families with images are
in [the guide](../guides/multimodal.md).

Of {{total}} families {{equal}} give all tokens, {{differs}} differ, {{refused}} are refused with a reason, {{failed}} fail
otherwise, and of {{unmade}} transformers makes no small model by common sizes.

| family | result | reason |
| --- | --- | --- |
"""  # noqa: E501 - lines of the page


def last_line(error: BaseException) -> str:
    """The error in one line, as a table takes it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    text = (named or lines or [repr(error)])[-1]
    after = lines[lines.index(text) + 1 :] if text in lines else []
    if "ValidationError" in text and after:
        text = after[0]
    text = re.sub(r"/\S*/", "", text).replace("|", "\\|")
    return text if len(text) <= 240 else f"{text[:237]}..."


def served(model_type: str, work: Path) -> dict[str, Any]:
    """Serves one family, by an engine in a process of its own; what came of it."""
    from vllm import SamplingParams

    from vllm_davinci_testing.engines.engine_process import EngineProcess
    from vllm_davinci_testing.engines.family_zoo import write_family
    from vllm_davinci_testing.engines.transformers_reference import TransformersReference
    from vllm_davinci_testing.plugin import EXACT_SOC

    generator = random.Random(model_type)
    prompts = [[generator.randrange(256) for _ in range(length)] for length in LENGTHS]
    try:
        checkpoint = write_family(model_type, work / "model")
        reference = TransformersReference(checkpoint)
        reference.logits(prompts[2])
    except Exception as error:
        return {"result": "not made", "reason": last_line(error)}
    try:
        with EngineProcess(checkpoint, work / "log.txt", {"VNPU_SOC": EXACT_SOC}) as engine:
            outputs = engine.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
            )
    except Exception as error:
        is_refused = any(each in str(error) for each in REFUSALS)
        return {"result": "refused" if is_refused else "fails", "reason": last_line(error)}
    differences = [
        reference.first_difference(prompt, list(output.outputs[0].token_ids))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    wrong = [each for each in differences if each is not None]
    equal = f"{NUM_PROMPTS - len(wrong)} of {NUM_PROMPTS} equal"
    return {"result": equal, "reason": last_line(Exception(wrong[0])) if wrong else ""}


def page(results: dict[str, dict[str, Any]], every: list[str]) -> str:
    import transformers
    import vllm

    kinds = [result["result"] for result in results.values()]
    all_equal = f"{NUM_PROMPTS} of {NUM_PROMPTS} equal"
    text = PAGE.format(
        stamp=stamp("core", "models", "vnpu"),
        vllm=vllm.__version__.split("+")[0],
        transformers=transformers.__version__,
        total=len(kinds),
        equal=kinds.count(all_equal),
        differs=sum(kind.endswith("equal") and kind != all_equal for kind in kinds),
        refused=kinds.count("refused"),
        failed=kinds.count("fails"),
        unmade=kinds.count("not made"),
    )
    rows = (
        f"| {name} | {result['result']} | {result['reason']} |"
        for name, result in sorted(results.items())
    )
    missing = ", ".join(sorted({*every} - {*results}))
    left_out = f"\nNot run for this page: {missing}.\n" if missing else ""
    return text + "\n".join(rows) + "\n" + left_out


def main(asked: list[str]) -> int:
    """The status is 1 where a family differs or fails, which is neither exact nor refused."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import tempfile

    from vllm_davinci_testing.engines.family_zoo import text_families

    every = text_families()
    if unknown := set(asked) - set(every):
        sys.exit(f"No such families: {', '.join(sorted(unknown))}. Known are {', '.join(every)}.")
    kept = RESULTS / "families"
    kept.mkdir(parents=True, exist_ok=True)
    for family in asked or every:
        with tempfile.TemporaryDirectory(prefix="zoo-") as work:
            result = served(family, Path(work))
        (kept / f"{family}.json").write_text(json.dumps(result))
        print(f"{family}: {result['result']}. {result['reason']}", flush=True)
    results = {
        path.stem: json.loads(path.read_text())
        for path in kept.glob("*.json")
        if path.stem in every
    }
    (RESULTS / "page.md").write_text(page(results, every))
    is_good = all(
        result["result"] in ("refused", "not made", f"{NUM_PROMPTS} of {NUM_PROMPTS} equal")
        for result in results.values()
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
