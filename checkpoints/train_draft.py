"""Trains the draft model of a checkpoint on the checkpoint's training text, on CPU.

Run `python checkpoints/train_draft.py tiny_deepseek` or `... tiny_deepseek_v4` (its MTP layer,
written beside its weights) or `... tiny_llama` (an EAGLE-3 head, written to tiny_llama_eagle3). The
target's weights do not change. The draft learns the target's distribution several tokens ahead; as
in serving, each draft starts from the previous draft's hidden states.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from drafts import EAGLE3_VOCAB_SIZE, Draft, Eagle3Head, MTPLayer, StreamsMTPLayer
from model_card import DraftMeasurements, write_draft_card
from optimization import Schedule, Training
from perplexity import held_out_windows
from recipes import RECIPES, Recipe
from streams import TrainingText
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

DRAFT_TOKENS = 3  # number of tokens ahead in training
STEP_WEIGHT = 0.6  # weight of a token relative to the previous one
SLICE_TOKENS = 8192  # number of held-out tokens for measuring agreement


@torch.no_grad()
def target_states(target: PreTrainedModel, tokens: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns the target's hidden states by layer, the last after the final norm, and its logits.

    With residual streams, the last entry is the streams.
    """
    seen: list[Tensor] = []
    collapse = getattr(target.model, "hc_head", None)
    if collapse is not None:
        hook = collapse.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    output = target(input_ids=tokens, use_cache=False, output_hidden_states=collapse is None)
    if collapse is not None:
        hook.remove()
    return tuple(state.float() for state in seen or output.hidden_states), output.logits.float()


def drafted_logits(
    draft: Draft, tokens: Tensor, states: tuple[Tensor, ...], count: int
) -> list[Tensor]:
    """Returns logits of `count` draft tokens; entry i at position t predicts token t + 2 + i.

    tokens: int64 [rows, length]. Entry i has length - 1 - i positions.
    """
    hidden = draft.first_hidden(states, states[-1])[:, :-1]
    logits = []
    for ahead in range(1, count + 1):
        drafted, hidden = draft(tokens[:, ahead:], hidden)
        logits.append(drafted)
        hidden = hidden[:, :-1]
    return logits


def divergence(drafted: Tensor, target: Tensor) -> Tensor:
    """Returns the cross entropy between the target's and the draft's distributions, over the
    draft's tokens.
    """
    known = torch.isfinite(drafted[0, 0])
    wanted = torch.softmax(target[..., known], dim=-1)
    return -(wanted * torch.log_softmax(drafted[..., known], dim=-1)).sum(-1).mean()


@torch.no_grad()
def agreement(draft: nn.Module, target: PreTrainedModel, windows: list[Tensor]) -> list[float]:
    """Returns, by index i, the share of held-out positions where drafts 0 to i all equal the
    target's choice.

    The list's index is i.
    """
    agreed, total = torch.zeros(DRAFT_TOKENS), 0
    for window in windows:
        tokens = window[None]
        if tokens.shape[1] < DRAFT_TOKENS + 3:
            continue
        states, logits = target_states(target, tokens)
        positions = tokens.shape[1] - DRAFT_TOKENS - 1
        choices = logits.argmax(-1)
        alive = torch.ones(positions, dtype=torch.bool)
        for i, drafted in enumerate(drafted_logits(draft, tokens, states, DRAFT_TOKENS)):
            wanted = choices[0, i + 1 : i + 1 + positions]
            alive = alive & (drafted.argmax(-1)[0, :positions] == wanted)
            agreed[i] += alive.sum()
        total += positions
    return (agreed / total).tolist()


def frequent_tokens(tokens: Tensor, vocab_size: int) -> Tensor:
    """Returns the EAGLE3_VOCAB_SIZE most frequent tokens of the text, in ascending order."""
    counts = torch.bincount(tokens, minlength=vocab_size)
    return counts.topk(EAGLE3_VOCAB_SIZE).indices.sort().values


def untrained_draft(
    name: str, target: PreTrainedModel, text: TrainingText
) -> MTPLayer | StreamsMTPLayer | Eagle3Head:
    if name != "tiny_llama":
        return MTPLayer(target) if name == "tiny_deepseek" else StreamsMTPLayer(target)
    return Eagle3Head(target, frequent_tokens(text.code, target.config.vocab_size))


def weighted_mean(losses: list[torch.Tensor]) -> torch.Tensor:
    """Averages losses by position: drafts that are reached less often have less weight."""
    weights = [STEP_WEIGHT**ahead for ahead in range(DRAFT_TOKENS)]
    weighted = (w * value for w, value in zip(weights, losses, strict=True))
    return sum(weighted, torch.zeros(())) / sum(weights)


def train(name: str, recipe: Recipe, seed: int, minutes: float) -> None:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    directory = Path(__file__).parent / name
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = TrainingText(tokenizer)
    target = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    target.eval().requires_grad_(False)
    draft = untrained_draft(name, target, text)
    schedule, cpu_started = Schedule(recipe, minutes * 60), time.process_time()
    training = Training(draft, recipe, averages_buffers=False)
    print(f"draft of {name}: {training.parameters} parameters, at most {recipe.steps} steps")

    bar = tqdm(range(1, recipe.steps + 1), name, unit="step", mininterval=20)
    for step in bar:
        learning_rate = schedule.learning_rate(step - 1)
        rows = recipe.batch_tokens // recipe.sequence_tokens
        tokens = text.batch(rows, recipe.sequence_tokens, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states, wanted = target_states(target, tokens)
            drafted = drafted_logits(draft, tokens, states, DRAFT_TOKENS)
        losses = [
            divergence(logits.float(), wanted[:, ahead + 1 : ahead + 1 + logits.shape[1]])
            for ahead, logits in enumerate(drafted)
        ]
        loss = weighted_mean(losses)
        training.learn(loss, step, learning_rate)
        bar.set_postfix(
            loss=f"{losses[0].item():.3f}", imbalance=f"{training.balance.imbalance():.2f}"
        )
        if schedule.progress(step) >= 1:
            break

    trained = training.average.module
    for kept, now in zip(trained.buffers(), draft.buffers(), strict=True):
        kept.copy_(now)
    trained.bfloat16().float()  # measured with the saved weights
    shares = agreement(trained, target, held_out_windows(tokenizer, SLICE_TOKENS))
    print("agreement on held-out text, by position:", [f"{share:.3f}" for share in shares])
    output = directory.with_name(f"{name}_eagle3") if name == "tiny_llama" else directory
    trained.save(output)
    write_draft_card(
        output,
        name,
        recipe,
        DraftMeasurements(
            steps=step,
            tokens=step * recipe.batch_tokens,
            parameters=training.parameters,
            cpu_seconds=time.process_time() - cpu_started,
            threads=torch.get_num_threads(),
            seed=seed,
            limit_minutes=minutes,
            agreement=shares,
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=40, help="time limit (default: 40)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps < 1 or options.minutes <= 0:
        parser.error("--steps and --minutes: use more than 0")
    torch.set_num_threads(options.threads)
    recipe = replace(
        RECIPES[options.name], steps=options.steps, batch_tokens=2048, learning_rate=2e-3
    )
    train(options.name, recipe, options.seed, options.minutes)


if __name__ == "__main__":
    main()
