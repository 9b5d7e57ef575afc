"""Decisions for hypothetical steps, with reasons."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_davinci.core.config.options import DualBatchConfig
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.ubatch.explanation import EXPLANATIONS, OPTIONS, explain_step
from vllm_davinci.multistream import Reason


def engine(ranks: int = 2, **dbo: Any) -> Any:
    return SimpleNamespace(
        additional_config={"dbo": {"enabled": True, **dbo}},
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, data_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=16),
    )


@pytest.mark.parametrize(
    ("engine", "query_lens", "reason"),
    [
        (engine(), [512] * 4, "split"),
        (engine(enabled=False), [512] * 4, "disabled"),
        (engine(ranks=1), [512] * 4, "no_communication"),
        (engine(), [128, 127], "few_tokens"),
        (engine(), [200, 100], "no_cut"),
        (engine(split="token"), [200, 100], "split"),
        (engine(), [1] * 16, "no_prefill"),
        (engine(decode=True), [1] * 16, "few_decode_tokens"),
        (engine(min_prefill_tokens_to_split=301), [200, 100], "few_prefill_tokens"),
    ],
)
def test_a_described_step_is_decided_by_the_engine_s_own_policy(engine, query_lens, reason):
    found = explain_step(engine, query_lens)
    assert found.reason == reason
    assert sum(found.part_tokens) == sum(query_lens)
    assert len(found.part_tokens) == (2 if reason == "split" else 1)
    assert set(found.options) == {f"dbo.{name}" for name in OPTIONS.get(reason, ())}


def test_a_request_that_cannot_be_cut_keeps_its_step_whole():
    assert explain_step(engine(), [512] * 4, is_supported=False).reason == "unsupported"


@pytest.mark.parametrize(
    ("query_lens", "message"),
    [
        ([], "at least one request"),
        ([4, 0], "at least one token"),
        ([2048, 1], "--max-num-batched-tokens is 2048"),
        ([1] * 17, "--max-num-seqs is 16"),
    ],
)
def test_a_step_that_the_engine_never_runs_is_refused(query_lens: list[int], message: str):
    with pytest.raises(ConfigurationError, match=message):
        explain_step(engine(), query_lens)


def test_every_reason_has_an_explanation_that_names_existing_options():
    assert set(EXPLANATIONS) == {reason.name.lower() for reason in Reason}
    fields = set(DualBatchConfig.model_fields)
    for explanation in EXPLANATIONS.values():
        assert set(re.findall(r"dbo\.(\w+)", explanation.change)) <= fields
    assert {name for names in OPTIONS.values() for name in names} <= fields


def test_a_step_has_its_time_by_each_schedule(tmp_path: Path):
    def by_method(**durations: int) -> dict[str, int]:
        return {name: ms * 10**9 for name, ms in durations.items()}

    split = {"all_gather": 30 * 10**9, "fused": 8 * 10**9}
    steps = [
        {"tokens": size, "by_method": {"whole": by_method(all_gather=10), "split": split}}
        for size in (256, 1024)
    ]
    decodes = [{"tokens": size, "by_method": by_method(all_gather=3, fused=2)} for size in (1, 9)]
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"steps": steps, "decodes": decodes}))
    decided = engine(split="token")
    decided.additional_config["step_costs"] = str(file)
    found = explain_step(decided, [512, 100])
    assert found.reason == "split"
    assert found.durations == {"split, fused": 8.0, "whole, all_gather": 10.0,
                               "split, all_gather": 30.0}  # fmt: skip
    assert explain_step(decided, [1] * 4).durations == {"whole, fused": 2.0,
                                                        "whole, all_gather": 3.0}  # fmt: skip
    decided.additional_config["moe_communication"] = "all_gather"
    assert explain_step(decided, [512, 100]).reason == "no_gain"
    assert explain_step(engine(), [512] * 4).durations == {}
