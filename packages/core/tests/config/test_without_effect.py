"""Options that do nothing more than happens anyway: accepted with a note, or refused."""

from typing import Any

import pytest
from vllm.config import VllmConfig

from vllm_davinci.core.config.parsing import parse_config
from vllm_davinci.core.config.without_effect import check_effects
from vllm_davinci.core.errors import ConfigurationError

SUPER_KERNEL = {"enabled": True, "enable_multistream_moe": True, "enable_super_kernel": True}


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({}, None),
        ({"torchair_graph_config": SUPER_KERNEL}, "the host launches a captured step as a whole"),
        ({"torchair_graph_config": {"enable_view_optimize": False}}, "nothing is compiled"),
        ({"enable_prefill_optimizations": True}, "are always used"),
        ({"enable_cpu_binding": True}, None),
        ({"lmhead_tp_size": 1}, None),
        ({"lmhead_tp_size": -1}, None),
    ],
)
def test_what_does_nothing_is_told(
    options: dict[str, Any], note: str | None, vllm_config: VllmConfig
):
    told = check_effects(vllm_config, parse_config(options), {})
    assert told == [] if note is None else note in told[0]


def test_torch_npu_s_own_binding_wins(vllm_config: VllmConfig):
    config = parse_config({"enable_cpu_binding": True})
    (note,) = check_effects(vllm_config, config, {"CPU_AFFINITY_CONF": "1"})
    assert "CPU_AFFINITY_CONF=1 lets torch_npu bind threads" in note


def test_another_size_of_the_head_s_group_is_refused_with_those_that_work(vllm_config: VllmConfig):
    vllm_config.parallel_config.tensor_parallel_size = 4
    with pytest.raises(ConfigurationError, match=r"'lmhead_tp_size' = 2; .* Use -1 or 4\."):
        check_effects(vllm_config, parse_config({"lmhead_tp_size": 2}))
