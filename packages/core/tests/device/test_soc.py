"""The table of chips."""

import pytest
import torch

from vllm_davinci.core.device.soc import SOCS, UNKNOWN, soc_of


@pytest.mark.parametrize("soc", SOCS, ids=lambda soc: soc.name)
def test_a_chip_is_found_by_its_own_name(soc):
    assert soc_of(soc.name) is soc


@pytest.mark.parametrize(
    ("reported", "row"),
    [
        ("Ascend910B3", "Ascend910B3"),
        ("Ascend910_9391", "Ascend910_93"),
        ("Ascend910A", "Ascend910"),
        ("Ascend310P3", "Ascend310P"),
    ],
)
def test_the_longest_matching_name_wins(reported: str, row: str):
    assert soc_of(reported).name == row


def test_an_unknown_chip_counts_as_newer():
    assert soc_of("Ascend9999") is UNKNOWN
    assert torch.bfloat16 in UNKNOWN.dtypes


def test_chips_of_the_first_generation_have_no_bfloat16():
    assert torch.bfloat16 not in soc_of("Ascend310P3").dtypes
    assert torch.bfloat16 not in soc_of("Ascend910A").dtypes
