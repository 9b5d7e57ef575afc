"""A chip is a file: the device's table has a row for each file in `chips/`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_davinci.vnpu.timing.chip_files import FOLDER
from vllm_davinci_testing.processes.programs import run_to_end

LIMIT_S = 120
PACKAGE = Path(__file__).parents[2]
PROGRAM = """
#include <cstdio>
#include "device/chip.h"

int main() {
  for (const char* soc : {"Ascend910B2", "Ascend960_1", "Ascend310B4"}) {
    const vnpu::Chip& chip = vnpu::chip_of(soc);
    std::printf("%s %u %d %d\\n", chip.name, chip.cube_cores, chip.streams, chip.events);
  }
}
"""
ADDED = """
based_on = "ascend910b2"
soc = "Ascend960_1"
soc_prefix = "Ascend960"
generation = "other"

[figures]
cube_cores = { value = 36, unit = "cores", source = "assumed" }
"""


def generate(folder: Path, output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PACKAGE / "cmake" / "generate_chips.py"), str(output)]
    return run_to_end([*command, str(folder)], LIMIT_S)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_file_that_is_added_is_a_chip(tmp_path: Path) -> None:
    folder = tmp_path / "chips"
    shutil.copytree(FOLDER, folder)
    (folder / "ascend960.toml").write_text(ADDED)
    assert generate(folder, tmp_path / "device" / "chips.inc").returncode == 0
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(PROGRAM)
    csrc = PACKAGE / "csrc"
    subprocess.run(
        [
            *("g++", "-std=c++20", f"-I{csrc}", f"-I{tmp_path}"),
            *(str(source), str(csrc / "device" / "chip.cpp"), "-o", str(program)),
        ],
        check=True,
        timeout=LIMIT_S,
    )
    done = run_to_end([str(program)], LIMIT_S)
    assert done.stdout.splitlines() == [
        "ascend910b2 24 1984 65536",
        "ascend960 36 1984 65536",
        "ascend310b 1 512 65536",
    ]


def test_a_file_that_lacks_a_figure_ends_the_build(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "ascend310p.toml"
    file.write_text(file.read_text().replace("\nstreams", "\n# streams"))
    done = generate(tmp_path, tmp_path / "chips.inc")
    assert done.returncode != 0
    assert "ascend310p.toml: KeyError('streams')" in done.stderr
