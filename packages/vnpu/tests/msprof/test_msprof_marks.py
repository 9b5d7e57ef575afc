"""Steps marked by a program, from aclprof's functions to the timeline."""

import json
from pathlib import Path

from vllm_davinci.vnpu.msprof.__main__ import main
from vllm_davinci_testing.processes.programs import output_of

PREAMBLE = """
import ctypes, torch, torch_npu
from ctypes import c_size_t, c_uint32, c_void_p
torch.npu.set_device(0)
acl = ctypes.CDLL("libascendcl.so")
for name in ("CreateConfig", "CreateStepInfo"):
    getattr(acl, "aclprof" + name).restype = c_void_p
step = c_void_p(acl.aclprofCreateStepInfo())
"""


def test_a_step_is_in_the_timeline(tmp_path: Path) -> None:
    lines = output_of(
        PREAMBLE
        + f"""
directory = {str(tmp_path).encode()!r}
assert acl.aclprofInit(directory, c_size_t(len(directory))) == 0
config = c_void_p(acl.aclprofCreateConfig((c_uint32 * 1)(0), 1, 0, None, ctypes.c_uint64(0)))
print(acl.aclprofSetConfig(3, b"15", c_size_t(2)), acl.aclprofStart(config))
print(acl.aclprofGetStepTimestamp(step, 0, None))
torch.zeros(4, device="npu").add_(1)
print(acl.aclprofGetStepTimestamp(step, 1, None), acl.aclprofStop(config))
"""
    )
    assert " ".join(lines) == " ".join(["0"] * 5)
    (profile,) = tmp_path.glob("PROF_*")
    assert main(["--export=on", f"--output={profile}"]) == 0
    (path,) = (profile / "mindstudio_profiler_output").glob("msprof_*.json")
    (event,) = (
        each for each in json.loads(path.read_text()) if each.get("args", {}).get("event_type")
    )
    assert (event["name"], event["args"]["event_type"]) == ("step 1", "range") and event["dur"] > 0


def test_invalid_steps_and_settings_are_refused() -> None:
    lines = output_of(
        PREAMBLE
        + """
print(acl.aclprofGetStepTimestamp(step, 1, None), acl.aclprofGetStepTimestamp(step, 2, None))
print(acl.aclprofSetConfig(17, b"1", c_size_t(1)), acl.aclprofSetConfig(3, b"", c_size_t(0)),
      acl.aclprofSetConfig(3, b"1" * 257, c_size_t(257)))
"""
    )
    assert " ".join(lines).split() == ["107000"] * 5
