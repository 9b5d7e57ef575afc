"""Time limits keep their order, whichever limit they are derived from."""

import os
from datetime import timedelta

import pytest

from vllm_davinci.core.config.time_limits import StepLimits, limit_device_waits


@pytest.mark.parametrize("step_s", [2, 30, 300, 7200])
def test_each_wait_is_shorter_than_the_one_around_it(step_s: int):
    limits = StepLimits(timedelta(seconds=step_s))
    inner_first = [
        limits.collective,
        limits.row_counts,
        limits.coordination,
        limits.device,
        limits.step,
    ]
    assert inner_first == sorted(set(inner_first))


def test_hccls_limit_follows_vllms_unless_it_is_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "100")
    monkeypatch.setenv("VNPU_WAIT_LIMIT", "")
    monkeypatch.delenv("VNPU_WAIT_LIMIT")
    environment: dict[str, str] = {}
    assert limit_device_waits(environment) == []
    assert environment == {"HCCL_EXEC_TIMEOUT": "60"}
    assert os.environ["VNPU_WAIT_LIMIT"] == "90.0"


@pytest.mark.parametrize(("asked", "is_told"), [("99", False), ("100", True), ("0", True)])
def test_an_hccl_limit_above_vllms_is_reported(asked, is_told, monkeypatch):
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "100")
    environment = {"HCCL_EXEC_TIMEOUT": asked}
    told = limit_device_waits(environment)
    assert environment == {"HCCL_EXEC_TIMEOUT": asked}
    assert bool(told) == is_told
    if told:
        assert (
            f"Set HCCL_EXEC_TIMEOUT ({asked}) below VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS" in told[0]
        )
