"""The scripts behind the tasks: what outdates a wheel or an environment, and their errors."""

import json
import os
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(autouse=True)
def _scripts_on_the_path(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "ci"))


@pytest.fixture
def wheel_cache() -> ModuleType:
    return import_module("wheel_cache")


@pytest.fixture
def progress() -> ModuleType:
    return import_module("progress")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    directory = tmp_path / "kernel_package"
    for name in ("csrc/add.cpp", "src/package/__init__.py", "tests/test_add.py", "pyproject.toml"):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return directory


@pytest.mark.parametrize("name", ["csrc/add.cpp", "src/package/__init__.py", "pyproject.toml"])
def test_a_changed_source_asks_for_another_wheel(wheel_cache, package: Path, name: str):
    before = wheel_cache.compiled_package_key(package)
    (package / name).write_text("changed")
    assert wheel_cache.compiled_package_key(package) != before


def test_tests_and_build_output_do_not_ask_for_another_wheel(wheel_cache, package: Path):
    before = wheel_cache.compiled_package_key(package)
    (package / "tests" / "test_add.py").write_text("changed")
    (package / "build").mkdir()
    (package / "build" / "add.cpp").write_text("generated")
    assert wheel_cache.compiled_package_key(package) == before


def test_the_cache_is_where_the_variable_says(wheel_cache, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("DAVINCI_WHEEL_CACHE", str(tmp_path / "wheels"))
    assert wheel_cache.cache_directory() == (tmp_path / "wheels").resolve()


def test_a_lock_that_stays_taken_is_an_error_that_names_what_it_waited_for(
    wheel_cache, progress, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(wheel_cache, "LOCK_LIMIT_S", 0.2)
    failures: list[str] = []

    def second() -> None:
        try:
            with wheel_cache.locked(tmp_path / "lock", "another build of vnpu"):
                failures.append("taken twice")
        except progress.StepFailedError as error:
            failures.append(str(error))

    with wheel_cache.locked(tmp_path / "lock", "nobody"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(timeout=30)
    (message,) = failures
    assert "another build of vnpu" in message
    assert str(tmp_path / "lock") in message


def test_a_failing_step_shows_its_last_lines_and_where_the_rest_is(progress, tmp_path: Path):
    steps = progress.Steps(1, tmp_path)
    steps.start("a step")
    program = "import sys; print('the cause'); sys.exit(3)"
    with pytest.raises(progress.StepFailedError, match="the cause") as caught:
        steps.run([sys.executable, "-c", program], limit_s=60)
    assert "status 3" in str(caught.value)
    assert str(tmp_path / "step-1.log") in str(caught.value)


def test_a_step_past_its_limit_is_ended(progress, tmp_path: Path):
    steps = progress.Steps(1, tmp_path)
    steps.start("a step")
    with pytest.raises(progress.StepFailedError, match="ran past 1 s"):
        steps.run([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=1)


def test_a_step_without_a_limit_takes_as_long_as_it_says_something(progress, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_LIMIT_S", 2.0)
    steps = progress.Steps(1, tmp_path)
    steps.start("a step")
    steps.run(["sh", "-c", "for i in 1 2 3 4 5 6 7; do echo $i; sleep 0.5; done"])
    with pytest.raises(progress.StepFailedError, match="printed nothing for 2 s"):
        steps.run(["sleep", "60"])


def test_processes_of_a_step_end_with_it(progress, tmp_path: Path):
    steps = progress.Steps(1, tmp_path)
    steps.start("a step")
    begin = time.monotonic()
    with pytest.raises(progress.StepFailedError, match="ran past 2 s"):
        steps.run(["sh", "-c", "sleep 60 & wait"], limit_s=2)
    # The child keeps the output pipe open.
    assert time.monotonic() - begin < 30


def test_isolated_tests_past_their_limit_end_with_all_that_they_started(tmp_path: Path):
    isolated, progress = import_module("isolated_tests"), import_module("progress")
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    begin = time.monotonic()
    command = ["sh", "-c", "sleep 60 > alive & wait"]  # like a launcher and its pytest
    with pytest.raises(progress.StepFailedError, match="did not end within 2 s"):
        isolated.run_outside_checkout(command, tmp_path, 2)
    os.set_blocking(alive, True)
    assert os.read(alive, 1) == b""  # while the child lives, the other end is open
    os.close(alive)
    assert time.monotonic() - begin < 30


def test_a_build_beside_the_steps_ends_when_they_fail(progress, tmp_path: Path, monkeypatch):
    """Builds are awaited if nothing fails, and ended if a download fails."""
    beside = import_module("builds_beside")
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "CMakeLists.txt").write_text("")

    def build(package: Path, python: Path, steps: object) -> Path:
        steps.run(["sh", "-c", f"touch {tmp_path}/began; sleep 60"], limit_s=60)
        return package

    monkeypatch.setattr(beside.wheel_cache, "compiled_wheel", build)
    begin = time.monotonic()
    with (
        pytest.raises(progress.StepFailedError, match="no network"),
        beside.builds_beside([package], Path(sys.executable), tmp_path) as builds,
    ):
        builds.begin()
        while not (tmp_path / "began").is_file():
            assert time.monotonic() - begin < 30
            time.sleep(0.01)
        raise progress.StepFailedError("no network")
    assert time.monotonic() - begin < 30
    assert isinstance(builds.wheels["kernels"].exception(), progress.StepFailedError)


def test_a_command_that_starts_after_its_steps_were_stopped_is_ended(progress, tmp_path: Path):
    steps = progress.StepsBeside("build", tmp_path)
    steps.stop()
    with pytest.raises(progress.StepFailedError, match="ended with status -15"):
        steps.run(["sleep", "60"], limit_s=30)


def test_tools_that_are_added_to_an_environment_keep_its_torch(tmp_path: Path, monkeypatch):
    prepare = import_module("prepare_environment")
    directory = tmp_path / "serving"
    (directory / "bin").mkdir(parents=True)
    (directory / "bin" / "python").touch()
    present = {"requirements": prepare.requirements_fingerprint(prepare.versions.VLLM_VERSION)}
    (directory / prepare.STAMP).write_text(json.dumps(present))
    installed: list[str] = []

    class Installer:
        def __init__(self, *_: object) -> None:
            self.find_uv = list
            self.install = lambda *arguments: installed.extend(map(str, arguments))

    monkeypatch.setattr(prepare, "Installer", Installer)
    monkeypatch.setattr(prepare, "installed_projects", list)
    prepare.prepare(directory, groups=["test"], editable=False)
    assert f"torch=={prepare.versions.TORCH_VERSION}" in installed
    assert any(each.startswith("torchvision") for each in installed)


def test_a_wheel_that_is_built_beside_the_steps_is_handed_over(tmp_path: Path, monkeypatch):
    beside = import_module("builds_beside")
    (tmp_path / "CMakeLists.txt").write_text("")
    monkeypatch.setattr(beside.wheel_cache, "compiled_wheel", lambda package, *_: package)
    with beside.builds_beside([tmp_path], Path(sys.executable), tmp_path) as builds:
        builds.begin_without_torch()  # this package has no part that builds without torch
        builds.begin()
        assert builds.wheels[tmp_path.name].result(timeout=30) == tmp_path


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a `python` and a `uv` that record their arguments; uv fails."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, answer in (("python", "echo \"global.find-links='/wheels'\""), ("uv", "exit 1")):
        program = folder / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/asked\n{answer}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def test_pip_installs_what_uv_fails_to_install(progress, programs: Path, tmp_path: Path, capsys):
    installer = import_module("installer").Installer(
        programs / "python", progress.Steps(1, tmp_path / "logs")
    )
    installer.find_uv()
    installer.install("--force-reinstall", "one==1", "two")
    _, with_uv, with_pip = (tmp_path / "asked").read_text().splitlines()
    assert with_uv == (
        f"uv pip install --python {programs}/python --find-links=/wheels --reinstall one==1 two"
    )
    assert with_pip == (
        "python -m pip --disable-pip-version-check install --force-reinstall one==1 two"
    )
    assert "trying pip" in capsys.readouterr().out


def test_without_a_configured_place_torch_is_the_one_for_the_cpu(progress, programs, tmp_path):
    (programs / "python").write_text("#!/bin/sh\n")  # pip has no configuration
    (programs / "uv").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    installer = import_module("installer").Installer(
        programs / "python", progress.Steps(1, tmp_path / "logs")
    )
    installer.find_uv()
    installer.install_torch("torch==2.13.0")
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.endswith("--torch-backend=cpu torch==2.13.0")


def test_an_installation_that_fails_twice_shows_what_pip_says(progress, programs, tmp_path):
    installer = import_module("installer").Installer(
        programs / "python", progress.Steps(1, tmp_path / "logs")
    )
    installer.find_uv()
    (programs / "python").write_text("#!/bin/sh\necho no such release\nexit 1\n")
    with pytest.raises(progress.StepFailedError, match="no such release"):
        installer.install("one==1")


def test_uv_looks_where_pip_is_configured_to_look():
    sources = import_module("installer").sources_of(
        {
            "index-url": ["https://mirror/simple"],
            "extra-index-url": ["file:///disk/simple", "https://cpu/whl"],
            "find-links": ["/wheels"],
        }
    )
    assert sources == [
        "--default-index=https://mirror/simple", "--index=https://cpu/whl",
        "--index-strategy=unsafe-best-match", "--find-links=/wheels",
    ]  # fmt: skip


def test_a_lock_is_used_only_for_its_python_and_processor(repository, tmp_path):
    locked = import_module("installer").locked_requirements
    lock = tmp_path / "lock.txt"
    head = import_module("write_constraints").HEAD.format(python="3.11", processor="x86_64")
    lock.write_text(head)
    assert locked(lock, "3.11", "x86_64") == lock
    assert locked(lock, "3.11", "aarch64") is None
    assert locked(lock, "3.1", "x86_64") is None
    assert locked(tmp_path / "absent", "3.11", "x86_64") is None


def test_every_package_of_the_checkout_is_known_to_the_tasks(packages: list[Path]):
    known = import_module("prepare_environment").PACKAGES
    assert {package.name for package in packages} <= set(known)


def test_a_release_needs_a_heading_and_sources_need_a_new_version(tmp_path: Path):
    release_check = import_module("release_check")
    package = tmp_path / "core"
    (package / "src").mkdir(parents=True)
    (package / "src" / "module.py").write_text("VALUE = 1\n")
    (package / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.2.0"\n')
    (package / "CHANGELOG.md").write_text("## 0.1.0\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path)]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True, timeout=60)

    (problem,) = release_check.package_problems(package)
    assert "no heading `## 0.2.0`" in problem

    (package / "CHANGELOG.md").write_text("## 0.2.0\n\n- x\n")
    subprocess.run([*git, "tag", "core-v0.2.0"], check=True, timeout=60)
    assert release_check.package_problems(package) == []

    (package / "src" / "module.py").write_text("VALUE = 2\n")
    (problem,) = release_check.package_problems(package)
    assert "raise `version`" in problem


def test_a_directory_that_the_task_did_not_make_is_unchanged(progress, tmp_path: Path):
    prepare_environment = import_module("prepare_environment")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "precious").write_text("")
    with pytest.raises(progress.StepFailedError, match="was not made by this task"):
        prepare_environment.prepare(tmp_path / ".venv", groups=[], editable=True)
    assert (tmp_path / ".venv" / "precious").exists()


def test_processor_time_of_orphans_counts_and_a_slow_suite_is_reported():
    within_limit = import_module("within_limit")
    code = """
import os, sys, time
if os.fork() == 0 and os.fork() == 0:  # the second one's parent ends before it
    end = time.process_time() + 1.0
    while time.process_time() < end:
        pass
os._exit(3)
"""
    measure = f"import within_limit; print(*within_limit.run([{sys.executable!r}, '-c', {code!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", measure],
        cwd=Path(within_limit.__file__).parent,
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    status, _, core_seconds = done.stdout.split()
    assert status == "3"
    assert 1.0 < float(core_seconds) < 3.0
    is_kept, text = within_limit.verdict(900.0, 1800.0, 75)
    assert is_kept
    assert "15.0 min" in text and "30.0 core-minutes (limit: 75)" in text
    assert not within_limit.verdict(900.0, 75 * 60 + 1, 75)[0]


def test_a_copied_checkout_has_its_files_and_leads_to_its_environments(tmp_path: Path, monkeypatch):
    copy_checkout = import_module("copy_checkout")
    root = tmp_path / "repository"
    environment = root / ".nox" / "serving"
    environment.mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    (root / ".gitignore").write_text(".nox\nbuilt\n")
    for name in ("tracked", "untracked", "built"):
        (root / name).touch()
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "tracked"], cwd=root, check=True)
    monkeypatch.setattr(copy_checkout, "ROOT", root)
    for _ in range(2):
        copy_checkout.copy(tmp_path / "copy")
    found = sorted(path.name for path in (tmp_path / "copy").iterdir())
    assert found == [".gitignore", ".nox", "tracked", "untracked"]
    assert (tmp_path / "copy" / ".nox" / "serving" / "pyvenv.cfg").exists()


def test_an_editable_install_takes_a_kept_wheel_of_the_same_sources(
    wheel_cache: ModuleType, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DAVINCI_WHEEL_CACHE", str(tmp_path / "wheels"))
    assert wheel_cache.kept_wheel(package) is None
    key = f"{package.name}-{wheel_cache.compiled_package_key(package)}"
    wheel = tmp_path / "wheels" / key / "kernel_package-1-cp311-cp311-linux_x86_64.whl"
    wheel.parent.mkdir()
    wheel.touch()
    assert wheel_cache.kept_wheel(package) == wheel
    (package / "csrc" / "add.cpp").write_text("changed")
    assert wheel_cache.kept_wheel(package) is None
