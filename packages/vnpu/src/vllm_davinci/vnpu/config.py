"""Settings of virtual devices, passed to the libraries as environment variables."""

import dataclasses
import pathlib
import re

from vllm_davinci.vnpu import environment_variables as env
from vllm_davinci.vnpu.errors import VirtualDeviceError
from vllm_davinci.vnpu.timing.chip_files import chip_and_soc
from vllm_davinci.vnpu.timing.machine import Machine, load_machine
from vllm_davinci.vnpu.timing.variants import encode, variants_of, without_mechanisms

_SCHEDULE = re.compile(r"eager|threads|fuzz:\d+")
_RACES = ("off", "report", "raise")
_CANN = ("8.3", "8.5", "9.0")
_SIZE = re.compile(r"\d+(KiB|MiB|GiB)?")


@dataclasses.dataclass(frozen=True)
class VirtualDeviceConfig:
    """Settings of the virtual devices. None keeps the environment's value, or the default.

    devices:    number of devices, 1 to 64
    soc:        SoC name, "Ascend910B3", or a chip's; "reference", "reference:NAME": operators
                accept any dtype and size
    cann:       release whose documents the operators follow, "8.3", "8.5" or "9.0"
    strict:     False: calls are not checked against the documents
    memory:     memory of each device, "64GiB"
    schedule:   "eager", "threads" or "fuzz:SEED"
    compute:    False: operators are launched but do no arithmetic
    wait_limit: maximum wait of the host for the device, in seconds
    races:      "off", "report" or "raise": the race detector
    trace:      directory in which each process writes its trace
    refusals:   directory in which processes count calls checked against CANN's documents, and
                record the refused ones
    chip:       chip of the timing model, a name or a TOML file; None: time is not modelled. SoC and
                memory are the chip's unless they are given
    topology:   links between the chips, a name or a TOML file; default "node-of-8"
    timeline:   directory in which each process writes its modelled timeline
    variants:   also model the program on machines with other assumed figures
    mechanisms: also model it without each mechanism that figures can turn off
    paced:      host seconds per modelled second: waits for the device take that long
    phantom_ranks: collectives do not wait for other ranks; needs compute=False
    faults:     plan of faults, as in VNPU_FAULTS
    triton:     True: Triton kernels run on the devices
    """

    devices: int | None = None
    soc: str | None = None
    cann: str | None = None
    strict: bool | None = None
    memory: str | None = None
    schedule: str | None = None
    compute: bool | None = None
    wait_limit: float | None = None
    races: str | None = None
    trace: str | None = None
    refusals: str | pathlib.Path | None = None
    chip: str | None = None
    topology: str | None = None
    timeline: str | None = None
    variants: bool = False
    mechanisms: bool = False
    paced: float | None = None
    phantom_ranks: bool = False
    faults: str | None = None
    triton: bool = False
    triton_limits: bool = False

    def __post_init__(self) -> None:
        if self.devices is not None and not 1 <= self.devices <= 64:
            raise VirtualDeviceError(f"devices={self.devices}: expected 1 to 64.")
        if self.schedule is not None and not _SCHEDULE.fullmatch(self.schedule):
            raise VirtualDeviceError(
                f"schedule={self.schedule!r}: expected 'eager', 'threads' or 'fuzz:SEED'."
            )
        if self.memory is not None and not _SIZE.fullmatch(self.memory):
            raise VirtualDeviceError(
                f"memory={self.memory!r}: expected a size such as '64GiB' or '512MiB'."
            )
        if self.cann is not None and self.cann not in _CANN:
            raise VirtualDeviceError(f"cann={self.cann!r}: expected '8.3', '8.5' or '9.0'.")
        if self.races is not None and self.races not in _RACES:
            raise VirtualDeviceError(f"races={self.races!r}: expected 'off', 'report' or 'raise'.")
        if self.wait_limit is not None and not 0 < self.wait_limit <= 1e9:
            raise VirtualDeviceError(
                f"wait_limit={self.wait_limit}: expected seconds above 0, at most 1e9."
            )
        if self.chip is None and (self.topology or self.timeline or self.paced) is not None:
            raise VirtualDeviceError(
                "a topology, a modelled timeline or a pace needs a chip: name one, as in "
                "`--chip ascend910b2`."
            )
        if (self.variants or self.mechanisms) and (self.chip is None or self.paced is not None):
            raise VirtualDeviceError(
                "variants=True and mechanisms=True need a chip whose figures vary, and no pace: "
                "waits take the time of one machine."
            )
        if self.paced is not None and not 0 < self.paced <= 1e6:
            raise VirtualDeviceError(
                f"paced={self.paced}: expected host seconds per modelled second, as in 4."
            )

    def machine(self) -> Machine | None:
        """The modelled machine; None if time is not modelled. Raises MachineError."""
        return None if self.chip is None else load_machine(self.chip, self.topology or "node-of-8")

    def _others(self, machine: Machine | None) -> str | None:
        if machine is None or not (self.variants or self.mechanisms):
            return None
        others = variants_of(machine) if self.variants else {}
        return encode({**others, **(without_mechanisms(machine) if self.mechanisms else {})})

    def environment(self) -> dict[str, str]:
        """The environment variables of these settings; unset fields are omitted."""
        machine = self.machine()
        values = {
            env.VNPU_DEVICES: self.devices,
            env.VNPU_SOC: _soc(self.soc) if self.soc else machine and machine.soc,
            env.VNPU_CANN: self.cann,
            env.VNPU_STRICT: None if self.strict is None else int(self.strict),
            env.VNPU_MEMORY: self.memory or (machine and machine.memory_bytes),
            env.VNPU_SCHEDULE: self.schedule,
            env.VNPU_COMPUTE: None if self.compute is None else int(self.compute),
            env.VNPU_WAIT_LIMIT: self.wait_limit,
            env.VNPU_RACES: self.races,
            env.VNPU_TRACE: self.trace,
            env.VNPU_REFUSALS: None
            if self.refusals is None
            else pathlib.Path(self.refusals).resolve(),
            env.VNPU_TIMING: machine and machine.encoded(),
            env.VNPU_TIMING_VARIANTS: self._others(machine),
            env.VNPU_MACHINE: machine and machine.title,
            env.VNPU_TIMELINE: self.timeline,
            env.VNPU_PACED: self.paced,
            env.VNPU_FAULTS: self.faults,
            env.VNPU_PHANTOM_RANKS: 1 if self.phantom_ranks else None,
            env.VNPU_TRITON: 1 if self.triton else None,
            env.VNPU_TRITON_LIMITS: "raise" if self.triton_limits else None,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def _soc(spoken: str) -> str:
    """The SoC name as a runtime reports it; unknown names are returned unchanged."""
    reference, colon, name = spoken.rpartition(":")
    _, soc = chip_and_soc(name) or ("", name)
    return f"{reference}{colon}{soc}"
