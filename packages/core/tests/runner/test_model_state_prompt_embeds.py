"""Embeddings that replace token ids as a step's model input."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.worker.gpu.model_states.prompt_embeds import PromptEmbedsState

from vllm_davinci.core.runner.model_state import NPUPromptEmbeds

SLOTS, ROWS, SIZE = 5, 40, 6
DEVICE = torch.device("npu")


def test_embeddings_are_written_where_a_prompt_came_with_them(step_of: Callable[..., Any]):
    state = NPUPromptEmbeds.taking_over(PromptEmbedsState(SLOTS, SIZE, torch.float32, DEVICE))
    generator = torch.Generator().manual_seed(1)
    given = {name: torch.randn(10, SIZE, generator=generator) for name in ("r0", "r2", "r3")}
    are_ids = torch.tensor([True, False] * 5)
    for slot, (name, embeds) in enumerate(given.items()):
        mask = are_ids if name == "r2" else None
        new: Any = SimpleNamespace(req_id=name, prompt_embeds=embeds, prompt_is_token_ids=mask)
        state.add_request(slot, new)
    state.add_request(3, SimpleNamespace(req_id="r3", prompt_embeds=None, prompt_is_token_ids=None))
    # A prompt's last chunk and one token after it; a chunk with token ids; a chunk without.
    step = step_of([0, 2, 3], [6, 3, 0], [5, 4, 2], [10, 10, 10])
    rows = torch.randn(ROWS, SIZE, generator=generator)
    written = rows.to(DEVICE)
    state.apply(step, torch.zeros(0), written)
    expected = rows.clone()
    expected[0:4] = given["r0"][6:10]
    for row, token in enumerate(range(3, 7), start=5):
        if not are_ids[token]:
            expected[row] = given["r2"][token]
    assert torch.equal(written.cpu(), expected)
    state.remove_request("r0")
    assert list(state.embeds) == ["r2"]
