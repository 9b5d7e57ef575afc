"""A broken environment is reported before anything starts."""

import os
import sys
from pathlib import Path

import pytest

from vllm_davinci.vnpu import environment_variables as vnpu_environment
from vllm_davinci_testing.engines.ended_process import assert_explained, run_to_its_end
from vllm_davinci_testing.engines.server_process import VLLM

VNPU = str(Path(sys.executable).parent / "vnpu")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.txt"


def environment_without_vnpu() -> dict[str, str]:
    environment = dict(os.environ)
    for name in (
        vnpu_environment.VNPU_ACTIVE,
        vnpu_environment.ASCEND_HOME_PATH,
        vnpu_environment.ASCEND_OPP_PATH,
        vnpu_environment.LD_LIBRARY_PATH,
    ):
        environment.pop(name, None)
    return environment


def test_without_cann_and_vnpu_the_two_ways_out_are_named(tiny_llama: Path, log: Path):
    environment = environment_without_vnpu()
    ended = run_to_its_end(*VLLM, "serve", tiny_llama, log=log, environment=environment)
    assert_explained(ended, "libascendcl.so", "set_env.sh", "vnpu run --", "vllm-davinci doctor")
    assert "Traceback" not in ended.output


def test_vnpu_does_not_hide_a_real_cann(tmp_path: Path, log: Path):
    library = tmp_path / "ascend" / "lib64" / "libascendcl.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    environment = environment_without_vnpu()
    environment["ASCEND_HOME_PATH"] = str(library.parents[1])
    command = (sys.executable, "-c", "print('started')")
    ended = run_to_its_end(VNPU, "run", "--", *command, log=log, environment=environment)
    assert_explained(ended, str(library.parent), "without `vnpu run`", "--takeover")
    assert "started" not in ended.output
    taken_over = run_to_its_end(
        VNPU, "run", "--takeover", "--", *command, log=log, environment=environment
    )
    assert (taken_over.status, taken_over.output) == (0, "started\n")


@pytest.mark.nightly("faults")
@pytest.mark.parametrize(
    ("distribution", "version", "entry_points"),
    [
        ("torch", "2.12.1", ""),
        ("torch_npu", "2.12.0", "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"),
        ("vllm", "0.28.1", ""),
    ],
    ids=["torch", "torch_npu", "vllm"],
)
def test_another_version_is_named_with_the_supported_one(
    distribution: str, version: str, entry_points: str, tiny_llama: Path, tmp_path: Path, log: Path
):
    # Metadata that hides the installed version, as after upgrading one package.
    metadata = tmp_path / f"{distribution}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (metadata / "entry_points.txt").write_text(entry_points)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = run_to_its_end(*VLLM, "serve", tiny_llama, log=log, environment=environment)
    assert_explained(ended, f"{distribution} {version} is installed", "supports", "pip install")


@pytest.mark.nightly("faults")
def test_an_operator_that_vnpu_lacks_is_named_with_its_tier_and_how_to_add_it(log: Path):
    program = "import torch; torch.linalg.qr(torch.ones(2, 2).npu())"
    ended = run_to_its_end(sys.executable, "-c", program, log=log)
    assert_explained(ended, "Qr", "tier", "vnpu coverage", "add_an_operator")
