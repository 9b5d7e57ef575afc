"""Alignment of cuts between ubatches."""

import pytest
from vllm.config import VllmConfig

from vllm_davinci.core.config.parsing import get_config, parse_config
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.dual_batch import settle
from vllm_davinci.core.features.feature import Engine


def test_an_alignment_is_for_cuts_inside_requests():
    with pytest.raises(ConfigurationError, match=r"dbo\.split is 'request'"):
        parse_config({"dbo": {"token_alignment": 16}})
    parse_config({"dbo": {"token_alignment": 16, "split": "token"}})


def test_an_alignment_that_forbids_every_cut_is_refused(vllm_config: VllmConfig):
    vllm_config.scheduler_config.max_num_batched_tokens = 512
    for alignment, is_refused in ((256, False), (257, True)):
        vllm_config.additional_config = {
            "dbo": {"enabled": True, "split": "token", "token_alignment": alignment}
        }
        engine = Engine(vllm_config, get_config(vllm_config))
        if is_refused:
            with pytest.raises(ConfigurationError, match="257 is too large: steps of at most 512"):
                settle(engine)
        else:
            settle(engine)
