"""Tags compiled wheels with the oldest Linux that they support. Run by `nox -s build`.

A built wheel is tagged `linux_x86_64`, which no index accepts. auditwheel finds the policy (such as
manylinux_2_34) with all C and C++ symbols that the wheel uses. It does not copy the libraries of
torch and torch_npu, which come from their own wheels.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

# Libraries from the installed wheels of torch and torch_npu.
FROM_OTHER_WHEELS = ("libtorch*.so", "libc10.so", "libtorch_npu.so", "libgomp*.so*")
LIMIT_S = 600
OTHER_PROCESSORS = (
    "wheels for aarch64: run `nox -s build` on an aarch64 machine, or in a container of one, "
    "with this glibc or an older one; wheels are compiled for this machine's processor only"
)


def repair(wheel: Path, auditwheel: Path) -> Path:
    """Replaces a wheel by one with its policy's tag. Raises CalledProcessError."""
    excluded = [option for name in FROM_OTHER_WHEELS for option in ("--exclude", name)]
    with tempfile.TemporaryDirectory(dir=wheel.parent) as scratch:
        command = [auditwheel, "repair", *excluded, "--wheel-dir", scratch, wheel]
        subprocess.run([str(part) for part in command], check=True, timeout=LIMIT_S)
        (repaired,) = Path(scratch).glob("*.whl")
        wheel.unlink()
        return repaired.rename(wheel.with_name(repaired.name))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="folder with the wheels")
    auditwheel = Path(sys.executable).with_name("auditwheel")
    for wheel in sorted(parser.parse_args().directory.glob("*-linux_*.whl")):
        try:
            print(f"{wheel.name} -> {repair(wheel, auditwheel).name}", flush=True)
        except subprocess.CalledProcessError as error:
            print(f"{wheel.name}: auditwheel failed with status {error.returncode}, see above.")
            return 1
    print(OTHER_PROCESSORS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
