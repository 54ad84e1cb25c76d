"""The GPU that is checked, and one that stands in for it: a CPU that runs every part in tiny sizes."""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

NEEDED = (
    "gpu-check needs an NVIDIA GPU of compute capability 8.9 or newer (RTX 40, L4, H100, H200, B200, RTX 50), a driver "
    "that works, and a torch that is built for CUDA"
)


class NoGPUError(RuntimeError):
    """There is no GPU to check; the sentence says what is missing."""


@dataclass(frozen=True)
class Device:
    """An NVIDIA GPU. where: as torch names it. cublas: (major, minor) of the library that multiplies.

    compiler: the backend of torch.compile.
    """

    where: str
    name: str
    capability: tuple[int, int]
    cublas: tuple[int, int]
    total_bytes: int
    compiler: str = "inductor"

    def synchronize(self) -> None:
        """Wait until everything that was asked for is done; its errors come out here."""
        torch.cuda.synchronize(self.where)

    def forget_peak(self) -> None:
        """Begin to watch how much memory is in use."""
        torch.cuda.reset_peak_memory_stats(self.where)

    def peak_bytes(self) -> int:
        """The largest number of bytes that tensors took since `forget_peak`."""
        return torch.cuda.max_memory_allocated(self.where)

    def free(self) -> None:
        """Give memory that no tensor has back."""
        torch.cuda.empty_cache()

    def facts(self) -> dict:
        """Versions, for the report."""
        return {
            "name": self.name,
            "capability": ".".join(map(str, self.capability)),
            "memory_gib": round(self.total_bytes / 2**30, 1),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "cublas": ".".join(map(str, self.cublas)),
            "driver": driver_version(),
        }


class StandIn(Device):
    """A CPU in a GPU's place, so that every line can be tested where there is no GPU. It measures nothing real."""

    def synchronize(self) -> None:
        """A CPU is done when a call returns."""

    def forget_peak(self) -> None:
        """Nothing is watched."""

    def peak_bytes(self) -> int:
        return 0

    def free(self) -> None:
        """Nothing is kept."""


def stand_in() -> StandIn:
    """A CPU that says it is an H100."""
    return StandIn("cpu", "a stand-in for a GPU", (9, 0), (12, 9), 2**30, compiler="aot_eager")


def find_gpu() -> Device:
    """The first GPU. Raises NoGPUError, with what is needed, where there is none that multiplies FP8."""
    if torch.version.hip:
        raise NoGPUError(f"this torch is built for AMD's GPUs, whose FP8 is not checked here. {NEEDED}.")
    if not torch.cuda.is_available():
        raise NoGPUError(f"there is no GPU that torch {torch.__version__} can use here. {NEEDED}.")
    capability = torch.cuda.get_device_capability(0)
    if capability < (8, 9):
        raise NoGPUError(f"this GPU has compute capability {capability[0]}.{capability[1]}. {NEEDED}.")
    properties = torch.cuda.get_device_properties(0)
    return Device("cuda", properties.name, capability, cublas_version(), properties.total_memory)


def cublas_version() -> tuple[int, int]:
    """The version of the cuBLAS that torch has loaded; that of the CUDA it was built for where nobody tells."""
    with contextlib.suppress(OSError, RuntimeError, AttributeError, AssertionError):  # AssertionError: no CUDA at all
        torch.zeros(16, 16, device="cuda") @ torch.zeros(16, 16, device="cuda")  # has the library loaded
        found = re.search(r"\S*/libcublasLt\.so\S*", Path("/proc/self/maps").read_text())
        if found:
            ask = ctypes.CDLL(found[0]).cublasLtGetVersion
            ask.restype = ctypes.c_size_t
            return version_of(ask())
    numbers = re.findall(r"\d+", torch.version.cuda or "0.0")
    return int(numbers[0]), int(numbers[1])


def version_of(number: int) -> tuple[int, int]:
    """(major, minor) of what cublasLtGetVersion returns: 120904 is 12.9.4, and 130100 is 13.1.0."""
    return number // 10000, number // 100 % 100


def driver_version() -> str:
    """The version of NVIDIA's driver, "" where nobody tells."""
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[0]
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False).stdout.split("\n")[0]
    return ""
