"""How long ranks wait for each other in a step: the innermost wait is the shortest.

vLLM gives up a step after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS and cannot say who is late. What waits
inside it knows more, so that each limit is a share of that one, and one setting moves them all.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import vllm.envs as envs

from vllm_davinci.core import components
from vllm_davinci.core.config.environment_variables import HCCL_LIMIT

STEP_LIMIT = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
COLLECTIVE_LIMIT = HCCL_LIMIT.key
# What an error about a wait ends with.
LONGER_WAIT = f"A longer wait: {STEP_LIMIT}=SECONDS."


@dataclass(frozen=True)
class StepLimits:
    """Longest waits within a step.

    step: of vLLM's executor for the reply of a worker
    """

    step: timedelta

    @classmethod
    def of_environment(cls) -> "StepLimits":
        return cls(timedelta(seconds=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS))

    @property
    def collective(self) -> timedelta:
        """Limit of a collective for the other ranks, in whole seconds, as HCCL takes it."""
        return timedelta(seconds=max(1, int(self.step.total_seconds() * 0.6)))

    @property
    def row_counts(self) -> timedelta:
        """Limit of the host for counts that a collective brings."""
        return self.step * 0.7

    @property
    def stopped_process(self) -> timedelta:
        """How long a call may wait for a rank whose process is stopped."""
        return self.step * 0.7

    @property
    def coordination(self) -> timedelta:
        """Limit of the host for other ranks' hosts, which may be in one of the waits above."""
        return self.step * 0.8

    @property
    def device(self) -> timedelta:
        """Limit of the host for all that a device still has to do."""
        return self.step * 0.9


def limit_device_waits(environment: MutableMapping[str, str]) -> list[str]:
    """Sets the device's limits where nobody has; warnings about one of HCCL not below vLLM's.

    To be called before groups are made; processes that this one starts inherit the limit.
    """
    limits = StepLimits.of_environment()
    components.limit_host_waits(limits.device.total_seconds())
    asked = environment.setdefault(COLLECTIVE_LIMIT, str(int(limits.collective.total_seconds())))
    step_s = int(limits.step.total_seconds())
    if asked.isdecimal() and 0 < int(asked) < step_s:
        return []
    late = (
        f"{COLLECTIVE_LIMIT}={asked} is not below {STEP_LIMIT}={step_s}: where a rank is late, "
        f"vLLM gives up before HCCL can name it. Leave {COLLECTIVE_LIMIT} out, or raise "
        f"{STEP_LIMIT}."
    )
    return [late]
