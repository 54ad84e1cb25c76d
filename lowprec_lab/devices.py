"""What this machine can do: `doctor()`, and for each precision whether it runs natively, is emulated, or cannot run.

Finding out (`inspect_machine`) and judging (`diagnose`) are apart: the judgement is a function of plain data. Nothing
is compiled or downloaded, so `doctor()` costs no more than importing torch.

References: NVIDIA CUDA C++ Programming Guide, compute capabilities (TF32 and BF16 from 8.0, FP8 from 8.9); AMD CDNA3
and CDNA4 instruction sets (FP8 on gfx942 is fnuz, on gfx950 OCP); Intel's manual, volume 1 (AVX512_BF16, AMX-BF16,
AVX512_FP16, AMX-FP16); Arm architecture reference manual (FEAT_BF16, FEAT_FP16).
"""

from __future__ import annotations

import contextlib
import html
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)

# Statuses. Of facts: OK, NOTE (works, with less), MISSING (mend it). Of precisions: NATIVE, EMULATED, CANNOT.
OK, NOTE, MISSING = "ok", "note", "missing"
NATIVE, EMULATED, CANNOT = "native", "emulated", "cannot"


_CPU_BF16 = {"amx_bf16": "AMX-BF16", "avx512_bf16": "AVX512_BF16", "bf16": "FEAT_BF16"}
_CPU_FP16 = {"amx_fp16": "AMX-FP16", "avx512_fp16": "AVX512_FP16", "asimdhp": "FEAT_FP16"}


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for torch, inside; as many as before where count is 0."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Machine:
    """Everything that `diagnose` judges by.

    accelerator: "cuda", "rocm", "mps" or None. capability: (major, minor) of the CUDA device. architecture: the ROCm
    device's, "gfx942" say. memory_bytes and device_memory_bytes: None where unknown. cpu_flags: lower case, as in
    /proc/cpuinfo. compilers: "c" and "c++" to a path or None. nvidia_driver: whether there is one, even if torch cannot
    use it. float8: whether this torch has the 8-bit dtypes. training_text: the cached file, or None.
    """

    python: tuple[int, int, int]
    torch: str
    system: str
    processor: str
    cores: int
    memory_bytes: int | None
    accelerator: str | None = None
    device_name: str = ""
    device_count: int = 0
    device_memory_bytes: int | None = None
    capability: tuple[int, int] | None = None
    architecture: str = ""
    cpu_flags: frozenset[str] = frozenset()
    compilers: dict[str, str | None] = field(default_factory=dict)
    python_headers: bool = True
    triton: bool = False
    nvidia_driver: bool = False
    float8: bool = True
    training_text: str | None = None


@dataclass(frozen=True)
class Line:
    """One finding: what was looked at, its status, and why or what to do."""

    topic: str
    status: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What `doctor()` found. Prints as text, shows as a table in a notebook; `.to_dict()` is for programs."""

    facts: tuple[Line, ...]
    precisions: tuple[Line, ...]

    @property
    def healthy(self) -> bool:
        """Whether the course runs here: nothing that it cannot do without is missing."""
        return all(line.status != MISSING for line in self.facts)

    def status_of(self, topic: str) -> str:
        """The status of one line, by its topic ("fp8 e4m3"). Raises KeyError that lists the topics."""
        statuses = {line.topic: line.status for line in (*self.facts, *self.precisions)}
        if topic not in statuses:
            raise KeyError(f"the report has no line {topic!r}. It has: {', '.join(statuses)}")
        return statuses[topic]

    def to_dict(self) -> dict:
        """{"healthy": bool, "facts": [{"topic", "status", "reason"}], "precisions": [...]}, JSON all through."""
        return {
            "healthy": self.healthy,
            "facts": [asdict(line) for line in self.facts],
            "precisions": [asdict(line) for line in self.precisions],
        }

    def __str__(self) -> str:
        lines = (*self.facts, *self.precisions)
        topic_width = max(len(line.topic) for line in lines)
        status_width = max(len(line.status) for line in lines)
        rows = [[f"{line.topic:<{topic_width}}  {line.status:<{status_width}}  {line.reason}" for line in part]
                for part in (self.facts, self.precisions)]  # fmt: skip
        return "\n".join(["This machine", *rows[0], "", "Precisions", *rows[1]])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Tables with inline styles only, so that it reads right in an untrusted notebook and in both themes."""
        return _table("This machine", self.facts) + _table("Precisions", self.precisions)


_CELL = "padding:2px 12px 2px 0;text-align:left;vertical-align:top;white-space:"
_CAPTION = "caption-side:top;text-align:left;font-weight:600;color:inherit"


def _table(title: str, lines: tuple[Line, ...]) -> str:
    rows = "".join(
        '<tr style="background:transparent">'
        f'<th scope="row" style="{_CELL}nowrap;font-weight:600">{html.escape(line.topic)}</th>'
        f'<td style="{_CELL}nowrap">{html.escape(line.status)}</td>'
        f'<td style="{_CELL}normal">{html.escape(line.reason)}</td></tr>'
        for line in lines
    )
    caption = f'<caption style="{_CAPTION}">{html.escape(title)}</caption>'
    return f'<table style="border-collapse:collapse;margin:0 0 12px 0">{caption}<tbody>{rows}</tbody></table>'


def doctor() -> Report:
    """What this machine can do for the course: its parts, and how it runs each precision, with the reason."""
    return diagnose(inspect_machine(), _matmul_for())


# Judging: plain data in, a report out.


def diagnose(machine: Machine, matmul_for: tuple[Callable, str] | None = None) -> Report:
    """The report on a machine that `machine` describes.

    matmul_for: chapter 09's function, and whose it is; with it the report says where products in FP8 run.
    """
    products = () if matmul_for is None else _fp8_products(machine, *matmul_for)
    return Report(facts=tuple(_facts(machine)), precisions=(*_precisions(machine), *products))


def _facts(machine: Machine):
    yield _python(machine)
    yield _torch(machine)
    yield Line("cores", OK if machine.cores > 1 else NOTE, f"{machine.cores} for this process ({machine.processor})")
    yield _memory(machine)
    yield _accelerator(machine)
    yield _c_compiler(machine)
    yield _torch_compile(machine)
    yield _training_text(machine)


def _python(machine: Machine) -> Line:
    version = ".".join(map(str, machine.python))
    if machine.python[:2] < OLDEST_PYTHON:
        return Line("python", MISSING, f"{version} is too old: install {_dotted(OLDEST_PYTHON)} or newer")
    return Line("python", OK, f"{version} on {machine.system}")


def _torch(machine: Machine) -> Line:
    release = tuple(int(part) for part in machine.torch.split("+")[0].split(".")[:2])
    if release < OLDEST_TORCH or not machine.float8:
        return Line("torch", MISSING, f"{machine.torch} is too old: pip install 'torch>={_dotted(OLDEST_TORCH)}'")
    return Line("torch", OK, machine.torch)


def _memory(machine: Machine) -> Line:
    if machine.memory_bytes is None:
        return Line("memory", NOTE, "this system does not say how much; the course needs 4 GiB")
    size = f"{machine.memory_bytes / 2**30:.1f} GiB"
    if machine.memory_bytes < 3.5 * 2**30:
        return Line("memory", NOTE, f"{size}; the course is made for 4 GiB: close other programs before long runs")
    return Line("memory", OK, size)


def _accelerator(machine: Machine) -> Line:
    if machine.accelerator is None:
        if machine.nvidia_driver:
            why = "it is a build without CUDA, or the driver or the GPU is too old for it"
            return Line("gpu", NOTE, f"an NVIDIA driver is here, but this torch cannot use it: {why}")
        return Line("gpu", OK, "none: everything runs on the CPU")
    if machine.accelerator == "mps":
        return Line("gpu", OK, f"{machine.device_name or 'Apple GPU'} (mps)")
    count = f"{machine.device_count} x " if machine.device_count > 1 else ""
    memory = f", {machine.device_memory_bytes / 2**30:.0f} GiB" if machine.device_memory_bytes else ""
    kind = f"compute capability {_dotted(machine.capability)}" if machine.capability else machine.architecture
    return Line("gpu", OK, f"{count}{machine.device_name} ({kind}{memory})")


def _c_compiler(machine: Machine) -> Line:
    path = machine.compilers.get("c")
    if path and Path(path).stem.lower() == "cl":
        return Line("c compiler", NOTE, f"{path} compiles for torch; exercises in C need gcc or clang")
    if path:
        return Line("c compiler", OK, path)
    return Line("c compiler", NOTE, f"none found; only exercises in C need one. {_how_to_get_a_compiler(machine)}")


def _torch_compile(machine: Machine) -> Line:
    """What torch.compile would trip over, found without compiling: a missing compiler, headers or Triton."""
    topic, eagerly = "torch.compile", "compiled paths run eagerly: the same results, slower"
    if not machine.compilers.get("c++") and machine.accelerator != "cuda":
        return Line(topic, NOTE, f"no C++ compiler, so {eagerly}. {_how_to_get_a_compiler(machine)}")
    if not machine.python_headers and machine.accelerator != "mps":
        return Line(topic, NOTE, f"Python.h is missing, so {eagerly}. Debian, Ubuntu: apt-get install python3-dev")
    if machine.accelerator in ("cuda", "rocm"):
        if not machine.triton:
            return Line(topic, NOTE, f"Triton is missing, so on the GPU {eagerly}. pip install triton")
        if not machine.compilers.get("c"):
            return Line(topic, NOTE, f"Triton needs a C compiler, so {eagerly}. {_how_to_get_a_compiler(machine)}")
        if machine.capability and machine.capability < (7, 0):
            return Line(topic, NOTE, f"Triton needs compute capability 7.0, so on this GPU {eagerly}")
        return Line(topic, OK, "Triton and a C compiler are here")
    return Line(topic, OK, f"has a C++ compiler: {machine.compilers['c++']}")


def _how_to_get_a_compiler(machine: Machine) -> str:
    return {
        "Darwin": "Install one: xcode-select --install",
        "Windows": "Install the Visual Studio Build Tools (C++) and start from their command prompt",
    }.get(machine.system, "Debian, Ubuntu: apt-get install g++")


def _training_text(machine: Machine) -> Line:
    if machine.training_text:
        return Line("training text", OK, machine.training_text)
    reason = "not cached: 1.1 MB, fetched when a chapter first trains; offline, Python's own source takes its place"
    return Line("training text", NOTE, reason)


# Precisions. TF32 cannot run without its hardware: it is a way to multiply float32, and elsewhere torch multiplies
# float32 as it is. The others are dtypes, so whatever has no instructions for them computes on wider numbers.


def _precisions(machine: Machine):
    yield Line("fp32", NATIVE, f"on {_where(machine)}: what every other precision is compared with")
    yield _tf32(machine)
    yield _bf16(machine)
    yield _fp16(machine)
    yield from _fp8(machine)


def _where(machine: Machine) -> str:
    return {None: "the CPU", "mps": "the Apple GPU"}.get(machine.accelerator, "the GPU")


def _tf32(machine: Machine) -> Line:
    if machine.accelerator == "cuda" and machine.capability >= (8, 0):
        return Line("tf32", NATIVE, "tensor cores have it; torch uses it once float32 matmul precision is 'high'")
    if machine.accelerator == "rocm" and machine.architecture == "gfx942":
        return Line("tf32", NATIVE, "gfx942 has it (XF32); torch uses it once float32 matmul precision is 'high'")
    needs = "it is how NVIDIA's tensor cores (compute capability 8.0 or newer) multiply float32"
    if machine.accelerator == "cuda":
        needs += f", and this GPU has {_dotted(machine.capability)}"
    return Line("tf32", CANNOT, f"{needs}; here float32 is multiplied as it is")


def _bf16(machine: Machine) -> Line:
    if machine.accelerator == "cuda":
        if machine.capability >= (8, 0):
            return Line("bf16", NATIVE, "on the GPU's tensor cores")
        why = f"BF16 tensor cores come with compute capability 8.0, this GPU has {_dotted(machine.capability)}"
        return Line("bf16", EMULATED, f"{why}: stored in 16 bits, computed in FP32, no faster; FP16 is fast here")
    if machine.accelerator in ("rocm", "mps"):
        return Line("bf16", NATIVE, f"on {_where(machine)}")
    return _on_cpu("bf16", machine, _CPU_BF16)


def _fp16(machine: Machine) -> Line:
    if machine.accelerator == "cuda":
        if machine.capability >= (7, 0):
            return Line("fp16", NATIVE, "on the GPU's tensor cores")
        return Line("fp16", EMULATED, f"no tensor cores in compute capability {_dotted(machine.capability)}: no faster")
    if machine.accelerator in ("rocm", "mps"):
        return Line("fp16", NATIVE, f"on {_where(machine)}")
    return _on_cpu("fp16", machine, _CPU_FP16)


def _on_cpu(topic: str, machine: Machine, instructions: dict[str, str]) -> Line:
    found = [name for flag, name in instructions.items() if flag in machine.cpu_flags]
    if found:
        return Line(topic, NATIVE, f"this CPU has {' and '.join(found)}")
    names = list(instructions.values())
    wanted = [name for name in names if name.startswith("FEAT")] if _is_arm(machine) else names[:-1]
    why = f"this CPU has no {' or '.join(wanted)}" if machine.cpu_flags else "this CPU's instructions are not known"
    return Line(topic, EMULATED, f"{why}: stored in 16 bits, computed in FP32; the values are right, the speed is not")


def _is_arm(machine: Machine) -> bool:
    return machine.processor.lower() in ("arm64", "aarch64")


def _fp8(machine: Machine):
    topics = ("fp8 e4m3", "fp8 e5m2")
    if not machine.float8:
        yield from (Line(topic, CANNOT, "this torch has no 8-bit dtypes: install a newer one") for topic in topics)
        return
    status, reason = _fp8_matmul(machine)
    yield Line(topics[0], status, reason)
    # scaled_mm multiplies e5m2 by e4m3, never e5m2 by e5m2.
    yield Line(topics[1], status, f"{reason}; the other operand must be e4m3" if status == NATIVE else reason)


def _fp8_matmul(machine: Machine) -> tuple[str, str]:
    emulation = "stored in 8 bits, scaled and rounded as on the hardware, multiplied in FP32"
    if machine.accelerator == "cuda":
        has = _dotted(machine.capability)
        if machine.capability >= (10, 0):
            return NATIVE, f"compute capability {has}: FP8 tensor cores, and block-scaled MXFP8"
        if machine.capability >= (8, 9):
            return NATIVE, f"compute capability {has}: FP8 tensor cores"
        return EMULATED, f"FP8 tensor cores come with compute capability 8.9, this GPU has {has}: {emulation}"
    if machine.accelerator == "rocm":
        if machine.architecture == "gfx942":
            return NATIVE, "gfx942 has FP8 matrix cores, for the fnuz variants of both formats"
        if machine.architecture.startswith(("gfx950", "gfx12")):
            return NATIVE, f"{machine.architecture} has FP8 matrix cores"
        return EMULATED, f"{machine.architecture or 'this GPU'} has no FP8 matrix cores: {emulation}"
    if machine.accelerator == "mps":
        return EMULATED, f"torch has no 8-bit floats on Apple's GPU, so it runs on the CPU: {emulation}"
    return EMULATED, f"CPUs do not multiply FP8: {emulation}"


def _fp8_products(machine: Machine, matmul_for: Callable, whose: str):
    """What `matmul_for` says about the two ways to scale a product; it is a learner's, so it may say anything."""
    capability = machine.capability if machine.accelerator == "cuda" and machine.float8 else None
    scales = {"tensorwise": "one scale for each operand", "rowwise": "a scale for each row and column"}
    for kind, meaning in scales.items():
        try:
            native, said = matmul_for(capability, kind) == "hardware", ""
        except Exception as error:
            native, said = False, f", which raised {type(error).__name__}"
        runs = "torch._scaled_mm multiplies" if native else "multiplied in FP32"
        yield Line(f"fp8 {kind}", NATIVE if native else EMULATED, f"{meaning}: {runs} ({whose}{said})")


def _matmul_for() -> tuple[Callable, str] | None:
    """(chapter 09's `matmul_for`, whose it is); None where nobody has written it and no reference is installed."""
    from lowprec_lab.exercises import AnswerError, supply

    try:
        supplied = supply("matmul_for")
    except AnswerError:
        return None
    return supplied.function, supplied.line


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# Finding out.


def inspect_machine() -> Machine:
    """What there is here, as `Machine` describes it. Looks; starts nothing on the GPU, compiles nothing."""
    return Machine(
        python=tuple(sys.version_info[:3]),
        torch=str(torch.__version__),
        system=platform.system(),
        processor=platform.machine(),
        cores=available_cores(),
        memory_bytes=available_memory(),
        cpu_flags=cpu_flags(),
        compilers=find_compilers(),
        python_headers=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        triton=_has_module("triton"),
        nvidia_driver=shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists(),
        float8=hasattr(torch, "float8_e4m3fn") and hasattr(torch, "float8_e5m2"),
        training_text=cached_training_text(),
        **_inspect_accelerator(),
    )


def _inspect_accelerator() -> dict:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found = {
            "device_name": properties.name,
            "device_count": torch.cuda.device_count(),
            "device_memory_bytes": properties.total_memory,
        }
        if torch.version.hip:
            return {"accelerator": "rocm", "architecture": properties.gcnArchName.split(":")[0], **found}
        capability = (properties.major, properties.minor)
        if capability < _oldest_capability():
            return {}
        return {"accelerator": "cuda", "capability": capability, **found}
    if torch.backends.mps.is_available():
        return {"accelerator": "mps", "device_count": 1}
    return {}


def _oldest_capability() -> tuple[int, int]:
    """The oldest GPU that this build of torch has code for: "sm_75" is compute capability 7.5."""
    names = (name.removeprefix("sm_") for name in torch.cuda.get_arch_list() if name.startswith("sm_"))
    numbers = [int("".join(filter(str.isdigit, name))) for name in names]
    return divmod(min(numbers, default=0), 10)


def available_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes of memory that this machine, or the container that we are in, has; None where the system does not say."""
    sizes = [size for size in (_physical_memory(), _container_memory()) if size]
    return min(sizes, default=None)


def _physical_memory() -> int | None:
    if platform.system() == "Windows":
        return _windows_memory()
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _windows_memory() -> int | None:
    import ctypes

    kilobytes = ctypes.c_ulonglong()
    if not ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes)):
        return None
    return kilobytes.value * 1024


def _container_memory() -> int | None:
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None


def cpu_flags() -> frozenset[str]:
    """The CPU's instruction sets, lower case, under Linux's names; empty where the system does not tell."""
    system = platform.system()
    if system == "Linux":
        return _flags_in(Path("/proc/cpuinfo").read_text(errors="replace"))
    if system == "Darwin":
        features = subprocess.run(["sysctl", "hw.optional.arm"], capture_output=True, text=True, check=False).stdout
        return _flags_in_sysctl(features)
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return frozenset(name for name, present in capabilities.items() if present is True)


def _flags_in(cpuinfo: str) -> frozenset[str]:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.lower().split())
    return frozenset()


def _flags_in_sysctl(features: str) -> frozenset[str]:
    linux_names = {"FEAT_BF16": "bf16", "FEAT_FP16": "asimdhp"}
    present = {line.split(":")[0].rsplit(".", 1)[-1] for line in features.splitlines() if line.rstrip().endswith(": 1")}
    return frozenset(linux_names.get(name, name.lower()) for name in present)


def find_compilers() -> dict[str, str | None]:
    """Paths of the C and the C++ compiler that torch and the exercises would call, or None."""
    from lowprec_lab.c_code import find_compiler

    cxx = (os.environ.get("CXX"), "clang++" if platform.system() == "Darwin" else "g++", "cl")
    return {"c": find_compiler() or _first_program(["cl"]), "c++": _first_program(cxx)}


def _first_program(names) -> str | None:
    paths = (shutil.which(name) for name in names if name)
    return next((path for path in paths if path), None)


def _has_module(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def cached_training_text() -> str | None:
    """Path of the training text, what LOWPREC_DATA names or in pooch's cache, or None."""
    from lowprec_lab.data import local_text

    path = local_text()
    return None if path is None else str(path)


__all__ = ["Line", "Machine", "Report", "diagnose", "doctor", "inspect_machine"]
