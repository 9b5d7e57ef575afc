"""Runs vLLM's Triton kernels on a virtual NPU, and writes their arguments and results.

`vnpu run --triton -- python kernels_of_vllm.py FILE` runs every kernel of the V2 runner that has a
stand-in, on random inputs. FILE gets a list of cases per kernel.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

RUNNER = "vllm.v1.worker.gpu"
SLOTS, LONGEST, ROWS, VOCABULARY, DRAFTS = 9, 50, 40, 2100, 3
SEEDS = range(4)


class Case(NamedTuple):
    """A launch: its positional arguments and options, and the arguments afterwards."""

    given: tuple[Any, ...]
    options: dict[str, Any]
    written: tuple[Any, ...]


class Launch(NamedTuple):
    grid: tuple[int, ...]
    given: tuple[Any, ...]
    options: dict[str, Any]


class Draw:
    """Random values of a step with some requests."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.num_reqs = (1, 3, 6, 8)[seed % 4]
        self.slots = torch.randperm(SLOTS, generator=self.generator)[: self.num_reqs]
        self.lengths = self.ints(1, 6, self.num_reqs)
        self.starts = torch.zeros(SLOTS + 1, dtype=torch.int32)
        self.starts[1 : self.num_reqs + 1] = self.lengths.cumsum(0)
        self.starts[self.num_reqs + 1 :] = self.starts[self.num_reqs]
        self.computed, self.prefill = self.ints(0, 20, SLOTS), self.ints(1, 30, SLOTS)
        self.tokens = self.ints(0, VOCABULARY, SLOTS, LONGEST)
        self.seq_lens = torch.zeros(SLOTS, dtype=torch.int32)
        self.seq_lens[: self.num_reqs] = self.computed[self.slots] + self.lengths
        num_logits = torch.minimum(self.ints(1, DRAFTS + 2, self.num_reqs), self.lengths)
        self.cu_num_logits = torch.zeros(self.num_reqs + 1, dtype=torch.int32)
        self.cu_num_logits[1:] = num_logits.cumsum(0)
        self.num_rows = int(self.cu_num_logits[-1])
        counts = num_logits.to(torch.int64)
        self.slot_of_row = self.slots.repeat_interleave(counts)
        self.place_of_row = torch.cat([torch.arange(n) for n in counts]).to(torch.int32)

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def longs(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator)

    def logits(self) -> torch.Tensor:
        return self.floats(self.num_rows, VOCABULARY)


def prepare_prefill_inputs(draw: Draw) -> Iterator[Launch]:
    following = draw.ints(0, 9, 2, SLOTS)
    yield Launch(
        (draw.num_reqs,),
        (
            draw.ints(0, 99, ROWS),
            following,
            following.stride(0),
            2,
            draw.slots,
            draw.starts,
            draw.tokens,
            LONGEST,
            draw.prefill,
            draw.computed,
        ),
        {"BLOCK_SIZE": 16, "LOOKAHEAD_BLOCK": 2},
    )


def prepare_pos_seq_lens(draw: Draw) -> Iterator[Launch]:
    lengths, positions = draw.ints(0, 99, SLOTS), draw.longs(0, 99, ROWS)
    given = (positions, lengths, draw.slots, draw.starts, draw.computed, SLOTS)
    yield Launch((draw.num_reqs + 1,), given, {"BLOCK_SIZE": 16})


def combine_sampled_and_draft_tokens(draw: Draw) -> Iterator[Launch]:
    yield Launch(
        (draw.num_reqs,),
        (
            draw.ints(0, 99, ROWS),
            draw.slots,
            draw.longs(0, 99, SLOTS, 1),
            draw.starts,
            draw.seq_lens,
            draw.prefill,
            draw.longs(0, 99, SLOTS, DRAFTS),
            DRAFTS,
            draw.cu_num_logits,
            torch.zeros(draw.num_rows, dtype=torch.int64),
        ),
        {"NUM_NEW_SAMPLED_TOKENS": 1, "BLOCK_SIZE": 4},
    )


def get_num_sampled_and_rejected(draw: Draw) -> Iterator[Launch]:
    sampled = draw.ints(1, 3, draw.num_reqs)
    rejected = torch.zeros_like(sampled)
    given = (sampled, rejected, draw.seq_lens, draw.cu_num_logits, draw.slots, draw.prefill)
    yield Launch((draw.num_reqs,), given, {})


UNDEFINED = 10**9  # in draft columns without a sampled token


def post_update(draw: Draw) -> Iterator[Launch]:
    sampled = draw.ints(0, DRAFTS + 2, draw.num_reqs)
    is_undefined = torch.arange(DRAFTS + 1) >= sampled.unsqueeze(1)
    left_out = draw.slots.clone()
    left_out[0] = -1
    for slots in (draw.slots, left_out):
        for counts in (draw.ints(0, 3, SLOTS, VOCABULARY), None):
            for starts in (draw.starts, None):
                yield Launch(
                    (draw.num_reqs,),
                    (
                        slots,
                        draw.computed,
                        draw.longs(0, 99, SLOTS, 1),
                        counts,
                        0 if counts is None else VOCABULARY,
                        draw.longs(0, 99, draw.num_reqs, DRAFTS + 1).masked_fill(
                            is_undefined, UNDEFINED
                        ),
                        DRAFTS + 1,
                        sampled,
                        DRAFTS + 1 - sampled,
                        starts,
                        draw.tokens,
                        LONGEST,
                        draw.ints(0, LONGEST - DRAFTS - 1, SLOTS),
                        None if counts is None else draw.longs(0, 99, draw.num_reqs, DRAFTS),
                        draw.longs(0, 99, SLOTS, DRAFTS),
                        DRAFTS,
                    ),
                    {},
                )


def post_update_num_computed_tokens(draw: Draw) -> Iterator[Launch]:
    yield Launch((draw.num_reqs,), (draw.slots, draw.computed, draw.starts), {})


def expand_idx_mapping(draw: Draw) -> Iterator[Launch]:
    slots = torch.zeros(draw.num_rows, dtype=torch.int64)
    places = torch.zeros(draw.num_rows, dtype=torch.int32)
    given = (draw.slots, slots, places, draw.cu_num_logits)
    yield Launch((draw.num_reqs,), given, {"BLOCK_SIZE": 4})


def some_temperatures(draw: Draw) -> torch.Tensor:
    temperatures = draw.uniform(SLOTS) * 2
    temperatures[::3], temperatures[1::4] = 0, 1
    return temperatures


def temperature(draw: Draw) -> Iterator[Launch]:
    given = (draw.logits(), VOCABULARY, draw.slot_of_row, some_temperatures(draw), VOCABULARY)
    yield Launch((draw.num_rows, 1), given, {"BLOCK_SIZE": 8192})


def min_p(draw: Draw) -> Iterator[Launch]:
    least = draw.uniform(SLOTS)
    least[::3] = 0
    given = (draw.logits(), VOCABULARY, draw.slot_of_row, least, VOCABULARY)
    yield Launch((draw.num_rows,), given, {"BLOCK_SIZE": 1024})


def gumbel_sample(draw: Draw) -> Iterator[Launch]:
    blocks = -(-VOCABULARY // 1024)
    for is_double in (False, True):
        for is_drafting in (False, True):
            dtype = torch.float64 if is_double else torch.float32
            yield Launch(
                (draw.num_rows, blocks),
                (
                    torch.zeros(draw.num_rows, blocks, dtype=torch.int64),
                    blocks,
                    torch.zeros(draw.num_rows, blocks, dtype=dtype),
                    blocks,
                    *(None, 0, 0, None, None, 0),
                    draw.logits(),
                    VOCABULARY,
                    draw.slot_of_row,
                    draw.longs(-(2**62), 2**62, SLOTS),
                    draw.longs(0, 5000, draw.num_rows),
                    some_temperatures(draw),
                    VOCABULARY,
                ),
                {
                    "BLOCK_SIZE": 1024,
                    "IS_DRAFTING": is_drafting,
                    "APPLY_TEMPERATURE": True,
                    "USE_FP64": is_double,
                    "PER_TOKEN_COL": False,
                },
            )


def bincount(draw: Draw) -> Iterator[Launch]:
    masks = torch.zeros(SLOTS, -(-VOCABULARY // 32), dtype=torch.int32)
    counts = torch.zeros(SLOTS, VOCABULARY, dtype=torch.int32)
    prompt = torch.minimum(draw.prefill, draw.ints(1, 20, SLOTS))
    given = (draw.slots, draw.tokens, LONGEST, prompt, draw.prefill)
    given += (masks, masks.stride(0), counts, VOCABULARY)
    yield Launch((draw.num_reqs, 4), given, {"BLOCK_SIZE": 16})


def penalties(draw: Draw) -> Iterator[Launch]:
    masks = draw.ints(-(2**31), 2**31 - 1, SLOTS, -(-VOCABULARY // 32))
    rates = [draw.uniform(SLOTS) + 0.5, draw.uniform(SLOTS), draw.uniform(SLOTS)]
    rates[0][::3], rates[1][::3], rates[2][::3] = 1, 0, 0
    given = (draw.logits(), VOCABULARY, draw.slot_of_row)
    given += (draw.ints(0, VOCABULARY, draw.num_rows), draw.place_of_row, *rates)
    given += (masks, masks.stride(0), draw.ints(0, 2, SLOTS, VOCABULARY), VOCABULARY, VOCABULARY)
    yield Launch((draw.num_rows, 1), given, {"BLOCK_SIZE": 8192})


def bad_words(draw: Draw) -> Iterator[Launch]:
    few = 3  # few distinct tokens, so that many words match
    words, most = draw.ints(0, few, SLOTS, 24), 5
    lengths = draw.ints(1, 4, SLOTS, most)
    offsets = torch.zeros(SLOTS, most + 1, dtype=torch.int32)
    offsets[:, 1:] = lengths.cumsum(1)
    counts, prompt = draw.ints(0, most + 1, SLOTS), draw.ints(1, 10, SLOTS)
    given = (draw.logits(), VOCABULARY, draw.slot_of_row, words, 24, offsets, most + 1, counts)
    given += (draw.tokens % few, LONGEST, prompt, prompt + draw.ints(0, 20, SLOTS))
    given += (draw.ints(0, few, draw.num_rows), draw.place_of_row)
    yield Launch((draw.num_rows, most), given, {})


def bias(draw: Draw) -> Iterator[Launch]:
    def tokens(most: int) -> torch.Tensor:
        rows = [torch.randperm(VOCABULARY, generator=draw.generator)[:most] for _ in range(SLOTS)]
        return torch.stack(rows).to(torch.int32)

    allowed, biased, stops = tokens(8), tokens(8), tokens(4)
    num_allowed = draw.ints(0, 9, SLOTS)
    num_allowed[::2] = 0
    stops[1::2, :3] = allowed[1::2, :3]  # if all of these are allowed tokens, none is left
    num_allowed[1::4] = 3
    for checks in (False, True):
        given = (draw.logits(), VOCABULARY, VOCABULARY, draw.slot_of_row)
        given += (num_allowed, allowed, 8, draw.ints(0, 9, SLOTS), biased, 8)
        given += (draw.floats(SLOTS, 8), 8, draw.longs(0, 40, draw.num_rows))
        given += (draw.ints(0, 50, SLOTS), draw.ints(0, 5, SLOTS), draw.ints(0, 2, SLOTS), stops, 4)
        options = {"BLOCK_SIZE": 8, "LOGITS_BLOCK_SIZE": 8192, "CHECK_ALL_MASKED_ROWS": checks}
        yield Launch((draw.num_rows,), given, options)


def topk_log_softmax(draw: Draw) -> Iterator[Launch]:
    ids = draw.longs(0, VOCABULARY, draw.num_rows, 5)
    given = (torch.zeros(draw.num_rows, 5), draw.logits(), VOCABULARY, ids, 5, 5, VOCABULARY)
    yield Launch((draw.num_rows,), given, {"BLOCK_SIZE": 1024, "TOPK_BLOCK_SIZE": 8})


def ranks(draw: Draw) -> Iterator[Launch]:
    logits = draw.logits().round()  # many are equal
    out = torch.zeros(draw.num_rows, dtype=torch.int64)
    given = (out, logits, VOCABULARY, draw.longs(0, VOCABULARY, draw.num_rows), VOCABULARY)
    yield Launch((draw.num_rows,), given, {"BLOCK_SIZE": 8192})


def fill_logprob_token_ids(draw: Draw) -> Iterator[Launch]:
    for num_topk, columns in ((0, 4), (3, 4), (5, 5)):
        counts = draw.ints(0, columns + 1, SLOTS)
        counts[::2] = 0
        out = torch.zeros(draw.num_rows, 1 + columns, dtype=torch.int64)
        likeliest = draw.ints(0, VOCABULARY, draw.num_rows, max(num_topk, 1))
        given = (out, 1 + columns, torch.zeros_like(out, dtype=torch.bool), 1 + columns)
        given += (draw.longs(0, VOCABULARY, draw.num_rows), likeliest, likeliest.stride(0))
        given += (draw.slot_of_row, counts, draw.ints(0, VOCABULARY, SLOTS, 16), 16)
        yield Launch((draw.num_rows,), given, {"NUM_TOPK": num_topk, "PADDED_COLS": 8})


def prompt_logprobs_token_ids(draw: Draw) -> Iterator[Launch]:
    out = torch.zeros(int(draw.starts[-1]), dtype=torch.int64)
    given = (out, draw.starts, draw.slots, draw.computed, draw.tokens, LONGEST)
    yield Launch((draw.num_reqs,), given, {"BLOCK_SIZE": 16})


def prefill_of_drafts(draw: Draw) -> Iterator[Launch]:
    sampled = draw.ints(0, 2, draw.num_reqs)
    rejected = torch.minimum(draw.ints(0, 3, draw.num_reqs), draw.lengths - 1) * sampled
    last, column = draw.longs(0, 99, SLOTS), torch.tensor(7)
    given = (last, column, draw.ints(0, 99, ROWS + 4), draw.longs(0, 99, ROWS + 4))
    given += (draw.ints(0, 99, SLOTS + 1), draw.ints(0, 99, SLOTS))
    given += (draw.ints(0, 99, ROWS), draw.longs(0, 99, ROWS), draw.slots)
    given += (draw.longs(0, 99, SLOTS, 1), draw.ints(0, 99, 2, SLOTS), sampled, rejected)
    given += (draw.starts, draw.seq_lens, SLOTS)
    yield Launch((draw.num_reqs,), given, {"BLOCK_SIZE": 16})


def decode_of_drafts(draw: Draw) -> Iterator[Launch]:
    for advances in (False, True):
        given = (draw.longs(0, 99, draw.num_reqs), 1, draw.seq_lens)
        given += (torch.minimum(draw.ints(0, 3, draw.num_reqs), draw.lengths - 1),)
        given += (draw.ints(0, 99, ROWS), draw.longs(0, 25, ROWS), draw.longs(0, 25, SLOTS))
        given += (draw.ints(0, 99, SLOTS + 1), draw.ints(0, 99, SLOTS), 20, SLOTS)
        options = {"BLOCK_SIZE": 16, "ADVANCE_DRAFT_POSITIONS": advances}
        yield Launch((draw.num_reqs + 1,), given, options)


def update_of_drafts(draw: Draw) -> Iterator[Launch]:
    for advances in (False, True):
        for step in range(DRAFTS - 1):
            given = (draw.longs(0, 99, SLOTS, DRAFTS), DRAFTS, draw.floats(ROWS, 24), 24)
            given += (draw.ints(0, 99, ROWS), draw.longs(0, 25, ROWS), draw.longs(0, 25, SLOTS))
            given += (draw.ints(0, 25, SLOTS), draw.longs(0, 99, draw.num_reqs))
            given += (torch.tensor(step), draw.floats(ROWS, 24), 24, 24, 20, DRAFTS)
            options = {"BLOCK_SIZE": 16, "ADVANCE_DRAFT_POSITIONS": advances}
            yield Launch((draw.num_reqs,), given, options)


def rows_of_a_draft_model(draw: Draw) -> Iterator[Launch]:
    given = (draw.ints(0, 99, ROWS), draw.longs(0, 25, ROWS), draw.ints(0, 99, SLOTS, 1))
    given += (draw.slots, draw.ints(0, 99, ROWS + SLOTS), draw.longs(0, 99, ROWS + SLOTS))
    given += (draw.longs(0, 99, SLOTS), draw.ints(0, 99, SLOTS + 1), draw.ints(0, 99, SLOTS))
    given += (draw.starts, draw.seq_lens)
    given += (torch.minimum(draw.ints(0, 3, draw.num_reqs), draw.lengths - 1), SLOTS, 20)
    yield Launch((draw.num_reqs,), given, {"BLOCK_SIZE": 16})


def blocks_of_drafts(draw: Draw) -> Iterator[Launch]:
    for is_anchor in (False, True):
        num_query = DRAFTS + 1 - is_anchor
        sampled = draw.ints(0, 2, draw.num_reqs)
        rejected = torch.minimum(draw.ints(0, 3, draw.num_reqs), draw.lengths - 1) * sampled
        num_rows = int(draw.starts[draw.num_reqs])
        slots, places = ROWS + 4, SLOTS * DRAFTS
        given = (draw.ints(0, 99, slots), draw.longs(0, 99, slots), draw.ints(0, 2, slots) > 0)
        given += (draw.ints(0, 99, SLOTS + 1), draw.ints(0, 99, SLOTS), draw.longs(0, 99, slots))
        given += (draw.longs(0, 99, ROWS), draw.longs(0, 99, ROWS))
        given += tuple(draw.longs(0, 99, places) for _ in range(3))
        given += (draw.floats(SLOTS), draw.longs(0, 99, SLOTS))
        # Up to the longest request; there are no blocks after it.
        given += (draw.longs(0, 24, num_rows), draw.starts, draw.slots)
        given += (draw.longs(0, 99, SLOTS, 1), draw.ints(0, 99, 2, SLOTS), sampled, rejected)
        given += (draw.floats(SLOTS), draw.longs(0, 99, SLOTS), draw.ints(0, 4, SLOTS, 6), 6)
        given += (77, 4, num_query, DRAFTS, SLOTS, slots, 25, 0)
        options = {"SAMPLE_FROM_ANCHOR": is_anchor, "PAD_SLOT_ID": -1, "CP_SIZE": 1}
        options |= {"CP_INTERLEAVE": 1, "BLOCK_SIZE": 16}
        yield Launch((draw.num_reqs, 1), given, options)


def ngram_scan(draw: Draw) -> Iterator[Launch]:
    for shortest, longest, rounded in ((1, 1, 1), (2, 4, 4), (3, 5, 8)):
        tokens, lengths = draw.tokens % 3, draw.ints(1, LONGEST + 1, SLOTS)  # many occur twice
        scratch = torch.zeros(SLOTS, 4, dtype=torch.int64)
        given = (tokens, LONGEST, draw.slots, lengths, draw.ints(0, 2, draw.num_reqs))
        given += (scratch, 4, LONGEST, shortest, longest, rounded, 16)
        yield Launch((draw.num_reqs, 4), given, {})


def ngram_finalize(draw: Draw) -> Iterator[Launch]:
    for best in (0, 4):  # words that occur again, of up to this many tokens
        found, places = draw.longs(0, best + 1, SLOTS, 4), draw.longs(0, 30, SLOTS, 4)
        scores = torch.where(found > 0, found * (LONGEST + 1) + places + 1, 0)
        given = (draw.tokens, LONGEST, draw.slots, draw.ints(1, LONGEST + 1, SLOTS))
        given += (draw.ints(0, 2, draw.num_reqs), draw.longs(0, 99, SLOTS), scores, 4)
        given += (draw.longs(0, 99, SLOTS, DRAFTS), LONGEST, 4, DRAFTS, 4, 4)
        yield Launch((draw.num_reqs,), given, {})


def gather_draft_sampled(draw: Draw) -> Iterator[Launch]:
    rows = draw.longs(0, ROWS, draw.num_rows)
    given = (torch.zeros_like(rows, dtype=torch.int32), torch.zeros_like(rows))
    given += (draw.ints(0, 99, ROWS), draw.longs(0, 30, ROWS), rows)
    given += (draw.slot_of_row, draw.place_of_row, draw.prefill, draw.num_rows)
    yield Launch((-(-draw.num_rows // 16),), given, {"BLOCK_SIZE": 16})


def flatten_sampled(draw: Draw) -> Iterator[Launch]:
    counts = draw.cu_num_logits.diff()
    sampled = torch.minimum(draw.ints(0, DRAFTS + 2, draw.num_reqs), counts)
    given = (torch.zeros(draw.num_rows, dtype=torch.int64),)
    given += (draw.longs(0, 99, draw.num_reqs, DRAFTS + 1), DRAFTS + 1, sampled)
    yield Launch((draw.num_reqs,), (*given, draw.cu_num_logits), {})


BLOCK, BLOCKS = 1024, -(-VOCABULARY // 1024)


def drafted(draw: Draw, logits: torch.Tensor) -> torch.Tensor:
    """Returns a step's tokens; about half of the drafts are the argmax of the previous row's
    logits.
    """
    tokens = torch.where(
        draw.uniform(draw.num_rows) < 0.7,
        logits.argmax(dim=1).roll(1),
        draw.longs(-1, VOCABULARY, draw.num_rows),
    )
    return tokens.to(torch.int32)


def local_logits_stats(draw: Draw) -> Iterator[Launch]:
    for has_drafts in (False, True):
        of_drafter = draw.floats(SLOTS, DRAFTS, VOCABULARY) if has_drafts else None
        kinds = (torch.int64, *[torch.float32] * 4)
        blocks = [torch.zeros(draw.num_rows, BLOCKS, dtype=each) for each in kinds]
        given = tuple(each for block in blocks for each in (block, BLOCKS))
        given += (draw.logits(), VOCABULARY, of_drafter)
        given += (DRAFTS * VOCABULARY, VOCABULARY) if has_drafts else (0, 0)
        given += (draw.slot_of_row, draw.place_of_row, some_temperatures(draw))
        options = {"BLOCK_SIZE": BLOCK, "HAS_DRAFT_LOGITS": has_drafts}
        yield Launch((draw.num_rows, BLOCKS), (*given, VOCABULARY, draw.num_rows), options)


def rejection(draw: Draw) -> Iterator[Launch]:
    """Yields launches of greedy requests, because the stand-in draws other noise than vLLM's
    kernel.
    """
    logits = draw.logits()
    padded = torch.nn.functional.pad(logits, (0, BLOCKS * BLOCK - VOCABULARY), value=-torch.inf)
    maxima, places = padded.view(-1, BLOCKS, BLOCK).max(dim=2)
    argmax = places + torch.arange(BLOCKS) * BLOCK
    sums = torch.ones_like(maxima)
    given = (torch.zeros(draw.num_reqs, DRAFTS + 1, dtype=torch.int64), DRAFTS + 1)
    given += (torch.zeros(draw.num_reqs, dtype=torch.int32),)
    given += (torch.zeros(draw.num_reqs), torch.zeros(draw.num_reqs), logits, VOCABULARY)
    given += (argmax, BLOCKS, maxima, BLOCKS, sums, BLOCKS, drafted(draw, logits), None, 0, 0)
    given += (maxima, BLOCKS, sums, BLOCKS, draw.cu_num_logits, draw.slots)
    given += (torch.zeros(SLOTS), draw.longs(0, 99, SLOTS), draw.longs(0, 99, draw.num_rows))
    given += (None, None, None, 0, None, 0.0, BLOCKS)
    options = {"PADDED_VOCAB_NUM_BLOCKS": 4, "HAS_DRAFT_LOGITS": False, "SYNTHETIC_MODE": False}
    options |= {"USE_BLOCK_VERIFICATION": False, "FLY_WINDOW_SIZE": 0}
    yield Launch((draw.num_reqs,), given, options)


def resample(draw: Draw) -> Iterator[Launch]:
    logits = draw.logits()
    kept = (draw.uniform(draw.num_reqs) * draw.cu_num_logits.diff()).to(torch.int32)
    given = (torch.zeros(draw.num_reqs, BLOCKS, dtype=torch.int64), BLOCKS)
    given += (torch.full((draw.num_reqs, BLOCKS), -torch.inf), BLOCKS, logits, VOCABULARY)
    given += (torch.zeros(draw.num_reqs), None, 0, 0, torch.zeros(draw.num_reqs), kept)
    given += (draw.cu_num_logits, draw.slot_of_row, drafted(draw, logits))
    given += (some_temperatures(draw), draw.longs(-(2**62), 2**62, SLOTS))
    given += (draw.longs(0, 5000, draw.num_rows), None, None, 0, None, None, 0, 0, VOCABULARY)
    options = {"BLOCK_SIZE": BLOCK, "HAS_DRAFT_LOGITS": False, "USE_FP64": False}
    options |= {"USE_BLOCK_VERIFICATION": False, "CONTEXT_WIDTH": 1, "WATERMARK": False}
    options |= {"DEDUPLICATE_CONTEXTS": False}
    yield Launch((draw.num_reqs, BLOCKS), given, options)


def insert_resampled(draw: Draw) -> Iterator[Launch]:
    kept = (draw.uniform(draw.num_reqs) * draw.cu_num_logits.diff()).to(torch.int32)
    given = (draw.longs(0, 99, draw.num_reqs, DRAFTS + 1), DRAFTS + 1, kept)
    given += (draw.longs(0, VOCABULARY, draw.num_reqs, BLOCKS), BLOCKS)
    given += (draw.floats(draw.num_reqs, BLOCKS), BLOCKS, BLOCKS, draw.cu_num_logits)
    given += (draw.slot_of_row, some_temperatures(draw))
    yield Launch((draw.num_reqs,), given, {"PADDED_RESAMPLE_NUM_BLOCKS": 4})


def rejected_by(draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 1 for each request that has sampled, and the number of its rejected drafts."""
    sampled = draw.ints(0, 2, draw.num_reqs)
    return sampled, torch.minimum(
        draw.ints(0, DRAFTS + 1, draw.num_reqs), draw.lengths - 1
    ) * sampled


def inputs_of_modules(draw: Draw) -> Iterator[Launch]:
    sampled, rejected = rejected_by(draw)
    given = (draw.longs(0, 99, SLOTS), draw.ints(0, 99, ROWS + 4), draw.longs(0, 99, ROWS + 4))
    given += (draw.ints(0, 99, SLOTS), draw.ints(0, 99, ROWS), draw.longs(DRAFTS, 99, ROWS))
    given += (draw.longs(0, 99, SLOTS + 1, DRAFTS - 1), DRAFTS - 1)
    given += (draw.longs(0, 99, SLOTS, DRAFTS - 1), DRAFTS - 1, draw.slots)
    given += (draw.longs(0, 99, SLOTS, 1), draw.ints(0, 99, DRAFTS, SLOTS), SLOTS)
    given += (sampled, rejected, draw.seq_lens, draw.starts.clone(), SLOTS, DRAFTS)
    yield Launch((draw.num_reqs,), given, {"BLOCK_SIZE": 16})


def states_of_modules(draw: Draw) -> Iterator[Launch]:
    given = (draw.floats(ROWS + 4, 24), 24, draw.floats(ROWS, 24), 24)
    given += (draw.floats(SLOTS + 1, DRAFTS - 1, 24), 24 * (DRAFTS - 1), 24, None, 0, None, 0, 0)
    given += (draw.slots, rejected_by(draw)[1], draw.starts, DRAFTS, 24)
    options = {"BLOCK_SIZE_Q": 16, "BLOCK_SIZE_H": 32, "USE_INPUT_EMBEDS": False}
    yield Launch((draw.num_reqs, 1, 1), given, options)


def unused_slots(draw: Draw) -> Iterator[Launch]:
    last = draw.starts[1 : draw.num_reqs + 1].to(torch.int64) - 1
    last -= torch.minimum(draw.ints(0, 2, draw.num_reqs), draw.lengths - 1)
    given = (draw.longs(0, 99, 2, ROWS), ROWS, draw.starts, last, -1)
    yield Launch((2, draw.num_reqs), given, {"BLOCK_SIZE": 16})


def cached_inputs(draw: Draw) -> Iterator[Launch]:
    last = draw.starts[1 : draw.num_reqs + 1].to(torch.int64) - 1
    left_out = draw.slots.clone()
    left_out[-1] = -1
    for slots in (draw.slots, left_out):
        given = (draw.ints(0, 99, ROWS), None, 0, draw.floats(ROWS, 24), 24)
        given += (draw.longs(0, 99, SLOTS + 1, DRAFTS - 1), DRAFTS - 1, None, 0, 0)
        given += (draw.floats(SLOTS + 1, DRAFTS - 1, 24), 24 * (DRAFTS - 1), 24)
        given += (slots, last, draw.starts, DRAFTS, 24)
        options = {"BLOCK_SIZE": 32, "USE_INPUT_EMBEDS": False}
        yield Launch((draw.num_reqs, 1), given, options)


def shifted_ids(draw: Draw) -> Iterator[Launch]:
    last = draw.starts[1 : draw.num_reqs + 1].to(torch.int64) - 1
    given = (draw.ints(0, 99, ROWS), draw.slots, draw.starts, last)
    yield Launch((draw.num_reqs,), (*given, draw.longs(0, 99, draw.num_reqs)), {"BLOCK_SIZE": 16})


DEPENDENT = "spec_decode.target_dependent_ar.speculator"
MODULES = "spec_decode.multi_module_mtp.speculator"
VERIFIED = "spec_decode.rejection_sampler_utils"
OF_DRAFTS: dict[str, Callable[[Draw], Iterator[Launch]]] = {
    f"{DEPENDENT}._prepare_prefill_inputs_kernel": prefill_of_drafts,
    f"{DEPENDENT}._prepare_decode_inputs_kernel": decode_of_drafts,
    f"{DEPENDENT}._update_draft_inputs_kernel": update_of_drafts,
    f"{MODULES}._prepare_input_buffers_kernel": inputs_of_modules,
    f"{MODULES}._prepare_input_hidden_states_and_embeddings_kernel": states_of_modules,
    f"{MODULES}._pad_trailing_draft_slots_kernel": unused_slots,
    f"{MODULES}._cache_inputs_kernel": cached_inputs,
    f"{MODULES}._shift_input_ids_kernel": shifted_ids,
    "spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel": rows_of_a_draft_model,
    "spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": blocks_of_drafts,
    "spec_decode.ngram.speculator._ngram_scan_kernel": ngram_scan,
    "spec_decode.ngram.speculator._ngram_finalize_kernel": ngram_finalize,
    "spec_decode.rejection_sampler._gather_draft_sampled_kernel": gather_draft_sampled,
    "spec_decode.rejection_sampler._flatten_sampled_kernel": flatten_sampled,
    f"{VERIFIED}._compute_local_logits_stats_kernel": local_logits_stats,
    f"{VERIFIED}._rejection_kernel": rejection,
    f"{VERIFIED}._resample_kernel": resample,
    f"{VERIFIED}._insert_resampled_kernel": insert_resampled,
}


def dcp_local_seq_lens(draw: Draw) -> Iterator[Launch]:
    for rank in range(3):
        for interleave in (1, 4):
            given = (draw.ints(0, 9, SLOTS), draw.seq_lens, 3, rank, interleave)
            given += (draw.num_reqs, SLOTS, 16)
            yield Launch((1,), given, {})


def scatter_num_accepted(draw: Draw) -> Iterator[Launch]:
    left_out = draw.slots.clone()
    left_out[-1] = -1
    for slots in (draw.slots, left_out):
        given = (slots, draw.ints(0, DRAFTS + 2, draw.num_reqs), draw.ints(1, 9, SLOTS))
        yield Launch((draw.num_reqs,), given, {})


def fill_num_accepted(draw: Draw) -> Iterator[Launch]:
    yield Launch((draw.num_reqs,), (draw.slots, draw.ints(1, 9, SLOTS), 1), {})


class Reasoning:
    """Requests with few distinct tokens, so that markers of one to three tokens occur by chance."""

    def __init__(self, draw: Draw, sizes: tuple[int, int, int]) -> None:
        self.tokens, self.total = draw.tokens % 3, draw.ints(0, LONGEST - DRAFTS, SLOTS)
        self.start, self.natural_end, self.end = (draw.ints(0, 3, size) for size in sizes)
        self.budgets = draw.ints(-1, 9, SLOTS)
        self.last_start, self.last_end = draw.ints(-1, 20, SLOTS), draw.ints(-1, 20, SLOTS)
        self.scanned = draw.ints(0, LONGEST, SLOTS)
        for each, cold in ((self.scanned, 0), (self.last_start, -1), (self.last_end, -1)):
            each[::4] = cold


SIZES = ((1, 1, 1), (2, 1, 3), (1, 2, 2))


def update_committed_marker_cache(draw: Draw) -> Iterator[Launch]:
    for sizes in SIZES:
        of = Reasoning(draw, sizes)
        given = (draw.slots, of.budgets, of.tokens, LONGEST, of.total, of.last_start, of.last_end)
        given += (of.scanned, of.start, of.natural_end)
        options = {"START_LEN": sizes[0], "NATURAL_END_LEN": sizes[1], "MAX_LEN": max(sizes[:2])}
        yield Launch((draw.num_reqs,), given, {**options, "BLOCK": 64})


def thinking_budget(draw: Draw) -> Iterator[Launch]:
    for sizes in SIZES:
        of = Reasoning(draw, sizes)
        given = (draw.logits(), VOCABULARY, draw.slot_of_row, of.budgets, of.tokens, LONGEST)
        given += (of.total, draw.ints(0, 3, draw.num_rows), draw.place_of_row)
        given += (of.last_start, of.last_end, of.start, of.natural_end, of.end)
        options = {"START_LEN": sizes[0], "NATURAL_END_LEN": sizes[1], "END_LEN": sizes[2]}
        yield Launch((draw.num_rows,), given, options)


def trace_replay(draw: Draw) -> Iterator[Launch]:
    left_out = draw.slots.clone()
    left_out[0] = -1
    prompt = draw.ints(1, 20, SLOTS)
    given = (
        draw.tokens,
        LONGEST,
        draw.ints(0, 20, SLOTS),
        prompt + draw.ints(0, 20, SLOTS),
        prompt,
    )
    for slots in (draw.slots, left_out):
        yield Launch((draw.num_reqs,), (draw.longs(0, 99, draw.num_reqs), slots, *given), {})


def compact_sampling_mask(draw: Draw) -> Iterator[Launch]:
    most, num_bytes = 40, -(-VOCABULARY // 8)
    for per_request in (1, DRAFTS + 1):
        num_rows = draw.num_reqs * per_request
        logits = draw.logits().masked_fill(
            draw.uniform(draw.num_rows, VOCABULARY) < 0.99, -torch.inf
        )
        logits[0, :9], logits[-1, :3] = torch.nan, torch.inf
        num_logits = draw.cu_num_logits.diff()
        sampled = torch.minimum(draw.ints(0, per_request + 1, draw.num_reqs), num_logits)
        given = (logits, VOCABULARY, 1, draw.cu_num_logits, sampled)
        given += (torch.zeros(num_rows, most, dtype=torch.int32), most)
        given += (torch.zeros(num_rows, num_bytes, dtype=torch.uint8), num_bytes)
        given += (torch.zeros(num_rows, dtype=torch.int32), VOCABULARY, most)
        options = {"ROWS_PER_REQUEST": per_request, "BLOCK_SIZE": 1024}
        yield Launch((num_rows,), given, options)


def apply_grammar_bitmask(draw: Draw) -> Iterator[Launch]:
    mask_stride, words = DRAFTS + 2, -(-VOCABULARY // 32)  # one more than a request's rows
    rows = [slot * mask_stride + n for slot in range(draw.num_reqs) for n in range(mask_stride)]
    masks = draw.ints(-(2**31), 2**31 - 1, len(rows), words)
    given = (draw.logits(), VOCABULARY, torch.tensor(rows, dtype=torch.int32), draw.cu_num_logits)
    given += (masks, words, VOCABULARY)
    options = {"MASK_STRIDE": mask_stride, "BLOCK_SIZE": 8192}
    yield Launch((len(rows), 1), given, options)


def num_nans(draw: Draw) -> Iterator[Launch]:
    logits = draw.logits().masked_fill(draw.uniform(draw.num_rows, VOCABULARY) < 0.01, torch.nan)
    logits[:, 7] = torch.inf
    given = (logits, VOCABULARY, torch.zeros(draw.num_rows, dtype=torch.int32), VOCABULARY)
    yield Launch((draw.num_rows,), given, {"BLOCK_SIZE": 8192})


# Kernel -> function that draws its launches.
CASES: dict[str, Callable[[Draw], Iterator[Launch]]] = {
    f"{RUNNER}.{module}._{draws.__name__}_kernel": draws
    for module, of_module in {
        "input_batch": [
            prepare_prefill_inputs,
            prepare_pos_seq_lens,
            combine_sampled_and_draft_tokens,
            get_num_sampled_and_rejected,
            post_update,
            post_update_num_computed_tokens,
            expand_idx_mapping,
        ],
        "cp_utils": [dcp_local_seq_lens],
        "sample.gumbel": [temperature, gumbel_sample],
        "sample.min_p": [min_p],
        "sample.penalties": [bincount, penalties],
        "sample.bad_words": [bad_words],
        "sample.logit_bias": [bias],
        "sample.logprob": [topk_log_softmax, ranks, fill_logprob_token_ids],
        "sample.prompt_logprob": [prompt_logprobs_token_ids],
        "sample.trace_replay": [trace_replay],
        "model_states.mamba_hybrid": [scatter_num_accepted, fill_num_accepted],
        "sample.output": [compact_sampling_mask],
        "structured_outputs": [apply_grammar_bitmask],
        "metrics.logits": [num_nans],
        "sample.thinking_budget": [update_committed_marker_cache, thinking_budget],
    }.items()
    for draws in of_module
} | {f"{RUNNER}.{name}": draws for name, draws in OF_DRAFTS.items()}


def moved(arguments: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    return tuple(
        each.to(device, copy=True) if isinstance(each, torch.Tensor) else each for each in arguments
    )


def run(name: str) -> list[Case]:
    module, attribute = name.rsplit(".", 1)
    kernel = getattr(importlib.import_module(module), attribute)
    cases = []
    for seed in SEEDS:
        for launch in CASES[name](Draw(seed)):
            written = moved(launch.given, "npu")
            kernel[launch.grid](*written, **launch.options)
            cases.append(Case(moved(launch.given, "cpu"), launch.options, moved(written, "cpu")))
    return cases


if __name__ == "__main__":
    torch.save({name: [tuple(case) for case in run(name)] for name in CASES}, sys.argv[1])
