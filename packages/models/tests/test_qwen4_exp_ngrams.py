"""Embeddings of n-grams equal transformers', whole and split into columns by rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.models.qwen4_exp_ngrams import NGramTable, inside_texts

END = 7
CONFIG: Any = SimpleNamespace(
    ngram_size=4,
    heads_per_ngram=2,
    vocab_size=9,
    ngram_vocab_size_base=40,
    make_ngram_vocab_size_divisible_by=16,
    split_ngram_parts=5,
    ple_embed_dim=48,
    seed=1234,
    eos_token_id=END,
)


def ids_of(tokens: torch.Tensor) -> torch.Tensor:
    """Returns rows as in a request's cache: [n, ngram_size], newest token first."""
    padded = torch.cat([torch.full((CONFIG.ngram_size - 1,), END), tokens])
    return padded.unfold(0, CONFIG.ngram_size, 1).flip(1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("table", [0, 1])
def test_rows_are_those_of_transformers_on_every_rank(table: int, ranks: int):
    theirs = Qwen4ExpTextNGramEmbedding(CONFIG, CONFIG.ple_embed_dim, 0, table)
    shards = theirs.ngram_embedding.weight.detach().chunk(CONFIG.split_ngram_parts)
    tokens = torch.randint(9, (200,), generator=torch.Generator().manual_seed(table))
    expected = theirs(tokens.unsqueeze(0), None)[0]
    parts = []
    for rank in range(ranks):
        ours = NGramTable(CONFIG, table, rank, ranks)
        ours.load_weights((f"shard_{n}.weight", rows) for n, rows in enumerate(shards))
        parts.append(ours(inside_texts(ids_of(tokens), END)))
    assert torch.equal(torch.cat(parts, dim=1), expected)


def test_ranks_that_do_not_divide_the_tables_are_refused():
    with pytest.raises(UnsupportedFeatureError, match="--tensor-parallel-size 4"):
        NGramTable(CONFIG, 0, 0, 4)
