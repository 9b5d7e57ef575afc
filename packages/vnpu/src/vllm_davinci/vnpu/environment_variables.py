"""Every environment variable that vnpu reads or sets."""

VNPU_ACTIVE = "VNPU_ACTIVE"
"""Set to 1 in processes (and their children) in which vnpu supplies the CANN libraries."""

VNPU_DEVICES = "VNPU_DEVICES"
"""Number of virtual devices, 1 to 64. Default 8."""

VNPU_SERVER_DEVICES = "VNPU_SERVER_DEVICES"
"""Devices of a server, in the order of their numbers, for what HCCL does within one server only.
Default: as many as the chip's servers have, 16 for an Ascend910_93 and 8 for others."""

VNPU_SOC = "VNPU_SOC"
"""SoC name that the runtime reports, and whose operators take what CANN documents for it. Default
Ascend910B3. `reference` (or `reference:NAME`) reports the same, with operators that take any dtype
and size: for comparing float32 results to the last bit."""

VNPU_CANN = "VNPU_CANN"
"""Release of CANN whose documents the operators follow: 8.3, 8.5 or 9.0. Default 8.5, the
strictest of those that vllm-davinci supports."""

VNPU_STRICT = "VNPU_STRICT"
"""0: operators are not held against CANN's documents, and ask for no workspace. Default 1."""

VNPU_REFUSALS = "VNPU_REFUSALS"
"""Directory, which has to exist: all processes count there the calls of operators that they hold
against CANN's documents, and keep those that were refused. `vnpu refusals DIRECTORY` shows it."""

VNPU_COUNTS = "VNPU_COUNTS"
"""Directory, which has to exist: each process counts there, in PROCESS.counts, its launches, its
waits for a device and its copies from one. `vnpu run --count` makes it, prints what it holds and
removes it."""

VNPU_FAULTS = "VNPU_FAULTS"
"""A plan of what fails, where and how: rank=1;alloc@17=oom;launch:aclnnMatmul@3=async:507015, or
@FILE. count:DIRECTORY writes, for each process, how many points it has at which something can fail.
See the guide on fault injection. Default: nothing fails."""

VNPU_MEMORY = "VNPU_MEMORY"
"""Memory of each device: bytes, or with KiB, MiB, GiB. Default 64GiB."""

VNPU_SCHEDULE = "VNPU_SCHEDULE"
"""Execution policy: eager, threads or fuzz:SEED. Default eager."""

VNPU_COMPUTE = "VNPU_COMPUTE"
"""0: operators are launched but do no arithmetic. Default 1."""

VNPU_PACE = "VNPU_PACE"
"""Artificial durations: NAME=MICROSECONDS,... for tasks whose names begin so, slept on top of what
their arithmetic takes; MICROSECONDS/MiB counts for each MiB that the task writes. Streams sleep
side by side under the policy `threads`. Default: none."""

VNPU_RACES = "VNPU_RACES"
"""Race detector: off, report (to stderr) or raise (an error at the second of the two launches).
Default off."""

VNPU_TRACE = "VNPU_TRACE"
"""A directory: each process writes PROCESS.trace.json there, for Perfetto, with every task's
stream, start, end, bytes and waits. `vnpu run --trace FILE` makes one file of them. Default:
none."""

VNPU_TIMING = "VNPU_TIMING"
"""A machine's figures, NAME=INTEGER;...: when a chip would have done each task is modelled. `vnpu
run --chip NAME --topology NAME` writes it from the chip's and the topology's files. Default:
none."""

VNPU_TIMING_VARIANTS = "VNPU_TIMING_VARIANTS"
"""Other machines beside that of VNPU_TIMING, NAME:FIGURE=INTEGER;...|NAME:...: the same program is
modelled on each of them, too. `vllm-davinci dry-run --sensitivity` writes it. Default: none."""

VNPU_MACHINE = "VNPU_MACHINE"
"""Name of the machine of VNPU_TIMING in reports and timelines. Set with it."""

VNPU_TIMELINE = "VNPU_TIMELINE"
"""A directory, with VNPU_TIMING: each process writes PROCESS.timeline.json there, for Perfetto,
with when a chip would have done each task. `vnpu run --timeline FILE` makes one file of them.
Default: none."""

VNPU_PACED = "VNPU_PACED"
"""This host's seconds for each modelled one, with VNPU_TIMING: the host's waits for the device take
that long, and a host that is too slow for it is said on stderr. Default: nobody waits."""

VNPU_PHANTOM_RANKS = "VNPU_PHANTOM_RANKS"
"""1, with VNPU_COMPUTE=0: the other ranks of all groups are phantoms. Nobody else joins a group,
and a collective waits for nobody and moves nothing. Default 0."""

HCCL_IF_IP = "HCCL_IF_IP"
"""This host's own address, at which ranks of other hosts meet those of this one. With it, or with
HCCL_SOCKET_IFNAME, groups of ranks may reach over several hosts. Default: they stay on one."""

HCCL_SOCKET_IFNAME = "HCCL_SOCKET_IFNAME"
"""This host's network interface, in place of HCCL_IF_IP: beginnings of names by commas, = before
them for whole names, ^ or ^= for all but these. Its IPv4 address is taken."""

HCCL_IF_BASE_PORT = "HCCL_IF_BASE_PORT"
"""First of 32 ports, from which a process takes one where ranks of its groups meet. Default: any
free port; with a rank table 60000."""

RANK_TABLE_FILE = "RANK_TABLE_FILE"
"""torch_npu's: a rank table, which then takes the place of root information."""

VNPU_WAIT_LIMIT = "VNPU_WAIT_LIMIT"
"""Longest wait of the host for the device, in seconds. Default 600."""

VNPU_PYTHON = "VNPU_PYTHON"
"""The Python that `msprof` of vnpu's toolkit runs with: set to the one that activated vnpu. Default
python3."""

PATH = "PATH"
"""Where commands are: vnpu's toolkit comes first, for `msprof`."""

ASCEND_HOME_PATH = "ASCEND_HOME_PATH"
"""Where CANN is installed: set by its set_env.sh, or by vnpu to its own directory."""

ASCEND_OPP_PATH = "ASCEND_OPP_PATH"
"""Where CANN's operator packages are; torch_npu insists on it beside ASCEND_HOME_PATH."""

LD_LIBRARY_PATH = "LD_LIBRARY_PATH"
"""The loader's search path; vnpu's library directory goes in front."""

LD_PRELOAD = "LD_PRELOAD"
"""Libraries that come before the C library. Under a plan of VNPU_FAULTS for calls of the host, or
one that counts, `vnpu run` puts the library there that lets them fail."""

TASK_QUEUE_ENABLE = "TASK_QUEUE_ENABLE"
"""torch_npu's launch queue. vnpu sets 0 unless the user chose: its launches do not block, so a
second thread only adds hand-overs, and with one thread a fuzz seed gives one schedule."""

OMP_WAIT_POLICY = "OMP_WAIT_POLICY"
"""How idle threads of a parallel operator wait. vnpu sets passive unless the user chose: its
threads share the host's cores, and one that spins takes them from the thread it waits for. On two
idle cores active is about a tenth faster; beside another program it is up to four times slower."""

TORCH_NPU_WARNING_DISABLE = "TORCH_NPU_WARNING_DISABLE"
"""1: torch_npu prints no warnings of its own, which are about drivers, CANN releases and chips'
generations. vnpu sets 1 unless the user chose: every process that uses a device would begin with
one."""
