"""Trains a checkpoint on the source of Python's standard library, on CPU.

Run `python checkpoints/train.py tiny_llama` or `... tiny_deepseek`. Needs torch, transformers,
tokenizers, safetensors and tqdm; no accelerator. Every evaluation leaves a complete checkpoint
directory, so a run can be stopped at any time.
"""

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

import torch
from corpus import training_files
from model_card import Measurements, write_model_card
from optimization import Schedule, Training
from perplexity import SLICE_TOKENS, held_out_windows, perplexity
from recipes import CONTEXT_TOKENS, DEEPSEEK_V4_KEYS, RECIPES, VOCAB_SIZE, Recipe
from released import rename
from streams import TrainingText
from tokenizer import END, train_tokenizer
from torch import nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

# Tensors whose names end so stay in fp32, as published: one of them decides between near ties.
PRECISE = {"e_score_correction_bias", "sinks", "position_bias", "fn", "base", "scale"}


def save(directory: Path, model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes weights (bf16), configuration and tokenizer in the standard layout."""
    half = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    for name, tensor in (*half.named_parameters(), *half.named_buffers()):
        if name.rpartition(".")[2].removeprefix("hc_") in PRECISE:
            tensor.data = tensor.data.float()
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)],
        pad_token_id=tokenizer.pad_token_id,
    )
    half.save_pretrained(directory)
    if model.config.model_type == "deepseek_v4":
        rename(directory, DEEPSEEK_V4_KEYS)
    tokenizer.save_pretrained(directory, save_jinja_files=False)


def untrained_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = recipe.config()
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    # Here plain matrix products are 10 to 25 % faster than torch's fused attention on CPU (bf16,
    # 256 and 512 tokens, head size 64, 2 cores with AVX-512 BF16).
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    if recipe.starts_from is not None:
        start = AutoModelForCausalLM.from_pretrained(
            Path(__file__).parent / recipe.starts_from, dtype=torch.float32
        ).state_dict()
        own = model.state_dict()
        for name in own.keys() & start.keys():
            if own[name].shape == start[name].shape:
                own[name].copy_(start[name])
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # gives each token different experts
            scores = torch.rand(table.shape[0], config.n_routed_experts)
            table.copy_(scores.topk(table.shape[1]).indices)
    return model


def train(
    name: str, recipe: Recipe, directory: Path, seed: int, evaluations: int, minutes: float
) -> None:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    schedule, cpu_started = Schedule(recipe, minutes * 60), time.process_time()

    tokenizer = train_tokenizer(
        (file.text for file in training_files()), VOCAB_SIZE, CONTEXT_TOKENS
    )
    text = TrainingText(tokenizer)
    held_out = held_out_windows(tokenizer, SLICE_TOKENS)
    print(f"{len(text.code)} tokens of code, {len(text.conversations)} tokens of conversations")

    model = untrained_model(recipe, tokenizer)
    training = Training(model, recipe, averages_buffers=True)
    print(
        f"{name}: {training.parameters} parameters, "
        f"{recipe.steps} steps of {recipe.batch_tokens} tokens"
    )

    bar = tqdm(range(1, recipe.steps + 1), name, unit="step", mininterval=5)
    smooth_loss, evaluated = math.log(VOCAB_SIZE), 0
    for step in bar:
        length = schedule.sequence_tokens(step - 1)
        learning_rate = schedule.learning_rate(step - 1)
        batch = text.batch(recipe.batch_tokens // length, length, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        training.learn(loss, step, learning_rate)
        smooth_loss += (loss.item() - smooth_loss) * max(0.02, 1 / step)
        bar.set_postfix(loss=f"{smooth_loss:.3f}", imbalance=f"{training.balance.imbalance():.2f}")

        progress = schedule.progress(step)
        if int(progress * evaluations) > evaluated:
            evaluated = int(progress * evaluations)
            save(directory, training.average.module, tokenizer)
            saved = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            measured = Measurements(
                steps=step,
                tokens=step * recipe.batch_tokens,
                wall_seconds=schedule.elapsed_seconds(),
                cpu_seconds=time.process_time() - cpu_started,
                threads=torch.get_num_threads(),
                seed=seed,
                limit_minutes=minutes,
                slice_perplexity=perplexity(saved, held_out),
                perplexity=(
                    perplexity(saved, held_out_windows(tokenizer)) if progress >= 1 else None
                ),
            )
            write_model_card(directory, name, recipe, saved, tokenizer, measured)
            bar.write(
                f"step {step}: loss {smooth_loss:.3f}, "
                f"held-out slice perplexity {measured.slice_perplexity:.3f}, "
                f"{measured.wall_seconds:.0f} s"
            )
        if progress >= 1:
            break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--output", type=Path, help="directory (default: next to this file, NAME)")
    parser.add_argument("--steps", type=int, help="(default: the recipe's)")
    parser.add_argument("--minutes", type=float, default=40, help="time limit (default: 40)")
    parser.add_argument("--evaluations", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    recipe = RECIPES[options.name]
    if options.steps is not None:
        if options.steps < 1:
            parser.error(f"--steps {options.steps}: use at least 1")
        recipe = replace(recipe, steps=options.steps)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}: use more than 0")
    torch.set_num_threads(options.threads)
    disable_progress_bar()  # imports transformers' own class, to load and save
    directory = options.output or Path(__file__).parent / options.name
    train(options.name, recipe, directory, options.seed, options.evaluations, options.minutes)


if __name__ == "__main__":
    main()
