"""Each stand-in gives the results of vLLM's kernel on a virtual NPU with the same values."""

import ast
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_davinci.core.triton_kernels.registration import OF_MODELS, STAND_INS
from vllm_davinci_testing.processes.programs import run_to_end

PROGRAM = Path(__file__).with_name("kernels_of_vllm.py")
LIMIT_S = 600
# Results of sums and logarithms, which differ in order and library.
TOLERANT = {"_topk_log_softmax_kernel": 2e-6, "_compute_local_logits_stats_kernel": 2e-6}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    file = tmp_path_factory.mktemp("kernels") / "cases.pt"
    ended = run_to_end(
        [sys.executable, str(PROGRAM), str(file)],
        LIMIT_S,
        env={**os.environ, "VNPU_TRITON": "1", "VLLM_PLUGINS": ""},  # without our stand-ins
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
    loaded: dict[str, list[Any]] = torch.load(file)
    return loaded


def on_npu(arguments: tuple[Any, ...]) -> list[Any]:
    return [each.npu() if isinstance(each, torch.Tensor) else each for each in arguments]


def drawn_tokens(arguments: list[Any]) -> list[torch.Tensor]:
    """Returns vLLM's sampled token, because the kernel returns a candidate per block."""
    blocks, maxima = arguments[0].cpu(), arguments[2].cpu()
    return [blocks.gather(1, maxima.argmax(dim=1, keepdim=True))]


def resampled_tokens(arguments: list[Any]) -> list[torch.Tensor]:
    """Returns tokens of requests that sample; greedy requests take the target's token instead."""
    kept, ends, slots = (each.cpu() for each in arguments[11:14])
    row = (ends[:-1] + kept).to(torch.int64)
    draws = (arguments[15].cpu()[slots[row]] != 0) | (row == ends[1:] - 1)
    return [each[draws] for each in drawn_tokens(arguments)]


def kept_tokens(arguments: list[Any]) -> list[torch.Tensor]:
    """Returns the numbers of accepted drafts, and the tokens that vLLM reads."""
    sampled, kept, ends = (arguments[place].cpu() for place in (0, 2, 21))
    place = torch.arange(sampled.shape[1])
    is_read = (place <= kept.unsqueeze(1)) & (place < (ends.diff() - 1).unsqueeze(1))
    return [kept, sampled * is_read]


def combined(arguments: list[Any]) -> list[torch.Tensor]:
    """Combines the blocks' results for rows that verify a draft."""
    blocks = [arguments[2 * number].cpu() for number in range(5)]
    slots, places, temperatures = (arguments[number].cpu() for number in (15, 16, 17))
    decides = places.roll(-1) != 0
    decides[-1] = False
    is_greedy = temperatures[slots] == 0
    argmax = blocks[0].gather(1, blocks[1].argmax(dim=1, keepdim=True))[decides & is_greedy]
    sums = [
        (maxima.amax(1) + (sums * (maxima - maxima.amax(1, keepdim=True)).exp()).sum(1).log())
        for maxima, sums in ((blocks[1], blocks[2]), (blocks[3], blocks[4]))
    ]
    has_drafts = arguments[12] is not None
    return [argmax, *[each[decides & ~is_greedy] for each in sums[: 1 + has_drafts]]]


def best_score(arguments: list[Any]) -> list[torch.Tensor]:
    return [arguments[5].cpu()[: arguments[2].shape[0]].amax(dim=1)]


def used_rows(arguments: list[Any]) -> list[torch.Tensor]:
    """Returns the rows of requests, because the stand-in also shifts the rows after them."""
    return [arguments[0].cpu()[: int(arguments[2][-1])]]


def used_tables(arguments: list[Any]) -> list[torch.Tensor]:
    """Returns the tables without the last row, which belongs to no request."""
    return [each.cpu()[:-1] for each in (arguments[5], arguments[10])]


# Kernels that return more than vLLM reads -> the part that vLLM reads.
TAKEN = {
    "_shift_input_ids_kernel": used_rows,
    "_cache_inputs_kernel": used_tables,
    "_gumbel_sample_kernel": drawn_tokens,
    "_resample_kernel": resampled_tokens,
    "_rejection_kernel": kept_tokens,
    "_compute_local_logits_stats_kernel": combined,
    "_ngram_scan_kernel": best_score,
}


@pytest.mark.thorough  # a process that imports vLLM
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_writes_what_the_kernel_writes(name: str, cases: dict[str, list[Any]]):
    assert cases[name]
    for given, options, written in cases[name]:
        arguments = on_npu(given)
        STAND_INS[name](*arguments, **options)
        kernel = name.rsplit(".", 1)[1]
        taken, tolerance = TAKEN.get(kernel, list), TOLERANT.get(kernel, 0.0)
        both = zip(taken(arguments), taken(list(written)), strict=True)
        for number, (ours, theirs) in enumerate(both):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(
                    ours.cpu(),
                    theirs,
                    rtol=0,
                    atol=tolerance,
                    equal_nan=True,
                    msg=lambda text, number=number: f"argument {number}: {text}",
                )


# qwen3_vl's kernel is defined only if Triton is usable.
@pytest.mark.parametrize("name", [*STAND_INS, *(each for each in OF_MODELS if "qwen" not in each)])
def test_a_stand_in_has_the_kernels_parameters(name: str):
    """Kernels are launched with positional arguments, so this detects a release that moves one."""
    module, attribute = name.rsplit(".", 1)
    # Read the source instead of importing it, because stand-ins may be installed.
    source = Path(str(importlib.util.find_spec(module).origin)).read_text(encoding="utf-8")
    (kernel,) = (
        each.args
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.FunctionDef) and each.name == attribute
    )
    names = [each.arg for each in (*kernel.posonlyargs, *kernel.args, *kernel.kwonlyargs)]
    theirs = [each.removesuffix("_ptr") for each in names]
    ours = list(inspect.signature({**STAND_INS, **OF_MODELS}[name]).parameters)
    assert ours[-1] == "_"  # launch options that have no meaning here
    positional = [each for each in theirs if not each.isupper()]
    assert [each for each in ours[:-1] if not each.isupper()] == positional
    assert set(ours[:-1]) <= set(theirs)
