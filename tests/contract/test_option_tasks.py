"""An option, or another plugin's key, is one row of one file, as CONTRIBUTING.md says."""

from pathlib import Path

import pytest

from vllm_davinci_testing.processes.programs import copied, insert, said_in

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages" / "core" / "src" / "vllm_davinci" / "core"

OPTION = '''
    toy_limit_bytes: int = Field(default=7, gt=0)
    """Upper limit per toy, in bytes."""
'''
KEY = """
    Row("their_toy", bool, False, "Play with toys.", NoEffect("toys work")),
"""
PROGRAM = """
import importlib, json, sys
from vllm.config import DeviceConfig, VllmConfig
from vllm_davinci.core.config import other_keys, parsing, table
from vllm_davinci.core.features import report

sys.path.insert(0, sys.argv[1])
reference = importlib.import_module("generate_reference")
page = reference.configuration_page(table, other_keys.OTHER_KEYS)
properties = table.json_schema()["properties"]
asked = {"toy_limit_bytes": 9, "their_toy": True}
engine = VllmConfig(device_config=DeviceConfig(device="npu"), additional_config=asked)
try:
    error = parsing.parse_config({"toy_limit_byte": 9})
except ValueError as raised:
    error = str(raised)
print(json.dumps({
    "file": table.__file__,
    "page": [line for line in page.splitlines() if "toy" in line],
    "schema": {key: value for key, value in properties.items() if "toy" in key},
    "value": parsing.get_config(engine).toy_limit_bytes,
    "notes": list(parsing.given_options(asked).notes()),
    "settings": [each[:] for each in report.option_settings(engine) if "toy" in each.key],
    "error": error,
}))
"""


@pytest.mark.nightly("planning")
def test_an_option_and_a_key_of_another_plugin_are_one_row_each(tmp_path: Path):
    copy = copied(CORE, tmp_path)
    insert(copy / "config" / "options.py", '"""Options of `--additional-config`."""\n', OPTION)
    insert(copy / "config" / "other_keys.py", "OTHER_KEYS: tuple[Row, ...] = (", KEY)
    seen = said_in(tmp_path, PROGRAM, str(ROOT / "ci"))
    assert seen["page"] == [
        "| `toy_limit_bytes` | integer | `7` | Upper limit per toy, in bytes. |",
        "| `their_toy` | boolean | `false` | Play with toys. | Has no effect: toys work. |",
    ]
    assert seen["schema"]["toy_limit_bytes"]["description"] == "Upper limit per toy, in bytes."
    assert seen["schema"]["toy_limit_bytes"]["exclusiveMinimum"] == 0
    assert seen["schema"]["their_toy"]["deprecated"]
    assert seen["value"] == 9
    assert seen["notes"] == ["additional_config key 'their_toy' has no effect: toys work."]
    assert seen["settings"] == [
        ["toy_limit_bytes", 9, "additional_config", ""],
        ["their_toy", True, "additional_config", "has no effect: toys work"],
    ]
    assert seen["error"].endswith("Did you mean 'toy_limit_bytes'?")


def test_the_contributing_page_names_the_files_that_hold_the_rows():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = {
        task.strip(): files.strip()
        for line in page.splitlines()
        if line.startswith("| ") and line.count("|") == 3
        for task, files in [line.strip("| ").split("|")]
    }
    assert rows["add an option of `additional_config`"] == "`core/config/options.py`"
    assert rows["define the effect of another plugin's key"] == "`core/config/other_keys.py`"
