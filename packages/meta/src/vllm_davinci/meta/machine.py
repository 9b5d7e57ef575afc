"""Facts about the machine and its settings for a report."""

import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_davinci.meta.report import Check, Status
from vllm_davinci.meta.supported_versions import installed_version

# Prefixes of environment variables that affect a run.
PREFIXES = ("ASCEND_", "CPU_AFFINITY", "DAVINCI_", "HCCL_", "HF_HUB_OFFLINE", "LD_LIBRARY_PATH",
            "LD_PRELOAD", "OMP_", "PYTORCH_NPU_", "TASK_QUEUE_", "TORCH_DEVICE_", "VLLM_",
            "VNPU_")  # fmt: skip
SECRETS = ("KEY", "PASSWORD", "SECRET", "TOKEN")
OTHER_DISTRIBUTIONS = ("transformers", "numpy", "triton-ascend", "compressed-tensors")
DRIVER_VERSION = Path("/usr/local/Ascend/driver/version.info")


def machine_checks(environ: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Yields one check per fact."""
    area = "machine"
    yield Check(area, "system", Status.OK, f"{_system()}, kernel {platform.release()}")
    yield Check(area, "processor", Status.OK, f"{_processor()}, {platform.machine()}")
    cores, usable = os.cpu_count(), len(os.sched_getaffinity(0))
    yield Check(area, "cores", Status.OK, f"{usable} of {cores} for this process")
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Check(area, "memory", Status.OK, f"{gib:.1f} GiB")
    if DRIVER_VERSION.is_file():
        text = DRIVER_VERSION.read_text(encoding="utf-8", errors="replace").split()
        yield Check(area, "NPU driver", Status.OK, " ".join(text[:4]))
    for distribution in OTHER_DISTRIBUTIONS:
        if (version := installed_version(distribution)) is not None:
            yield Check(area, distribution, Status.OK, version)
    for name in sorted(environ):
        if name.startswith(PREFIXES):
            hidden = any(word in name.split("_") for word in SECRETS)
            yield Check("variables", name, Status.OK, "(hidden)" if hidden else environ[name])


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else "unknown"
