"""Writes a checkpoint's README: purpose, training, measurements."""

import platform
from dataclasses import dataclass
from pathlib import Path

import safetensors
import tokenizers
import torch
import transformers
from perplexity import SLICE_TOKENS
from recipes import CONTEXT_TOKENS, VOCAB_SIZE, Recipe
from transformers import PreTrainedModel, PreTrainedTokenizerFast

PROMPTS = ("def ", "import ", "class ", "def read_lines(path):\n")
BOUND_MARGIN = 1.15  # another Python version has another text in this slice


@dataclass(frozen=True)
class Measurements:
    """A training run's measurements; perplexities are those of the saved weights in fp32."""

    steps: int
    tokens: int
    wall_seconds: float
    cpu_seconds: float
    threads: int
    seed: int
    limit_minutes: float
    slice_perplexity: float
    perplexity: float | None
    """Perplexity on all held-out files; None before the last step."""


def _rows(recipe: Recipe, model: PreTrainedModel, measured: Measurements) -> dict[str, str]:
    """Returns the card's table: model, training, measurements."""
    ended = measured.perplexity is not None
    whole = f"{measured.perplexity:.2f}" if ended else "measured after the last step"
    return {
        "architecture": model.config.architectures[0],
        "parameters": f"{model.num_parameters():,} (bf16)",
        "vocabulary": f"{VOCAB_SIZE} tokens, byte-level BPE",
        "context": f"{CONTEXT_TOKENS} tokens",
        "steps": f"{measured.steps} of {recipe.steps}"
        + (", then the time limit" if ended and measured.steps < recipe.steps else ""),
        "recipe": (
            f"{recipe.batch_tokens} tokens a step, peak learning rate {recipe.learning_rate:g}, "
            f"weight decay {recipe.weight_decay:g}"
        ),
        "tokens seen": f"{measured.tokens:,}",
        "seed": str(measured.seed),
        "time": (
            f"{measured.wall_seconds / 60:.0f} minutes, threads: {measured.threads} "
            f"({measured.cpu_seconds / 60:.0f} minutes of processor time)"
        ),
        "perplexity, all held-out files": whole,
        f"perplexity, slice of {SLICE_TOKENS} tokens": f"{measured.slice_perplexity:.2f}",
        "perplexity bound of the test": f"{measured.slice_perplexity * BOUND_MARGIN:.2f}",
        "versions": (
            f"Python {platform.python_version()}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}, "
            f"safetensors {safetensors.__version__}"
        ),
    }


def write_model_card(
    directory: Path,
    name: str,
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    measured: Measurements,
) -> None:
    """Writes `directory`/README.md, with completions of PROMPTS by `model`."""
    rows = _rows(recipe, model, measured)
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    samples = "\n\n".join(
        f"```text\n{_completion(model, tokenizer, prompt)}\n```" for prompt in PROMPTS
    )
    command = (
        f"python checkpoints/train.py {name} "
        f"--steps {recipe.steps} --threads {measured.threads} --minutes {measured.limit_minutes:g}"
    )
    prompts = ", ".join(f"`{prompt!r}`" for prompt in PROMPTS)
    weights = "random weights"
    if recipe.starts_from is not None:
        weights += f", and tensors of equal name and shape of `../{recipe.starts_from}`,"
    (directory / "README.md").write_text(
        f"""# {name}

{recipe.description} It completes Python source; it knows nothing else.

Trained from {weights} on the source text of Python's own standard library (the `.py` files
of `sysconfig.get_paths()["stdlib"]` without tests, tables of data and installed packages; see
`../corpus.py`). One file in 32, by a hash of its path, is held out. The text is under the PSF
licence. Made by

    {command}

and measured by

    python checkpoints/perplexity.py checkpoints/{name}

| | |
| --- | --- |
{table}

## Completions

Greedy, from {prompts}:

{samples}
"""
    )


@dataclass(frozen=True)
class DraftMeasurements:
    """Measurements of a draft model's training run."""

    steps: int
    tokens: int
    parameters: int
    cpu_seconds: float
    threads: int
    seed: int
    limit_minutes: float
    agreement: list[float]
    """By position: share of held-out tokens where this draft and all earlier ones equal the
    target's.
    """


def write_draft_card(
    directory: Path, target: str, recipe: Recipe, measured: DraftMeasurements
) -> None:
    """Writes the card of `target`'s draft model: MTP.md beside the target's weights, or
    README.md.
    """
    of_its_own = directory.name != target
    what = (
        f"An EAGLE-3 head for `../{target}`: one Llama layer that sees the inputs of three of its "
        "layers and drafts from the 2048 most frequent tokens."
        if of_its_own
        else f"The multi-token prediction layer of {target}: one DeepSeek-"
        f"V{4 if target.endswith('v4') else 3} layer "
        "(`mtp.safetensors`)."
    )
    shares = ", ".join(f"{share:.3f}" for share in measured.agreement)
    command = (
        f"python checkpoints/train_draft.py {target} --steps {recipe.steps} "
        f"--threads {measured.threads} --minutes {measured.limit_minutes:g}"
    )
    (directory / ("README.md" if of_its_own else "MTP.md")).write_text(
        f"""# {directory.name if of_its_own else "The MTP layer of " + target}

{what}
It was trained on the text that the target learned from, to have the target's distribution up to
three tokens ahead; the target's weights stayed as they were. Made by

    {command}

| | |
| --- | --- |
| parameters of its own | {measured.parameters:,} (bf16) |
| steps | {measured.steps} of {recipe.steps}, {recipe.batch_tokens} tokens each |
| tokens seen | {measured.tokens:,} |
| seed | {measured.seed} |
| processor time | {measured.cpu_seconds / 60:.0f} minutes, threads: {measured.threads} |
| agreement with the target's greedy choice on held-out text, by position | {shares} |
"""
    )


@torch.no_grad()
def _completion(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    encoded = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**encoded, max_new_tokens=64, do_sample=False)
    text: str = tokenizer.decode(output[0], skip_special_tokens=True)
    return text.rstrip()
