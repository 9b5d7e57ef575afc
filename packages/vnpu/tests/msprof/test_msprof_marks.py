"""Marks of a program in a profile, from aclprof's functions to the timeline."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_davinci.vnpu.msprof.__main__ import main
from vllm_davinci_testing.processes.programs import output_of

INVALID = "107000"

PREAMBLE = """
import ctypes, threading, torch, torch_npu
from ctypes import byref, c_char_p, c_size_t, c_uint32, c_void_p
torch.npu.set_device(0)
acl = ctypes.CDLL("libascendcl.so")
for name in ("CreateConfig", "CreateStamp", "CreateStepInfo"):
    getattr(acl, "aclprof" + name).restype = c_void_p

def stamp(message):
    made = c_void_p(acl.aclprofCreateStamp())
    assert acl.aclprofSetStampTraceMessage(made, message, len(message)) == 0
    return made
"""


def test_marks_spans_and_steps_are_in_the_timeline(tmp_path: Path) -> None:
    lines = output_of(
        PREAMBLE
        + f"""
directory = {str(tmp_path).encode()!r}
assert acl.aclprofInit(directory, c_size_t(len(directory))) == 0
config = c_void_p(acl.aclprofCreateConfig((c_uint32 * 1)(0), 1, 0, None, ctypes.c_uint64(0)))
assert acl.aclprofMark(stamp(b"too early")) == 0
print(acl.aclprofSetConfig(3, b"15", c_size_t(2)), acl.aclprofStart(config))
step, number = c_void_p(acl.aclprofCreateStepInfo()), c_uint32()
print(acl.aclprofGetStepTimestamp(step, 0, None), acl.aclprofMark(stamp(b'a "mark"')))
print(acl.aclprofPush(stamp(b"outer")), acl.aclprofPush(stamp(b"inner")))
print(acl.aclprofRangeStart(stamp(b"range"), byref(number)))
torch.zeros(4, device="npu").add_(1)
print(acl.aclprofPop(), acl.aclprofPop())
stopper = threading.Thread(target=lambda: print(acl.aclprofRangeStop(number)))
stopper.start()
stopper.join()
print(acl.aclprofGetStepTimestamp(step, 1, None), acl.aclprofStop(config))
"""
    )
    assert " ".join(lines) == " ".join(["0"] * 12)
    (profile,) = tmp_path.glob("PROF_*")
    assert main(["--export=on", f"--output={profile}"]) == 0
    (path,) = (profile / "mindstudio_profiler_output").glob("msprof_*.json")
    events = [
        each for each in json.loads(path.read_text()) if each.get("args", {}).get("event_type")
    ]
    kinds = {each["name"]: each["args"]["event_type"] for each in events}
    spans = dict.fromkeys(("outer", "inner", "range", "step 1"), "range")
    assert kinds == {'a "mark"': "marker"} | spans
    begin = {each["name"]: float(each["ts"]) for each in events}
    end = {each["name"]: begin[each["name"]] + each["dur"] for each in events}
    assert begin["step 1"] <= begin["outer"] <= begin["inner"] < end["inner"] <= end["outer"]
    assert end["outer"] <= end["range"] <= end["step 1"]


def test_what_no_call_began_does_not_end() -> None:
    lines = output_of(
        PREAMBLE
        + """
gone = stamp(b"gone")
acl.aclprofDestroyStamp(gone)
step = c_void_p(acl.aclprofCreateStepInfo())
print(acl.aclprofMark(gone), acl.aclprofMark(None), acl.aclprofPop(), acl.aclprofRangeStop(7))
print(acl.aclprofGetStepTimestamp(step, 1, None), acl.aclprofGetStepTimestamp(step, 2, None))
print(acl.aclprofSetConfig(17, b"1", c_size_t(1)), acl.aclprofSetConfig(3, b"", c_size_t(0)),
      acl.aclprofSetConfig(3, b"1" * 257, c_size_t(257)))
"""
    )
    assert " ".join(lines).split() == [INVALID] * 9
