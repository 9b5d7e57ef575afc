"""Quantizes small models with the real ModelSlim on the virtual NPU and serves each.

`run.py [NAMES]` runs recipes whose names contain one of NAMES; default: all. Every export loads and
gives the tokens of an integer reference, or is refused in one line. The trained checkpoints'
perplexity stays near that of their floats. Prints a table; exit status 1 if an expectation fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_davinci_testing.engines.transformers_reference import TransformersReference

ROOT = Path(__file__).resolve().parents[2]
# checkpoints/ comes last, because it also has a module `recipes`.
sys.path += [str(ROOT / "ci"), str(ROOT / "checkpoints")]

import environment  # noqa: E402 - beside this file
import yaml  # noqa: E402
from agreement import Agreement, compare  # noqa: E402
from corpus import held_out_files, training_files  # noqa: E402
from outcomes import NEAR_DEFINITION, NUM_PROMPTS, NUM_TOKENS, SCORED_TOKENS, Outcome, page, table  # noqa: E402
from recipes import RECIPES, Recipe  # noqa: E402

from progress import StepFailedError, Steps  # noqa: E402

HERE = Path(__file__).parent
QUANTIZE_LIMIT_S = 900.0
# Text for ModelSlim: pieces of training files, in characters.
PIECE, PIECES = 1500, 16
WINDOW = 512  # in scored tokens
# Share of all tokens: 16 bits may choose another expert if two are nearly equal.
WRONG_AT_MOST = 0.03
# Maximum perplexity relative to bf16.
AT_MOST = {"dynamic": 1.01, "static": 1.02, "weights": 1.01}


class Suite:
    """One run. directory: for models, exports and logs."""

    def __init__(self, directory: Path, recipes: list[Recipe]) -> None:
        self._directory = directory
        self._recipes = recipes
        count = environment.NUM_STEPS + 1 + 2 * len(recipes)
        self._steps = Steps(count, directory / "logs")
        self._perplexities: dict[str, float] = {}

    def run(self) -> list[Outcome]:
        self._python = environment.prepare(self._steps)
        self._steps.start("float checkpoints")
        models = self._directory / "models"
        self._run_tool(HERE / "write_models.py", ROOT / "checkpoints", models)
        self._write_calibration()
        return [self._try(recipe) for recipe in self._recipes]

    def _write_calibration(self) -> None:
        files = training_files()
        share = PIECE * PIECES // len(files) + 1
        text = "\n".join(file.text[:share] for file in files)
        pieces = [text[start : start + PIECE] for start in range(0, PIECE * PIECES, PIECE)]
        lines = [json.dumps({"inputs_pretokenized": piece}) + "\n" for piece in pieces]
        (self._directory / "calibration.jsonl").write_text("".join(lines), encoding="utf-8")
        (self._directory / "calibration.txt").write_text("".join(pieces), encoding="utf-8")

    def _try(self, recipe: Recipe) -> Outcome:
        title = f"{recipe.model}: {recipe.name}"
        self._steps.start(f"{title}: ModelSlim")
        try:
            made = self._quantize(recipe)
        except StepFailedError as error:
            return Outcome(recipe, False, f"ModelSlim failed: {str(error).splitlines()[0]}")
        self._steps.start(f"{title}: check-model, serve")
        try:
            is_good, text = self._serve(recipe, made)
        except Exception as error:
            return Outcome(recipe, False, f"{type(error).__name__}: {last_line(error)}")
        return Outcome(recipe, is_good, text)

    def _quantize(self, recipe: Recipe) -> Path:
        name = re.sub(r"\W+", "_", f"{recipe.model}_{recipe.name}")
        made = self._directory / "exports" / name
        made.parent.mkdir(exist_ok=True)
        shutil.rmtree(made, ignore_errors=True)
        settings = {
            "apiversion": "modelslim_v1",
            "metadata": {
                "config_id": name,
                "score": 90,
                "label": {"w_bit": 8, "a_bit": 8, "is_sparse": False, "kv_cache": False},
            },
            "spec": {
                "process": list(recipe.steps),
                "dataset": str(self._directory / "calibration.jsonl"),
                "save": [{"type": "ascendv1_saver", "part_file_size": 4}],
            },
        }
        if recipe.older is not None:
            model = self._directory / "models" / recipe.model
            texts = self._directory / "calibration.jsonl"
            self._run_tool(HERE / "older_export.py", model, made, texts, recipe.older)
            return made
        recipe_file = self._directory / f"{name}.yaml"
        recipe_file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        options = {
            "--model_path": self._directory / "models" / recipe.model,
            "--save_path": made,
            "--device": "npu",
            "--model_type": recipe.model_type,
            "--config_path": recipe_file,
            "--trust_remote_code": True,
        }
        flat = [str(part) for option in options.items() for part in option]
        self._run_tool("-m", "msmodelslim.cli", "quant", *flat)
        return made

    def _run_tool(self, *arguments: str | Path) -> None:
        """Runs ModelSlim's Python in our directory, because ModelSlim leaves files behind."""
        command = ["env", "-C", self._directory, "vnpu", "run", "--", self._python, *arguments]
        self._steps.run(command, limit_s=QUANTIZE_LIMIT_S)

    def _serve(self, recipe: Recipe, made: Path) -> tuple[bool, str]:
        from vllm_davinci.core.checkpoint.check import check_checkpoint
        from vllm_davinci_testing.engines.engine_process import EngineError

        problems = check_checkpoint(made).problems()
        if recipe.refused is not None:
            try:
                self._served(made)
            except EngineError as error:
                told = next(
                    (line for line in str(error).splitlines() if recipe.refused in line), ""
                )
                in_check = any(recipe.refused in problem for problem in problems)
                line = told.strip().split(" [type=")[0]  # added by pydantic
                return bool(told) and in_check, f"refused: {line[-250:]}"
            return False, "served, and was to be refused"
        if problems:
            return False, f"check-model: {problems[0]}"
        return self._compare(recipe, made)

    def _compare(self, recipe: Recipe, made: Path) -> tuple[bool, str]:
        from vllm_davinci_testing.engines.integer_reference import IntegerReference

        is_scored = recipe.model.startswith("tiny_")
        prompts, found, perplexity = self._served(made, is_scored)
        definition = IntegerReference(made)
        close, wrong = definition.differing_tokens(prompts, found)
        total = sum(map(len, found))
        text = f"{total - close - wrong} of {total} tokens equal, {close} close, {wrong} not"
        is_equal = wrong <= WRONG_AT_MOST * total
        if not is_scored:
            return is_equal, text
        if recipe.ours is not None:
            agreement = self._agreement(recipe.ours, recipe, made)
            text += f"; beside vllm-davinci quantize {agreement}"
            is_wide = recipe.model != recipe.source
            is_equal = is_equal and not (is_wide and agreement.num_integers_apart)
        if recipe.source not in self._perplexities:
            source = ROOT / "checkpoints" / recipe.source
            self._perplexities[recipe.source] = self._served(source, is_scored)[2]
        floats = self._perplexities[recipe.source]
        ratio = perplexity / floats
        at_most = AT_MOST[recipe.name.split(",")[0].split()[0]]
        text += f"; perplexity {100 * (ratio - 1):+.2f} % (goal {100 * (at_most - 1):+.0f} %)"
        if ratio <= at_most:
            return is_equal, text
        defined = self._defined_perplexity(made, definition) / floats
        text += f", MISSED; {100 * (defined - 1):+.2f} % by the integer definition"
        return is_equal and ratio <= defined * (1 + NEAR_DEFINITION), text

    def _defined_perplexity(self, model: Path, definition: TransformersReference) -> float:
        """Returns the perplexity of the same windows by transformers' definition."""
        import torch

        total, count = 0.0, 0
        for window in self._windows(model):
            rows = definition.logprobs(window)[:-1]
            total -= float(rows.gather(1, torch.tensor(window[1:]).unsqueeze(1)).sum())
            count += len(rows)
        return math.exp(total / count)

    def _windows(self, model: Path) -> list[list[int]]:
        import transformers

        from vllm_davinci.meta.perplexity import windows_of

        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        texts = [file.text for file in held_out_files()]
        return windows_of(tokenizer, texts, WINDOW, SCORED_TOKENS)

    def _served(
        self, model: Path, is_scored: bool = False
    ) -> tuple[list[list[int]], list[list[int]], float]:
        """Returns held-out prompts, our engine's continuations, and the text's perplexity if it
        `is_scored`.
        """
        import transformers
        from vllm import SamplingParams

        from vllm_davinci.meta.perplexity import score
        from vllm_davinci_testing.engines.engine_process import EngineProcess

        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        texts = [file.text for file in held_out_files()[:NUM_PROMPTS]]
        prompts = [
            tokenizer(text, add_special_tokens=False)["input_ids"][: 8 + 16 * number]
            for number, text in enumerate(texts)
        ]
        log = self._directory / "engine.log"
        engine = EngineProcess(model, log, dtype="bfloat16", max_model_len=2 * WINDOW)
        try:
            outputs = engine.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
            )
            found = score(engine, self._windows(model)).perplexity if is_scored else math.nan
        finally:
            engine.close()
        return prompts, [list(output.outputs[0].token_ids) for output in outputs], found

    def _agreement(self, kind: str, recipe: Recipe, made: Path) -> Agreement:
        """Compares our exporter's tensors with ModelSlim's."""
        ours = self._directory / "ours" / f"{recipe.model}_{kind}"
        shutil.rmtree(ours, ignore_errors=True)
        calibration = self._directory / "calibration.txt"
        source = ROOT / "checkpoints" / recipe.source
        options = ["--type", kind]
        if kind == "W8A8":  # rounds like ModelSlim: our own scales and types would differ
            options += ["--calibrate", str(calibration), "--no-smoothing", "--budget", "none"]
        done = subprocess.run(
            ["vnpu", "run", "--", "vllm-davinci", "quantize", source, ours, *options],
            capture_output=True, text=True, timeout=QUANTIZE_LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"quantize {source}: {done.stderr.strip().splitlines()[-1]}")
        return compare(made, ours)


def last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of recipes' names; default: all recipes")
    parser.add_argument("--keep", type=Path, help="directory for exports and logs")
    parser.add_argument("--table", type=Path, help="page to write the result to")
    options = parser.parse_args()

    def is_wanted(recipe: Recipe) -> bool:
        title = f"{recipe.model}: {recipe.name}"
        return not options.names or any(name in title for name in options.names)

    recipes = [recipe for recipe in RECIPES if is_wanted(recipe)]
    if not recipes:
        print("no recipe has such a name", file=sys.stderr)
        return 1
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        directory = (options.keep or Path(scratch)).resolve()
        shutil.rmtree(directory / "models", ignore_errors=True)
        outcomes = Suite(directory, recipes).run()
    print(table(outcomes), flush=True)
    if options.table is not None:
        options.table.write_text(page(outcomes), encoding="utf-8")
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
