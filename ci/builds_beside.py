"""Wheels of compiled packages that are built while other steps download and install."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import wheel_cache
from progress import StepsBeside


@contextmanager
def builds_beside(
    packages: Iterable[Path], python: Path, log_directory: Path
) -> Iterator[dict[str, Future[Path]]]:
    """Wheels of the compiled packages, by name, which are built while the caller downloads.

    One package at a time, which keeps every core busy. An error of the caller's ends the build.
    """
    compiled = [package for package in packages if wheel_cache.is_compiled(package)]
    steps = {each.name: StepsBeside(f"build-{each.name}", log_directory) for each in compiled}
    pool = ThreadPoolExecutor(1)
    try:
        yield {
            each.name: pool.submit(wheel_cache.compiled_wheel, each, python, steps[each.name])
            for each in compiled
        }
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for each in steps.values():
            each.stop()
        raise
    finally:
        pool.shutdown()
