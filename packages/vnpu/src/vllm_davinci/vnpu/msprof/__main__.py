"""The command `msprof` of vnpu's toolkit."""

import argparse
import pathlib
import sys
import time

from vllm_davinci.vnpu.errors import TraceError
from vllm_davinci.vnpu.msprof import tables, timeline
from vllm_davinci.vnpu.msprof.tasks import read_profile

# torch_npu polls for the first table every 0.1 s while this command runs, and drops the profile if
# the command ends before it has seen one (CANNTimelineParser). A chip's msprof takes seconds.
_SEEN_AFTER_S = 0.5


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="msprof",
        description="Exports profiles of virtual NPUs, as CANN's msprof exports a chip's: "
        "mindstudio_profiler_output/msprof_*.json, op_summary_*.csv, op_statistic_*.csv and "
        "task_time_*.csv. Times are the wall clock of the host that stands in for the chip.",
        allow_abbrev=False,
    )
    # A chip's msprof has these options and more; torch_npu reads the help text for them.
    parser.add_argument("--export", choices=("on", "off"), default="off", help="write CANN's files")
    parser.add_argument(
        "--analyze",
        choices=("on", "off"),
        default="off",
        help="communication analysis: links and packets, which a virtual NPU lacks",
    )
    parser.add_argument(
        "--output", type=pathlib.Path, required=True, help="the PROF_* directory of a profile"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; exit status 0 on success."""
    options = _parser().parse_args(arguments)
    if options.export == "off" and options.analyze == "off":
        print("msprof: nothing to do; say --export=on.", file=sys.stderr)
        return 2
    try:
        profile = read_profile(options.output)
    except TraceError as error:
        print(f"msprof: {error}", file=sys.stderr)
        return 1
    if options.export == "on":
        directory = options.output / "mindstudio_profiler_output"
        directory.mkdir(exist_ok=True)
        # Readers take the first table as the sign that the timeline is complete.
        timeline.write(profile, directory)
        tables.write(profile, directory)
        print(f"msprof: {len(profile.tasks)} tasks exported to {directory}")
        time.sleep(_SEEN_AFTER_S)
    if options.analyze == "on":
        print("msprof: a virtual NPU has no links to analyze; nothing is written for --analyze.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
