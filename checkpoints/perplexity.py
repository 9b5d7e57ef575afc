"""Measures a checkpoint's perplexity on the held-out part of the standard library, on CPU.

Run `python checkpoints/perplexity.py checkpoints/tiny_llama`.
"""

import argparse
import math
from pathlib import Path

import torch
from corpus import held_out_files
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

WINDOW_TOKENS = 512  # each window starts with <s>, without context from the one before
SLICE_TOKENS = 16_384  # length of the slice that the checkpoint's test measures


def held_out_windows(
    tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None
) -> list[Tensor]:
    """Cuts the held-out files into windows, each int64 [1 + at most WINDOW_TOKENS].

    max_tokens: number of predicted tokens, taken from the start of each file; None: all
    """
    files = held_out_files()
    per_file = None if max_tokens is None else max_tokens // len(files)
    windows = []
    for file in files:
        tokens = tokenizer(file.text, add_special_tokens=False, verbose=False)["input_ids"]
        for piece in torch.tensor(tokens[:per_file]).split(WINDOW_TOKENS):
            windows.append(torch.cat([torch.tensor([tokenizer.bos_token_id]), piece]))
    return windows


@torch.no_grad()
def perplexity(model: nn.Module, windows: list[Tensor], progress: bool = False) -> float:
    """Returns exp of the mean negative log-likelihood per token; `<s>` itself is not predicted."""
    total, count = 0.0, 0
    for window in tqdm(windows, "perplexity", unit="window", disable=not progress):
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
        total += nn.functional.cross_entropy(logits.float(), window[1:], reduction="sum").item()
        count += window.numel() - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out perplexity of a checkpoint directory.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, help="measure this many tokens (default: all)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    if not (options.checkpoint / "config.json").is_file():
        parser.error(f"{options.checkpoint} has no config.json: name a checkpoint directory")
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(
        options.checkpoint, dtype=getattr(torch, options.dtype)
    ).eval()
    windows = held_out_windows(tokenizer, options.tokens)
    tokens = sum(window.numel() - 1 for window in windows)
    value = perplexity(model, windows, progress=True)
    print(f"{options.checkpoint.name}: perplexity {value:.3f} over {tokens} held-out tokens")


if __name__ == "__main__":
    main()
