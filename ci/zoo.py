"""Serves a small random model of every family and compares its tokens with transformers'.

Run by `nox -s zoo`; `-- FAMILY...` selects families (default: all that vLLM and transformers
share). Writes results/zoo/page.md, the source of docs/measurements/models.md, from all results in
results/zoo/families. Running some families keeps the others' results, and the page names their
commits.
"""

import json
import os
import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from versions import ROOT, commit, stamp

RESULTS = ROOT / "results" / "zoo"
NUM_PROMPTS, MAX_TOKENS = 8, 16
LENGTHS = (1, 2, 33, 127, 128, 129, 60, 150)
REFUSALS = ("UnsupportedFeatureError", "ConfigurationError", "CheckpointError", "not supported in")
NOT_MADE = "not made"
PAGE = f"""# Models of every family

{{stamp}}

A small random model of every family that vLLM {{vllm}} and transformers {{transformers}} both have, served
in fp32 on the virtual NPU and compared with transformers' on the CPU. `nox -s zoo` makes this page.
"Not made": transformers cannot make a small model from the sizes that all families share.
Reasons are the last lines of errors; some refusals only mean that those sizes do not fit vLLM's definition.
Kimi-K3 is not in transformers: a small one is compared with its equations in plain torch, its text in `tests/e2e/test_kimi_k3.py`.{{earlier}}

## Text

{NUM_PROMPTS} prompts of 1 to {max(LENGTHS)} tokens, {MAX_TOKENS} greedy tokens each. {{text_summary}}

| family | result | reason |
| --- | --- | --- |
{{text}}

## Images and sound

Three prompts with an image or a sound, one of words alone, {MAX_TOKENS} greedy tokens each. {{media_summary}}
Waits: of the host for the device, most of any call of the encoder (counted).

| family | result | waits | reason |
| --- | --- | --- | --- |
{{media}}

Families that vLLM and transformers both have, and that have no small model here:

| family | reason |
| --- | --- |
{{unmade}}
"""  # noqa: E501 - lines of the page


def last_line(error: BaseException) -> str:
    """Shortens the error to one line for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    text = (named or lines or [repr(error)])[-1]
    after = lines[lines.index(text) + 1 :] if text in lines else []
    if "ValidationError" in text and after:
        text = after[0]
    text = re.sub(r"/\S*/", "", text).replace("|", "\\|")
    return text if len(text) <= 240 else f"{text[:237]}..."


def served(family: str, work: Path) -> dict[str, Any]:
    """Serves one family in a separate process; returns the outcome."""
    from vllm_davinci_testing.engines.multimodal_zoo import FAMILIES

    return served_with_media(family, work) if family in FAMILIES else served_text(family, work)


def served_text(model_type: str, work: Path) -> dict[str, Any]:
    from vllm_davinci_testing.engines.engine_process import EngineProcess
    from vllm_davinci_testing.engines.family_zoo import OF_REFERENCE, write_family
    from vllm_davinci_testing.engines.transformers_reference import TransformersReference
    from vllm_davinci_testing.plugin import EXACT_SOC

    generator = random.Random(model_type)
    prompts = [[generator.randrange(256) for _ in range(length)] for length in LENGTHS]
    try:
        checkpoint = write_family(model_type, work / "model")
        fields, why = OF_REFERENCE.get(model_type, ({}, ""))
        reference = TransformersReference(checkpoint, **fields)
        reference.logits(prompts[2])
    except Exception as error:
        return {"result": NOT_MADE, "reason": last_line(error)}
    try:
        with EngineProcess(checkpoint, work / "log.txt", {"VNPU_SOC": EXACT_SOC}) as engine:
            outputs = engine.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], greedy()
            )
    except Exception as error:
        return without_tokens(error)
    found = compared(
        reference.first_difference(prompt, list(output.outputs[0].token_ids))
        for prompt, output in zip(prompts, outputs, strict=True)
    )
    if is_equal(found):
        given = ", ".join(f"{name} = {value}" for name, value in fields.items())
        found["reason"] = f"{given} in transformers: {why}" if given else why
    return found


def served_with_media(family: str, work: Path) -> dict[str, Any]:
    """Like served_text, but also counts the host's waits in a call of the encoder."""
    from vllm_davinci_testing.engines.multimodal_reference import reference_of
    from vllm_davinci_testing.engines.multimodal_serving import served_family
    from vllm_davinci_testing.engines.multimodal_zoo import FAMILIES
    from vllm_davinci_testing.plugin import EXACT_SOC

    zoo = FAMILIES[family]
    try:
        (work / "model").mkdir()
        checkpoint = zoo.write(work / "model")
        reference = reference_of(zoo, checkpoint)
        reference.inputs(zoo.requests()[0])
    except Exception as error:
        return {"result": NOT_MADE, "reason": last_line(error)}
    log, environment = work / "log.txt", {"VNPU_SOC": EXACT_SOC}
    try:
        served = served_family(zoo, checkpoint, reference, log, environment, MAX_TOKENS)
    except Exception as error:
        return without_tokens(error)
    found = {**compared(served.differences), "waits": max(served.waits, default=None)}
    if is_equal(found):
        found["reason"] = "; ".join(filter(None, (zoo.waits_for, zoo.changed)))
    return found


def greedy() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def without_tokens(error: Exception) -> dict[str, Any]:
    """Returns the outcome of a family whose engine raised an error."""
    is_refused = any(each in str(error) for each in REFUSALS)
    return {"result": "refused" if is_refused else "fails", "reason": last_line(error)}


def compared(differences: Iterable[str | None]) -> dict[str, Any]:
    """Returns a served family's outcome. differences: from transformers, per prompt"""
    every = list(differences)
    wrong = [each for each in every if each is not None]
    equal = f"{len(every) - len(wrong)} of {len(every)} equal"
    return {"result": equal, "reason": last_line(Exception(wrong[0])) if wrong else ""}


def is_equal(result: dict[str, Any]) -> bool:
    """True if every prompt has transformers' tokens."""
    found = re.fullmatch(r"(\d+) of (\d+) equal", result["result"])
    return found is not None and found[1] == found[2]


def summary(results: Iterable[dict[str, Any]]) -> str:
    """Formats a sentence with the number of families per outcome."""
    every = list(results)
    kinds = [result["result"] for result in every]
    equal = sum(map(is_equal, every))
    differ = sum(kind.endswith("equal") for kind in kinds) - equal
    return (
        f"Of {len(every)} families {equal} give all tokens, {differ} differ, "
        f"{kinds.count('refused')} are refused with a reason, {kinds.count('fails')} fail "
        f"otherwise, and {kinds.count(NOT_MADE)} are not made."
    )


def page(
    results: dict[str, dict[str, Any]], text: list[str], media: list[str], unmade: dict[str, str]
) -> str:
    """Writes the page. text, media: families of each kind; those without a result are omitted."""
    import transformers
    import vllm

    of_text = {name: results[name] for name in text if name in results}
    of_media = {name: results[name] for name in media if name in results}
    written = PAGE.format(
        stamp=stamp("core", "models", "vnpu"),
        vllm=vllm.__version__.split("+")[0],
        transformers=transformers.__version__,
        text_summary=summary(of_text.values()),
        text="\n".join(
            f"| {name} | {each['result']} | {each['reason']} |" for name, each in of_text.items()
        ),
        earlier=earlier(results),
        media_summary=summary(of_media.values()),
        media="\n".join(
            f"| {name} | {each['result']} | {shown(each.get('waits'))} | {each['reason']} |"
            for name, each in of_media.items()
        ),
        unmade="\n".join(f"| {name} | {reason} |" for name, reason in unmade.items()),
    )
    missing = ", ".join(sorted({*text, *media} - {*results}))
    return written + (f"\nNot run for this page: {missing}.\n" if missing else "")


def earlier(results: dict[str, dict[str, Any]]) -> str:
    """Formats sentences with the rows' commits, and families of all but the most frequent
    commit.
    """
    by_commit: dict[str, list[str]] = {}
    for name, each in sorted(results.items()):
        by_commit.setdefault(each["commit"], []).append(name)
    most = max(by_commit, key=lambda each: len(by_commit[each]), default=commit())
    fewer = {each: of for each, of in by_commit.items() if each != most}
    told = "".join(f"\n\nRows of commit {each}: {', '.join(of)}." for each, of in fewer.items())
    return told + ("" if most == commit() else f"\n\nAll other rows are of commit {most}.")


def shown(waits: int | None) -> str:
    return "" if waits is None else str(waits)


def main(asked: list[str]) -> int:
    """Returns exit status 1 if a family is neither exact nor refused."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import tempfile

    from vllm_davinci_testing.engines.family_zoo import text_families
    from vllm_davinci_testing.engines.multimodal_zoo import FAMILIES, unmade_families

    text, media = text_families(), sorted(FAMILIES)
    every = [*text, *media]
    if unknown := set(asked) - set(every):
        sys.exit(f"No such families: {', '.join(sorted(unknown))}. Known are {', '.join(every)}.")
    kept = RESULTS / "families"
    kept.mkdir(parents=True, exist_ok=True)
    for family in asked or every:
        with tempfile.TemporaryDirectory(prefix="zoo-") as work:
            result = {**served(family, Path(work)), "commit": commit()}
        (kept / f"{family}.json").write_text(json.dumps(result))
        print(f"{family}: {result['result']}. {result['reason']}", flush=True)
    results = {
        path.stem: json.loads(path.read_text())
        for path in kept.glob("*.json")
        if path.stem in every
    }
    (RESULTS / "page.md").write_text(page(results, text, media, unmade_families()))
    is_good = all(
        result["result"] in ("refused", NOT_MADE) or is_equal(result) for result in results.values()
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
