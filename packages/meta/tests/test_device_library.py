"""Messages if torch_npu cannot start."""

from pathlib import Path

import pytest


def test_importing_torch_without_cann_names_both_remedies_and_no_traceback(run_without_device):
    done = run_without_device("-c", "import torch")
    assert done.returncode == 1
    assert "source /usr/local/Ascend/ascend-toolkit/set_env.sh" in done.stderr
    assert "vnpu run -- python -c 'import torch'" in done.stderr
    assert "libascendcl.so" in done.stderr
    assert "Traceback" not in done.stderr


def test_importing_torch_npu_directly_gets_the_same_explanation(run_without_device):
    done = run_without_device("-c", "import torch_npu", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 1
    assert "vnpu run --" in done.stderr
    assert "Traceback" not in done.stderr


def test_torch_without_its_device_stays_usable(run_without_device):
    done = run_without_device(
        "-c", "import torch; print(torch.ones(2).sum().item())", TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert done.stdout.strip() == "2.0", done.stderr


def test_looking_for_torch_npu_without_importing_it_is_allowed(run_without_device):
    done = run_without_device(
        "-c", "import importlib.util as u; print(u.find_spec('torch_npu').name)"
    )
    assert done.stdout.strip() == "torch_npu", done.stderr


def test_an_interactive_session_gets_an_exception_it_can_survive(run_without_device):
    done = run_without_device("-i", "-c", "import torch_npu", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "DeviceLibraryError" in done.stderr
    assert "vnpu run --" in done.stderr


def test_a_library_that_does_not_load_is_distinguished_from_a_missing_one(
    run_without_device, tmp_path: Path
):
    (tmp_path / "libascendcl.so").write_bytes(b"")
    done = run_without_device("-c", "import torch", LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 1
    assert "was found and does not load" in done.stderr
    assert "npu-smi info" in done.stderr


@pytest.mark.parametrize(("distribution", "seen"), [("torch", "2.12.1"), ("torch_npu", "2.9.0")])
def test_another_version_is_named_with_the_supported_one(
    run_without_device, pretend_version, distribution: str, seen: str
):
    path = pretend_version(distribution, seen)
    done = run_without_device("-c", "import torch_npu", PYTHONPATH=path)
    assert done.returncode == 1
    assert f"{distribution} {seen} is installed" in done.stderr
    assert "supports 2.13.0" in done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_start_up_imports_one_small_module(run_without_device):
    program = "import sys; print(*[n for n in sys.modules if n.startswith('vllm')])"
    done = run_without_device("-c", program)
    assert done.stdout.split() == ["vllm_davinci_import_hooks"]
