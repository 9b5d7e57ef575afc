"""Which versions are accepted."""

from __future__ import annotations

import pytest

from vllm_davinci.meta.supported_versions import TORCH, VLLM, installed_version, problem_with


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.0+cu130"])
def test_local_parts_of_torch_do_not_count(version: str):
    assert TORCH.accepts(version)


@pytest.mark.parametrize("version", ["2.13.1", "2.12.0", "2.13", "12.13.0", "2.13.0rc1"])
def test_other_releases_of_torch_are_refused(version: str):
    assert not TORCH.accepts(version)


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("0.29.0", True), ("0.29.3+empty", True), ("0.30.0", False), ("0.2.9", False)],
)
def test_every_patch_release_of_one_vllm_minor_is_accepted(version: str, accepted: bool):
    assert VLLM.accepts(version) is accepted


def test_a_distribution_that_is_absent_has_no_version():
    assert installed_version("a-distribution-nobody-has") is None


def test_the_supported_set_is_installed_here():
    assert problem_with(TORCH) is None
    assert problem_with(VLLM) is None
