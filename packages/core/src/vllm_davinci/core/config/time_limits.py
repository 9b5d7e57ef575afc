"""Timeouts of ranks that wait for each other in a step: inner waits are shorter.

vLLM times out a step after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS without naming the late rank. Inner
waits can name it, so each gets a fraction of that timeout, and one setting scales all.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import vllm.envs as envs

from vllm_davinci.core import components
from vllm_davinci.core.config.environment_variables import HCCL_LIMIT

STEP_LIMIT = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
COLLECTIVE_LIMIT = HCCL_LIMIT.key
# End of every timeout error.
LONGER_WAIT = f"A longer wait: {STEP_LIMIT}=SECONDS."


@dataclass(frozen=True)
class StepLimits:
    """Timeouts within a step.

    step: of vLLM's executor for a worker's reply
    """

    step: timedelta

    @classmethod
    def of_environment(cls) -> "StepLimits":
        return cls(timedelta(seconds=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS))

    @property
    def collective(self) -> timedelta:
        """Timeout of a collective that waits for other ranks, in whole seconds, as in HCCL."""
        return timedelta(seconds=max(1, int(self.step.total_seconds() * 0.6)))

    @property
    def row_counts(self) -> timedelta:
        """Timeout of the host for row counts from a collective."""
        return self.step * 0.7

    @property
    def stopped_process(self) -> timedelta:
        """Timeout of a call that waits for a rank whose process is stopped."""
        return self.step * 0.7

    @property
    def coordination(self) -> timedelta:
        """Timeout of the host for other hosts, which may be in one of the waits above."""
        return self.step * 0.8

    @property
    def device(self) -> timedelta:
        """Timeout of the host for all outstanding work of a device."""
        return self.step * 0.9


def limit_device_waits(environment: MutableMapping[str, str]) -> list[str]:
    """Sets the device's timeouts if unset; returns a warning if HCCL's is not below vLLM's.

    Call it before groups are made; child processes inherit the timeout.
    """
    limits = StepLimits.of_environment()
    components.limit_host_waits(limits.device.total_seconds())
    asked = environment.setdefault(COLLECTIVE_LIMIT, str(int(limits.collective.total_seconds())))
    step_s = int(limits.step.total_seconds())
    if asked.isdecimal() and 0 < int(asked) < step_s:
        return []
    late = (
        f"Set {COLLECTIVE_LIMIT} ({asked}) below {STEP_LIMIT} ({step_s}), or leave it out: "
        "otherwise vLLM times out before HCCL can name the late rank."
    )
    return [late]
