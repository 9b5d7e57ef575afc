"""Accepted and refused versions."""

import sys
from dataclasses import replace

import pytest

from vllm_davinci.meta import supported_versions
from vllm_davinci.meta.supported_versions import (
    ACCEPTED_VLLM,
    TORCH,
    TORCH_NPU,
    VLLM,
    installed_version,
    problem_with,
)


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.14.0+cpu"])
def test_local_parts_of_torch_do_not_count(version: str):
    assert TORCH.accepts(version)


@pytest.mark.parametrize(
    "version", ["2.13.1", "2.12.0", "2.13", "2.14.1", "2.15.0", "12.13.0", "2.13.0rc1"]
)
def test_other_releases_of_torch_are_refused(version: str):
    assert not TORCH.accepts(version)


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("0.33.0", True), ("0.33.3+empty", True), ("0.34.0", False), ("0.2.9", False)],
)
def test_every_patch_release_of_one_vllm_minor_is_accepted(version: str, accepted: bool):
    assert VLLM.accepts(version) is accepted


def test_a_distribution_that_is_absent_has_no_version():
    assert installed_version("a-distribution-nobody-has") is None


def test_torch_npu_of_another_release_than_torch_is_refused(monkeypatch: pytest.MonkeyPatch):
    installed = {"torch": "2.14.0+cpu", "torch_npu": "2.13.0"}
    monkeypatch.setattr(supported_versions, "installed_version", installed.get)
    assert problem_with(TORCH) is None
    problem = problem_with(TORCH_NPU)
    assert problem is not None
    assert problem.endswith("Run: pip install torch-npu==2.14.0")
    installed["torch_npu"] = "2.14.0"
    assert problem_with(TORCH_NPU) is None


def test_a_build_of_torch_for_cuda_is_refused_beside_torch_npu_2_14(monkeypatch, tmp_path):
    installed = {"torch": "2.13.0", "torch_npu": "2.13.0"}
    monkeypatch.setattr(supported_versions, "installed_version", installed.get)
    for file in ("__init__.py", "lib/libc10_cuda.so"):
        (tmp_path / "torch" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "torch" / file).touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert problem_with(TORCH_NPU) is None
    installed.update(torch="2.14.0", torch_npu="2.14.0")
    assert "Install torch 2.14.0 for the CPU" in (problem_with(TORCH_NPU) or "")


def test_the_supported_set_is_installed_here():
    assert problem_with(TORCH) is None
    assert problem_with(VLLM) is None


def test_another_vllm_is_accepted_only_where_it_is_named_exactly(monkeypatch: pytest.MonkeyPatch):
    older = replace(VLLM, version="0.28.0")
    monkeypatch.setattr(supported_versions, "VLLM", older)
    installed = installed_version("vllm")
    assert installed is not None
    assert "this release of vllm-davinci supports 0.28.x" in (problem_with(older) or "")
    monkeypatch.setenv(ACCEPTED_VLLM, "0.28.0")
    assert problem_with(older) is not None
    monkeypatch.setenv(ACCEPTED_VLLM, installed)
    assert problem_with(older) is None
    # Another vLLM may be accepted, but never another torch.
    assert problem_with(replace(TORCH, version="2.12.0")) is not None
