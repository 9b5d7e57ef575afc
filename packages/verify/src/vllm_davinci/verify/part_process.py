"""The process of one part: `python -m vllm_davinci.verify.part_process NAME DIRECTORY`."""

import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

from vllm_davinci.verify.case import Case
from vllm_davinci.verify.finding import Finding
from vllm_davinci.verify.journal import Journal
from vllm_davinci.verify.parts import GO_ON
from vllm_davinci.verify.settings import settings_of


def main(name: str, directory: Path) -> int:
    """Runs cases missing in the journal. Exit status GO_ON if some remain."""
    begin = time.monotonic()
    journal = Journal(directory / f"{name}.jsonl")
    before = journal.seconds

    def passed() -> float:
        return before + time.monotonic() - begin

    part = import_module(f"vllm_davinci.verify.parts_of.{name}")
    for case in part.cases(settings_of(directory), directory):
        if case.name in journal.ended:
            continue
        journal.begin(case.name)
        findings, failed = _findings(case)
        journal.end(case.name, findings, passed())
        if failed and not _device_is_well():
            return GO_ON
    journal.finish(passed())
    return 0


def _findings(case: Case) -> tuple[list[Finding], bool]:
    try:
        return list(case.run()), False
    except Exception as error:
        message = str(error).strip() or repr(error)
        details = {"message": message, "traceback": traceback.format_exc(limit=-6)}
        return [Finding(case.name, "failed", passed=False, details=details)], True


def _device_is_well() -> bool:
    """True if this process's device, if any, still computes."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "npu"):
        return True
    try:
        torch.npu.synchronize()
        return float(torch.ones(2, device="npu").sum()) == 2.0
    except Exception:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
