"""Kernels beyond a chip's limits are refused on request, or listed by `vnpu triton-check`."""

import os
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from vllm_davinci.vnpu.__main__ import main
from vllm_davinci.vnpu.environment_variables import VNPU_TRITON_LIMITS

PROGRAM = Path(__file__).with_name("programs") / "beyond_a_chip.py"


@triton.jit
def wide_kernel(x_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(x_ptr + lanes, tl.load(x_ptr + lanes) + 1.0)


@triton.jit
def double_kernel(x_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(x_ptr + lanes, tl.load(x_ptr + lanes).to(tl.float64) / 3)


@triton.jit
def product_kernel(x_ptr, N: tl.constexpr):
    places = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + places).to(tl.float8e5)
    tl.store(x_ptr + places, tl.dot(x, x))


def launch(kind: str) -> None:
    if kind == "wide":
        wide_kernel[(1,)](torch.zeros(65536).npu(), BLOCK=65536)
    elif kind == "narrow":
        wide_kernel[(1,)](torch.zeros(16384).npu(), BLOCK=16384)
    elif kind == "double":
        double_kernel[(1,)](torch.zeros(64).npu(), BLOCK=64)
    elif kind == "grid":
        wide_kernel[(70000,)](torch.zeros(64).npu(), BLOCK=64)
    else:
        product_kernel[(1,)](torch.zeros(16, 16).npu(), N=16)


REFUSED = {
    "wide": "ub overflow: a tensor of 2097152 bits, and a vector core has 1572864",
    "double": "float64, which a chip does not compute",
    "grid": "launch: a grid of 70000 programs; a chip starts at most 65535",
    "product": "tt.dot of f8E5M2; a chip takes i8, f16, bf16, f32",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_kernel_beyond_a_chips_limits_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VNPU_TRITON_LIMITS, "raise")
    with pytest.raises(NotImplementedError, match=REFUSED[kind]) as refused:
        launch(kind)
    assert "Triton kernel" in str(refused.value)
    if kind != "grid":
        assert f"{Path(__file__).name}:" in str(refused.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_without_the_option_it_runs(kind: str):
    launch(kind)
    torch.npu.synchronize()


def test_a_kernel_within_the_limits_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VNPU_TRITON_LIMITS, "raise")
    launch("narrow")
    torch.npu.synchronize()


def test_a_grid_that_the_chip_walks_in_parts_is_allowed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VNPU_TRITON_LIMITS, "raise")
    monkeypatch.setenv("TRITON_ALL_BLOCKS_PARALLEL", "1")
    launch("grid")
    torch.npu.synchronize()


def test_the_command_lists_all_and_asks_tritons_checker(tmp_path, capfd):
    adapter = tmp_path / "triton-adapter-opt"
    adapter.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        "text = next(pathlib.Path(a).read_text() for a in sys.argv if a.endswith('.ttir'))\n"
        "sys.exit('k.py:1:1: error: no cosines' if 'math.cos' in text else 0)\n"
    )
    adapter.chmod(0o755)
    before = dict(os.environ)
    try:
        command = ["triton-check", "--adapter", str(adapter), "--", sys.executable, str(PROGRAM)]
        assert main(command) == 1
    finally:
        os.environ.clear()
        os.environ.update(before)
    errors = capfd.readouterr().err
    assert "ub overflow: a tensor of 2097152 bits" in errors and f"{PROGRAM}:" in errors
    assert "cosine_kernel  triton-adapter-opt\n    k.py:1:1: error: no cosines" in errors
    assert "in use at once, and a vector core has 1572864" in errors
    assert "3 Triton kernels checked: a chip's compiler refuses 2, and 1 may not fit" in errors


def test_the_command_needs_a_program_and_a_checker_that_exists(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["triton-check"])
    assert main(["triton-check", "--adapter", "/no/such", "--", "true"]) == 2
    assert "vnpu triton-check: --adapter /no/such is no program." in capsys.readouterr().err
