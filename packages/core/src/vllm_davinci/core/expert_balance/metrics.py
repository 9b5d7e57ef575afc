"""Exports the experts' balance to the server's metrics endpoint."""

from vllm.config import VllmConfig

from vllm_davinci.core.components.worker_metrics import MetricsFile
from vllm_davinci.core.expert_balance.imbalance import Imbalance

# Not "vllm:...": vLLM unregisters metrics with its name when an engine starts.
IMBALANCE = "davinci:expert_imbalance"
IMBALANCE_HELP = (
    "Largest load of a rank over the mean, before and after the newest decision, same tokens."
)
MOVES = "davinci:expert_moves"
MOVES_HELP = "Expert slots that got another expert."


class BalanceWriter:
    """A worker's writer. Does nothing while no server reads."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._gauges = MetricsFile(vllm_config, "gauge_mostrecent_eplb")
        self._counters = MetricsFile(vllm_config, "counter_eplb")

    def __call__(self, imbalance: Imbalance, num_moved: int) -> None:
        """Writes the newest values. num_moved: since the start"""
        if self._gauges.is_read():
            for when, value in imbalance._asdict().items():
                self._gauges.write(IMBALANCE, IMBALANCE, {"when": when}, value, IMBALANCE_HELP)
        if self._counters.is_read():
            self._counters.write(MOVES, f"{MOVES}_total", {}, num_moved, MOVES_HELP)
