"""Reports on the environment and completes prompts on one device and on two: `demo.py CHECKPOINT`.

Run by `nox -s demo`, over the virtual NPU. The report runs while the first engine loads. One
program starts both engines, so that vLLM is imported once.
"""

import subprocess
import sys
from pathlib import Path

GENERATE = Path(__file__).resolve().parent.parent / "examples" / "generate.py"
REPORT_LIMIT_S = 300.0


def main() -> int:
    doctor = Path(sys.executable).parent / "vllm-davinci"
    generate = [sys.executable, str(GENERATE), *sys.argv[1:], "-tp", "1", "2"]
    with (
        subprocess.Popen([doctor, "doctor"], stdout=subprocess.PIPE, text=True) as report,
        subprocess.Popen(generate, stdout=subprocess.PIPE, text=True) as text,
    ):
        try:
            shown, _ = report.communicate(timeout=REPORT_LIMIT_S)
            print(shown, flush=True)
            if report.returncode != 0:
                return report.returncode
            print("vLLM completes prompts on one device, then on two that share the model")
            assert text.stdout is not None
            for line in text.stdout:
                print(line, end="", flush=True)
            return text.wait()
        finally:
            for process in (report, text):
                if process.poll() is None:
                    process.terminate()


if __name__ == "__main__":
    sys.exit(main())
