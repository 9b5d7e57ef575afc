"""Positions of a step's tokens that get an encoder's output."""

import pytest
import torch
from vllm.model_executor.models.clip import CLIPEmbeddingModel
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration

from vllm_davinci.core.multimodal.encoder_places import places_of, takes_places

MASK = torch.tensor([False, True, True, False, True])


def test_places_are_numbers_of_tokens():
    outputs = [torch.zeros(2, 4), torch.zeros(1, 4)]
    assert places_of(outputs, MASK).tolist() == [1, 2, 4]


def test_outputs_and_places_that_differ_are_named():
    with pytest.raises(ValueError, match="have 2 tokens, and the prompts have 3 placeholders"):
        places_of([torch.zeros(2, 4)], MASK)


def test_a_definition_that_reads_the_mask_gets_it():
    common, own = (
        object.__new__(kind) for kind in (Qwen2VLForConditionalGeneration, CLIPEmbeddingModel)
    )
    assert takes_places(common)
    assert not takes_places(own)
    assert not takes_places(torch.nn.Linear(1, 1))
    common._has_oov_mm_tokens = True  # masked ids become 0
    assert not takes_places(common)
