"""The ranges of every linear layer's input, observed while transformers runs a model on CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.quantization.rounding import InputRange, scale_and_offset

WINDOW_TOKENS = 512
HISTOGRAM_BINS = 2048


# Ends of the range that are tried, as shares of the whole one.
_SHARES = torch.linspace(1.0, 0.2, 41)


def text_windows(directory: Path, text: Path, max_tokens: int) -> list[torch.Tensor]:
    """The front of a text file in the model's tokens, int64 [1, at most WINDOW_TOKENS] each.

    Raises CheckpointError when the file does not read or holds no token.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{text} does not read: {error}. Name a UTF-8 text file like what the model will see."
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    if not tokens:
        raise CheckpointError(f"{text} holds no token: name a text of some pages.")
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [
        torch.tensor([first + piece.tolist()])
        for piece in torch.tensor(tokens[:max_tokens]).split(WINDOW_TOKENS)
    ]


def input_ranges(
    directory: Path, windows: list[torch.Tensor], advance: Callable[[int], None]
) -> dict[str, InputRange]:
    """Name of each nn.Linear that ran -> the range of its input that its levels should cover.

    The model runs twice: for the ranges, then for the histograms over them.
    advance: called after each of 2 * len(windows) windows with its number of tokens
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ranges: dict[str, InputRange] = {}
    counts: dict[str, torch.Tensor] = {}

    def widen(name: str, values: torch.Tensor) -> None:
        low, high = (bound.item() for bound in torch.aminmax(values))
        seen = InputRange(low, high)
        ranges[name] = ranges[name].joined(seen) if name in ranges else seen

    def count(name: str, values: torch.Tensor) -> None:
        seen = ranges[name]
        found = torch.histc(values.float(), HISTOGRAM_BINS, seen.low, seen.high)
        counts[name] = counts[name] + found if name in counts else found

    _run(model, windows, widen, advance)
    _run(model, windows, count, advance)
    return {
        name: least_error_range(counts[name], seen) if seen.low < seen.high else seen
        for name, seen in ranges.items()
    }


@torch.no_grad()
def _run(
    model: nn.Module,
    windows: list[torch.Tensor],
    look: Callable[[str, torch.Tensor], None],
    advance: Callable[[int], None],
) -> None:
    """Shows `look` the input of every linear layer, by the layer's name."""

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def show(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if inputs[0].numel():
                look(name, inputs[0])

        return show

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    for window in windows:
        model(input_ids=window, use_cache=False)
        advance(window.numel())
    for handle in handles:
        handle.remove()


def least_error_range(counts: torch.Tensor, seen: InputRange) -> InputRange:
    """The part of a range whose 256 levels stand for the values with the least squared error.

    A rare value at the end costs its own error when it is cut off, and all others a wider step
    when it is not.
    counts: histogram of the values over `seen`, in bins of one width
    """
    step = (seen.high - seen.low) / counts.numel()
    centers = seen.low + step * (torch.arange(counts.numel()) + 0.5)
    best, least = seen, float("inf")
    for share in _SHARES.tolist():
        tried = InputRange(min(seen.low * share, 0.0), max(seen.high * share, 0.0))
        scale, offset = scale_and_offset(tried)
        levels = (centers / scale + offset).round().clamp(-128, 127)
        error = float((counts * (centers - (levels - offset) * scale) ** 2).sum())
        if error < least:
            best, least = tried, error
    return best
