"""Creates an environment with the real ModelSlim, once, beside the wheel cache.

ModelSlim needs an older transformers than vLLM, so the environment has none of our packages: our
environment's `vnpu run` starts its Python, and its torch_npu finds the virtual NPU's libraries.
"""

import shutil
import sys
from pathlib import Path

import versions
import wheel_cache
from progress import Steps

VERSION = "26.1.0"
# The newest release that this version of ModelSlim supports.
TRANSFORMERS_VERSION = "4.51.3"
INSTALL_LIMIT_S = 1800.0
NUM_STEPS = 2


def directory() -> Path:
    tag = sys.implementation.cache_tag
    return wheel_cache.cache_directory().parent / f"msmodelslim-{VERSION}-{tag}"


def prepare(steps: Steps) -> Path:
    """Returns the environment's Python; installs it on first use (about 2 GB, minutes)."""
    place = directory()
    python, finished = place / "bin" / "python", place / "finished"
    steps.start(f"environment of ModelSlim {VERSION} in {place}")
    if not finished.exists():
        shutil.rmtree(place, ignore_errors=True)
        steps.run([sys.executable, "-m", "venv", place], limit_s=120)
    steps.start(f"ModelSlim {VERSION}, transformers {TRANSFORMERS_VERSION}")
    if not finished.exists():
        packages = (
            f"torch=={versions.TORCH_VERSION}",
            f"torch-npu=={versions.TORCH_NPU_VERSION}",
            f"transformers=={TRANSFORMERS_VERSION}",
            f"msmodelslim=={VERSION}",
        )
        steps.run([python, "-m", "pip", "install", "--quiet", *packages], limit_s=INSTALL_LIMIT_S)
        finished.touch()
    return python
