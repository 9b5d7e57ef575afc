"""Trains a checkpoint on the source of Python's standard library, on CPU.

Run `python checkpoints/train.py tiny_llama` or `... tiny_deepseek`.
Needs torch, transformers, tokenizers, safetensors and tqdm; no accelerator. The checkpoint
directory is complete after every evaluation, so a run can be stopped at any time.
"""

import argparse
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from corpus import TOP_LEVEL, conversations, training_files
from model_card import Measurements, write_model_card
from perplexity import SLICE_TOKENS, held_out_windows, perplexity
from recipes import CONTEXT_TOKENS, RECIPES, VOCAB_SIZE, Recipe
from tokenizer import ASSISTANT, END, USER, train_tokenizer
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

# Where a sequence may start, and the share of sequences that start so.
TOP_LEVEL_SHARE, LINE_SHARE, CONVERSATION_SHARE = 0.5, 0.38, 0.12
CONVERSATION_TOKENS = 480  # longer ones are left out


@dataclass(frozen=True)
class TokenStream:
    """A text as tokens, and the positions at which a sequence may start."""

    tokens: Tensor
    starts: Tensor

    def windows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """`count` sequences from random starts: int64 [count, 1 + length], `<s>` first."""
        fitting = self.starts[self.starts + length <= len(self.tokens)]
        choice = torch.randint(len(fitting), (count,), generator=generator)
        positions = fitting[choice, None] + torch.arange(-1, length)
        windows = self.tokens[positions]
        windows[:, 0] = self.tokens[0]
        return windows


def code_streams(tokenizer: PreTrainedTokenizerFast) -> tuple[TokenStream, TokenStream]:
    """The training files, started at top-level statements, and started at any line."""
    tokens: list[int] = []
    top_level: list[int] = []
    lines: list[int] = []
    for file in tqdm(training_files(), "tokens", unit="file"):
        encoding = tokenizer(
            file.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        statements = {0, *(match.start() for match in TOP_LEVEL.finditer(file.text))}
        tokens.append(tokenizer.bos_token_id)
        for token, (begin, _) in zip(
            encoding["input_ids"], encoding["offset_mapping"], strict=True
        ):
            if begin in statements:
                top_level.append(len(tokens))
            elif file.text[begin - 1] == "\n":
                lines.append(len(tokens))
            tokens.append(token)
        tokens.append(tokenizer.eos_token_id)
    stream = torch.tensor(tokens)
    return TokenStream(stream, torch.tensor(top_level)), TokenStream(stream, torch.tensor(lines))


def conversation_stream(tokenizer: PreTrainedTokenizerFast) -> TokenStream:
    """The conversations in the form that the chat template gives them."""
    tokens: list[int] = []
    starts: list[int] = []
    for conversation in conversations(training_files()):
        text = f"{USER}{conversation.request}{END}{ASSISTANT}{conversation.answer}{END}"
        encoded = tokenizer(text, verbose=False)["input_ids"]
        if len(encoded) <= CONVERSATION_TOKENS:
            starts.append(len(tokens) + 1)
            tokens += encoded
    return TokenStream(torch.tensor(tokens), torch.tensor(starts))


def routers(model: nn.Module) -> list[nn.Module]:
    """The modules that choose experts; none in a dense model."""
    return [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]


class ExpertBalance:
    """Keeps the routed experts equally loaded without a loss term (DeepSeek-V3, 2.1.2).

    After each step an expert that had more tokens than the average becomes less likely to be
    chosen, by a fixed step of its correction bias, and the others more likely.
    """

    def __init__(self, model: nn.Module) -> None:
        self.loads: dict[nn.Module, Tensor] = {}
        for router in routers(model):
            router.register_forward_hook(self._count)

    def _count(
        self, router: nn.Module, inputs: tuple[Tensor], outputs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        bias = router.get_buffer("e_score_correction_bias")
        self.loads[router] = torch.bincount(outputs[2].flatten(), minlength=len(bias)).float()

    @torch.no_grad()
    def update(self, rate: float) -> None:
        for router, load in self.loads.items():
            bias = router.get_buffer("e_score_correction_bias")
            bias += rate * torch.sign(load.mean() - load)
            bias -= bias.mean()

    def imbalance(self) -> float:
        """Load of the busiest expert over the average load, worst layer; 1.0 is balanced."""
        return max((float(load.max() / load.mean()) for load in self.loads.values()), default=1.0)


def optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for everything else."""
    matrices, vectors, others = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            vectors.append(parameter)
        elif parameter.ndim == 2 and name.endswith("_proj.weight"):
            matrices.append(parameter)
        else:
            others.append(parameter)
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [
                {"params": others, "weight_decay": recipe.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]


class Schedule:
    """How far the training is: by steps, or by time where the machine is too slow for the steps.

    A run whose time limit is reached ends like one whose steps are done, with a small learning
    rate and full-context sequences; it has only seen less text.
    """

    def __init__(self, recipe: Recipe, limit_seconds: float) -> None:
        self.recipe = recipe
        self.limit_seconds = limit_seconds
        self.started = time.monotonic()

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.started

    def progress(self, step: int) -> float:
        """From 0 at the start to 1 at the end; `step` steps are done."""
        return max(step / self.recipe.steps, self.elapsed_seconds() / self.limit_seconds)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to 2 % of the peak."""
        warmup = min(1.0, (step + 1) / self.recipe.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress(step))))
        return self.recipe.learning_rate * warmup * (0.02 + 0.98 * cosine)

    def sequence_tokens(self, step: int) -> int:
        late = self.progress(step) >= 1 - self.recipe.full_context_share
        return CONTEXT_TOKENS if late else self.recipe.sequence_tokens


def save(directory: Path, model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes weights (bf16), configuration and tokenizer in the standard layout."""
    half = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    for router in routers(half):  # the bias decides between near ties: kept in fp32, as published
        router.e_score_correction_bias = router.get_buffer("e_score_correction_bias").float()
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)],
        pad_token_id=tokenizer.pad_token_id,
    )
    half.save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)


def train(
    name: str, recipe: Recipe, directory: Path, seed: int, evaluations: int, minutes: float
) -> None:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    schedule, cpu_started = Schedule(recipe, minutes * 60), time.process_time()

    tokenizer = train_tokenizer(
        (file.text for file in training_files()), VOCAB_SIZE, CONTEXT_TOKENS
    )
    top_level, lines = code_streams(tokenizer)
    chat = conversation_stream(tokenizer)
    held_out = held_out_windows(tokenizer, SLICE_TOKENS)
    print(f"{len(top_level.tokens)} tokens of code, {len(chat.tokens)} tokens of conversations")

    config = recipe.config()
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    # Plain matrix products are 10 to 25 % faster here than torch's fused attention on CPU
    # (bf16, 256 and 512 tokens, head size 64, 2 cores with AVX-512 BF16).
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    average = AveragedModel(
        model,
        multi_avg_fn=get_ema_multi_avg_fn(recipe.average_decay),
        use_buffers=True,
    )
    balance = ExpertBalance(model)
    all_optimizers = optimizers(model, recipe)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {parameters} parameters, {recipe.steps} steps of {recipe.batch_tokens} tokens")

    bar = tqdm(range(1, recipe.steps + 1), name, unit="step", mininterval=5)
    smooth_loss, evaluated = math.log(VOCAB_SIZE), 0
    for step in bar:
        length = schedule.sequence_tokens(step - 1)
        learning_rate = schedule.learning_rate(step - 1)
        rows = recipe.batch_tokens // length
        shares = torch.tensor([TOP_LEVEL_SHARE, LINE_SHARE, CONVERSATION_SHARE])
        kinds = torch.multinomial(shares, rows, replacement=True, generator=generator)
        batch = torch.cat(
            [
                stream.windows(int((kinds == kind).sum()), length, generator)
                for kind, stream in enumerate((top_level, lines, chat))
            ]
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in all_optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad()
        balance.update(learning_rate * recipe.balance_ratio)
        if step > min(recipe.warmup_steps, recipe.steps // 2):
            average.update_parameters(model)
        smooth_loss += (loss.item() - smooth_loss) * max(0.02, 1 / step)
        bar.set_postfix(loss=f"{smooth_loss:.3f}", imbalance=f"{balance.imbalance():.2f}")

        progress = schedule.progress(step)
        if int(progress * evaluations) > evaluated:
            evaluated = int(progress * evaluations)
            save(directory, average.module, tokenizer)
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
    parser.add_argument("--output", type=Path, help="default: beside this file, under its name")
    parser.add_argument("--steps", type=int, help="default: the recipe's")
    parser.add_argument("--minutes", type=float, default=40, help="time limit; default: 40")
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
    disable_progress_bar()  # transformers' own, for loading and saving
    directory = options.output or Path(__file__).parent / options.name
    train(options.name, recipe, directory, options.seed, options.evaluations, options.minutes)


if __name__ == "__main__":
    main()
