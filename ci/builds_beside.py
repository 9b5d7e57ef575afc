"""Runs C++ builds and first imports while other steps download and install packages."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import wheel_cache
from progress import StepFailedError, Steps, StepsBeside

IMPORT_LIMIT_S = 600.0


class Builds:
    """Builds wheels of compiled packages one after another, because one build uses every core."""

    def __init__(self, packages: list[Path], python: Path, log_directory: Path) -> None:
        self.wheels: dict[str, Future[Path]] = {}
        self._packages = packages
        self._python = python
        self._pool = ThreadPoolExecutor(1)
        self._steps = {each: StepsBeside(f"build-{each.name}", log_directory) for each in packages}

    def begin_without_torch(self) -> None:
        """Compiles code that does not need torch's headers."""
        for package in self._packages:
            steps = self._steps[package]
            self._pool.submit(wheel_cache.compile_without_torch, package, self._python, steps)

    def begin(self) -> None:
        """Builds the wheels; call this when torch is installed."""
        for package in self._packages:
            steps = self._steps[package]
            self.wheels[package.name] = self._pool.submit(
                wheel_cache.compiled_wheel, package, self._python, steps
            )

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for each in self._steps.values():
            each.stop()

    def wait(self) -> None:
        self._pool.shutdown()


@contextmanager
def builds_beside(packages: Iterable[Path], python: Path, log_directory: Path) -> Iterator[Builds]:
    """Builds in the background of the caller's steps; the caller's error stops the builds."""
    builds = Builds(list(packages), python, log_directory)
    try:
        yield builds
    except BaseException:
        builds.stop()
        raise
    finally:
        builds.wait()


@contextmanager
def run_beside(
    command: list[str | Path], environment: dict[str, str], log_directory: Path, is_wanted: bool
) -> Iterator[None]:
    """Runs a command in the background of the caller's steps and ignores its failure."""
    steps = StepsBeside("imports", log_directory)

    def run(steps: Steps) -> None:
        with suppress(StepFailedError):
            steps.run(command, limit_s=IMPORT_LIMIT_S, environment=environment)

    pool = ThreadPoolExecutor(1)
    if is_wanted:
        pool.submit(run, steps)
    try:
        yield
    finally:
        steps.stop()
        pool.shutdown()
