"""Sampled tokens still on the device that the next step's penalties need (async scheduling)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

PLACEHOLDER = -1  # vLLM's placeholder in a request's output for a token that is not yet on the host


@dataclass(frozen=True)
class NewestTokens:
    """Tokens of the previous step, by the rows of this one.

    tokens: [num_requests] integers on the device; undefined where `known` is false
    known:  for each row whether the previous step sampled for its request
    """

    tokens: torch.Tensor
    known: list[bool]


class _Step(NamedTuple):
    """A step's tokens being copied to the host.

    tokens: [num_requests, 1] on the host, valid after `copied`
    rows:   request -> row
    """

    tokens: torch.Tensor
    copied: Any
    rows: dict[str, int]


class TokenHistory:
    """Completes requests' outputs without waiting for the newest step.

    With asynchronous scheduling the previous step still runs while this one samples; the step
    before it has ended, since the scheduler has waited for its tokens.
    """

    def __init__(self) -> None:
        self._older: _Step | None = None

    @staticmethod
    def is_needed_by(batch: Any) -> bool:
        """True if a step needs tokens that the host lacks, and the sampler can do without them.

        Users' logits processors and thinking budgets read them on the host.
        """
        holder = batch.sampling_metadata.thinking_budget_state_holder
        return (
            batch.sampled_token_ids_cpu is not None
            and batch.prev_sampled_token_ids is not None
            and bool(batch.sampling_metadata.output_token_ids)
            and not batch.logitsprocs_need_output_token_ids
            and (holder is None or not holder.has_tracked_requests())
        )

    def forget(self) -> None:
        """Call it after a step that was not recorded here."""
        self._older = None

    def settle(self, batch: Any) -> NewestTokens:
        """Writes older steps' tokens into `output_token_ids` of vLLM's input batch.

        Leaves a placeholder at the end for each token of the newest step, and returns those tokens.
        """
        rows = dict(batch.prev_req_id_to_index)
        older, self._older = (
            self._older,
            _Step(batch.sampled_token_ids_cpu, batch.async_copy_ready_event, rows),
        )
        if older is not None:
            self._fill(older, batch, rows)
        previous = [rows.get(request) for request in batch.req_ids]
        index = torch.tensor([row or 0 for row in previous], dtype=torch.int64, pin_memory=True)
        sampled = batch.prev_sampled_token_ids[:, 0]
        tokens = sampled.index_select(0, index.to(sampled.device, non_blocking=True))
        outputs = batch.sampling_metadata.output_token_ids
        known = [
            row is not None and bool(output) and output[-1] == PLACEHOLDER
            for row, output in zip(previous, outputs, strict=True)
        ]
        return NewestTokens(tokens, known)

    def _fill(self, older: _Step, batch: Any, newest_rows: dict[str, int]) -> None:
        tokens: list[list[int]] | None = None
        for request, output in zip(
            batch.req_ids, batch.sampling_metadata.output_token_ids, strict=True
        ):
            row = older.rows.get(request)
            place = len(output) - 1 - (request in newest_rows)
            if row is None or place < 0 or output[place] != PLACEHOLDER:
                continue
            if tokens is None:
                if not older.copied.query():
                    older.copied.synchronize()
                tokens = older.tokens.tolist()
            output[place] = tokens[row][0]
