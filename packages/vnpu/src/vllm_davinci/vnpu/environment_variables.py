"""Every environment variable that vnpu reads or sets."""

VNPU_ACTIVE = "VNPU_ACTIVE"
"""1 in processes (and their children) whose CANN libraries are vnpu's."""

VNPU_DEVICES = "VNPU_DEVICES"
"""Number of virtual devices, 1 to 64. Default 8."""

VNPU_SERVER_DEVICES = "VNPU_SERVER_DEVICES"
"""Number of devices per server, in device order, for HCCL features that work within a server only.
Default: 16 for an Ascend910_93, 8 for other chips."""

VNPU_SOC = "VNPU_SOC"
"""SoC name that the runtime reports, and whose documented operator limits apply. Default
Ascend910B3. `reference` (or `reference:NAME`) reports the same, but operators accept any dtype and
size, to compare float32 results to the last bit."""

VNPU_CANN = "VNPU_CANN"
"""Release of CANN whose documents the operators follow: 8.3, 8.5 or 9.0. Default 8.5, the strictest
that vllm-davinci supports."""

VNPU_STRICT = "VNPU_STRICT"
"""0: operators are not checked against CANN's documents, and need no workspace. Default 1."""

VNPU_REFUSALS = "VNPU_REFUSALS"
"""Existing directory in which all processes count operator calls checked against CANN's documents,
and record the refused ones. `vnpu refusals DIRECTORY` prints them."""

VNPU_COUNTS = "VNPU_COUNTS"
"""Existing directory in which each process counts its launches, waits for a device and copies from
one, in PROCESS.counts. `vnpu run --count` creates it, prints the counts and removes it."""

VNPU_FAULTS = "VNPU_FAULTS"
"""Plan of faults: rank=1;alloc@17=oom;launch:aclnnMatmul@3=async:507015, or @FILE. count:DIRECTORY
writes each process's number of points where a fault can be injected. See the guide on fault
injection. Default: no faults."""

VNPU_MEMORY = "VNPU_MEMORY"
"""Memory of each device: bytes, or with KiB, MiB, GiB. Default 64GiB."""

VNPU_SCHEDULE = "VNPU_SCHEDULE"
"""Execution policy: eager, threads or fuzz:SEED. Default eager."""

VNPU_COMPUTE = "VNPU_COMPUTE"
"""0: operators are launched but do no arithmetic. Default 1."""

VNPU_PACE = "VNPU_PACE"
"""Artificial times, NAME=MICROSECONDS,..., of tasks by prefix of their name, slept after their
arithmetic; MICROSECONDS/MiB is per MiB that the task writes. Streams sleep concurrently under the
policy `threads`. Default: none."""

VNPU_RACES = "VNPU_RACES"
"""Race detector: off, report (to stderr) or raise (an error at the second of the two launches).
Default off."""

VNPU_TRACE = "VNPU_TRACE"
"""Directory in which each process writes PROCESS.trace.json, for Perfetto, with every task's
stream, start, end, bytes and waits. `vnpu run --trace FILE` merges them. Default: none."""

VNPU_TIMING = "VNPU_TIMING"
"""Figures of the machine on which tasks are timed, NAME=INTEGER;... `vnpu run --chip NAME
--topology NAME` sets it from the chip's and the topology's files. Default: none."""

VNPU_TIMING_VARIANTS = "VNPU_TIMING_VARIANTS"
"""Further machines on which the same program is modelled, beside VNPU_TIMING:
NAME:FIGURE=INTEGER;...|NAME:... `vllm-davinci dry-run --sensitivity` sets it. Default: none."""

VNPU_MACHINE = "VNPU_MACHINE"
"""Name of VNPU_TIMING's machine in reports and timelines. Set with it."""

VNPU_TIMELINE = "VNPU_TIMELINE"
"""With VNPU_TIMING: directory in which each process writes PROCESS.timeline.json, for Perfetto,
with the modelled time of each task. `vnpu run --timeline FILE` merges them. Default: none."""

VNPU_PACED = "VNPU_PACED"
"""With VNPU_TIMING: host seconds per modelled second. The host's waits for the device take that
long; if the host is too slow, a line on stderr says so. Default: no pacing."""

VNPU_TRITON = "VNPU_TRITON"
"""1: Triton kernels run on virtual NPUs. Default 0: no Triton backend of vnpu's is active."""

VNPU_TRITON_LIMITS = "VNPU_TRITON_LIMITS"
"""raise: a Triton kernel that exceeds a known limit of a chip's compiler is refused;
record:DIRECTORY: limits that kernels exceed are written there. Default: not checked."""

VNPU_PHANTOM_RANKS = "VNPU_PHANTOM_RANKS"
"""1, with VNPU_COMPUTE=0: the other ranks of all groups are phantoms. Groups need no other rank,
and collectives neither wait nor move data. Default 0."""

HCCL_IF_IP = "HCCL_IF_IP"
"""This host's address for ranks on other hosts. With it, or with HCCL_SOCKET_IFNAME, groups of
ranks may span several hosts. Default: one host."""

HCCL_SOCKET_IFNAME = "HCCL_SOCKET_IFNAME"
"""This host's network interface, in place of HCCL_IF_IP: prefixes of names, separated by commas; =
before them for whole names, ^ or ^= to exclude. Its IPv4 address is used."""

HCCL_IF_BASE_PORT = "HCCL_IF_BASE_PORT"
"""First of 32 ports, of which a process uses one for its groups to meet. Default: any free port;
with a rank table 60000."""

RANK_TABLE_FILE = "RANK_TABLE_FILE"
"""File with a rank table, which replaces root information. Read by torch_npu too."""

VNPU_WAIT_LIMIT = "VNPU_WAIT_LIMIT"
"""Maximum wait of the host for the device, in seconds. Default 600."""

VNPU_PYTHON = "VNPU_PYTHON"
"""Python interpreter of vnpu's `msprof`; set to the one that activated vnpu. Default python3."""

PATH = "PATH"
"""Search path of commands; vnpu's toolkit goes first, for `msprof`."""

ASCEND_HOME_PATH = "ASCEND_HOME_PATH"
"""Installation directory of CANN: set by its set_env.sh, or by vnpu to its own directory."""

ASCEND_OPP_PATH = "ASCEND_OPP_PATH"
"""Directory of CANN's operator packages; torch_npu requires it beside ASCEND_HOME_PATH."""

LD_LIBRARY_PATH = "LD_LIBRARY_PATH"
"""The loader's search path; vnpu's library directory goes in front."""

LD_PRELOAD = "LD_PRELOAD"
"""Libraries loaded before the C library. If VNPU_FAULTS has faults of host calls, or counts points,
`vnpu run` adds the library that injects them."""

TASK_QUEUE_ENABLE = "TASK_QUEUE_ENABLE"
"""torch_npu's launch queue. vnpu sets 0 unless it is set: its launches do not block, so a second
thread only adds hand-overs, and with one thread a fuzz seed determines the schedule."""

OMP_WAIT_POLICY = "OMP_WAIT_POLICY"
"""Wait policy of a parallel operator's idle threads. vnpu sets passive unless it is set: a spinning
thread takes the core from the thread that it waits for. On two idle cores active is about a tenth
faster; beside another program it is up to four times slower."""

TORCH_NPU_WARNING_DISABLE = "TORCH_NPU_WARNING_DISABLE"
"""1: torch_npu does not print its warnings about drivers, CANN releases and chip generations. vnpu
sets 1 unless it is set, as otherwise every process with a device prints one."""
