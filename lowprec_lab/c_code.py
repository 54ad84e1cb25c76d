"""Answers in C: compiled with every warning an error, and run in a process of their own on guarded arrays.

An answer is the text of one function,

    void quantize_row(const float *x, uint8_t *out, size_t blocks)

which stands where gguf_blocks.c leaves room for it. c_harness.c calls it. A crash, an endless loop, a byte too far:
each ends that process alone and becomes a sentence. Floating-point contraction is off: a fused multiply-add rounds once
where the rules of the blocks round twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.calls import AnswerFailed

HERE = Path(__file__).parent
GIVEN, HARNESS = HERE / "gguf_blocks.c", HERE / "c_harness.c"
HOLE = "/*** YOUR FUNCTION ***/"
FLAGS = ("-std=c11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
SANITIZE = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# gcc's `undefined` does not look at casts of floats. Warnings have been told before.
UNDEFINED = ("-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all", "-w")
NATIVE = ("-march=native",)
# The name under which a compiler sees an answer, and which no sentence shows.
_TEXT = "your_answer.c"
COMPILE_LIMIT_S, RUN_LIMIT_S = 30.0, 6.0
_MEMORY_BYTES = 2 * 2**30  # of the process that runs an answer, its arrays included
_MOST_PRINTED = 2000
_STOPPED = "A sanitizer stopped it: "
_MOST_MESSAGES = 3

NO_COMPILER = (
    "There is no C compiler here, so an answer in C cannot be judged on this machine. Debian, Ubuntu: apt-get install "
    "gcc. macOS: xcode-select --install. Windows: install gcc (MSYS2), or use WSL. Everything in Python works without."
)
# By what c_harness.c says (its `enum ending`). It never ends well without having written the results as well.
ENDINGS = {
    1: "It reads beyond the end of x. There are blocks * 32 floats, and the last one is x[blocks * 32 - 1].",
    2: "It writes (or reads) beyond the end of out. Count the bytes of a block, and where the next block begins.",
    3: "It writes to x. The input is const: keep what changes in variables of your own.",
    4: "It writes to memory in front of x. Is an index negative?",
    5: "It writes to memory in front of out. Is an index negative?",
    6: "It uses an address that is none of its own: a pointer that points nowhere, or a recursion without an end.",
    7: "There is no memory for its arrays.",
    8: "It was started with less input than it was promised.",
}


class CompilerMissingError(RuntimeError):
    """There is no C compiler."""

    def __init__(self) -> None:
        super().__init__(NO_COMPILER)


@dataclass(frozen=True)
class Program:
    """A compiled answer: a program of its own, and the folder that it lies in."""

    path: Path
    function: str


def find_compiler() -> str | None:
    """The C compiler that takes `FLAGS`: what CC names, cc, gcc or clang. None where there is none of them."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next(filter(None, (shutil.which(name, path=_search_path()) for name in names if name)), None)


def _search_path() -> str:
    return os.pathsep.join(filter(None, [os.environ.get("PATH"), "/usr/bin", "/bin"]))


def run(
    text: str, function: str, x: Tensor, *, block: int = 32, block_bytes: int, sanitize: bool = False,
    seconds: float = RUN_LIMIT_S,
) -> Tensor:  # fmt: skip
    """What the C function `function` in `text` writes for the rows of `x`.

    x: float32, (..., n) with n a multiple of `block`. Returns uint8, (..., n / block * block_bytes).
    Raises AnswerFailed, with a sentence, for what does not compile, crashes, never ends or touches what is not its own;
    CompilerMissingError; ValueError for an `x` of another kind.
    """
    raw, _ = _execute(text, function, x, block, block_bytes, SANITIZE if sanitize else (), seconds, repeats=1)
    return _as_rows(raw, x, block, block_bytes)


def run_defined(text: str, function: str, x: Tensor, *, block: int = 32, block_bytes: int) -> Tensor:
    """The same as `run`, but stopped at the first thing that C leaves undefined, where the compiler can do that.

    Such a thing may well give the right bytes here. Raises AnswerFailed of the kind "undefined" for it.
    """
    flags = finds_undefined(find_compiler() or "")
    try:
        raw, _ = _execute(text, function, x, block, block_bytes, flags, RUN_LIMIT_S, repeats=1)
    except AnswerFailed as failure:
        if not failure.sentence.startswith(_STOPPED):
            raise
        place, _, what = failure.sentence.removeprefix(_STOPPED).replace("runtime error: ", "").partition(": ")
        sentence = (
            f"It passes here by luck: {place.strip()}, {what}. C leaves that undefined: another processor, compiler or "
            "level of optimization may give other bytes."
        )
        raise AnswerFailed("undefined", sentence) from None
    return _as_rows(raw, x, block, block_bytes)


def _as_rows(raw: bytes, x: Tensor, block: int, block_bytes: int) -> Tensor:
    """The bytes of all blocks as those of the rows of x."""
    made = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    return made.reshape(*x.shape[:-1], x.shape[-1] // block * block_bytes)


def fastest(text: str, function: str, x: Tensor, *, block: int = 32, block_bytes: int, repeats: int = 5) -> float:
    """Seconds of the fastest of `repeats` runs over `x`, without the start of its process. Raises as `run` does."""
    return _execute(text, function, x, block, block_bytes, (), 60.0, repeats)[1]


def in_process(text: str, function: str, *, block: int = 32, block_bytes: int) -> Callable[[Tensor], Tensor]:
    """The C function as one of tensors, in this process: nothing guards it, so it must have passed its check.

    It is compiled for this machine's own processor, where the compiler can do that: the same bytes, sooner.
    Raises AnswerFailed for what does not compile, CompilerMissingError.
    """
    own = for_this_processor(find_compiler() or "")
    library = ctypes.CDLL(str(_build(text, function, ("-shared", "-fPIC", *own))))
    entry = getattr(library, function)
    entry.restype, entry.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def quantize(x: Tensor) -> Tensor:
        _require_blocks(x, block)
        x = x.detach().contiguous()
        out = torch.empty(*x.shape[:-1], x.shape[-1] // block * block_bytes, dtype=torch.uint8)
        entry(x.data_ptr(), out.data_ptr(), x.numel() // block)
        return out

    return quantize


@functools.lru_cache(maxsize=8)
def for_this_processor(compiler: str) -> tuple[str, ...]:
    """What tells a compiler to use all that this machine's processor can do; nothing where it knows no such thing."""
    command = [compiler, *NATIVE, "-Werror", "-x", "c", "-", "-S", "-o", os.devnull]
    try:
        tried = subprocess.run(
            command, input=b"int x;", env=_environment(), capture_output=True, timeout=COMPILE_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return NATIVE if tried.returncode == 0 else ()


@functools.lru_cache(maxsize=8)
def finds_undefined(compiler: str) -> tuple[str, ...]:
    """`UNDEFINED`, where what this compiler makes with it runs; else nothing."""
    with tempfile.TemporaryDirectory(prefix="lowprec-c-") as folder:
        command = [compiler, *UNDEFINED, "-x", "c", "-", "-o", "program"]
        try:
            subprocess.run(
                command, cwd=folder, input=b"int main(void) { return 0; }", env=_environment(), capture_output=True,
                timeout=COMPILE_LIMIT_S, check=True,
            )  # fmt: skip
            subprocess.run([str(Path(folder) / "program")], capture_output=True, timeout=COMPILE_LIMIT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return ()
    return UNDEFINED


def _require_blocks(x: Tensor, block: int) -> None:
    if x.dtype != torch.float32 or x.dim() == 0 or x.shape[-1] % block:
        wanted = f"float32 rows whose length {block} divides"
        raise ValueError(f"a function in C takes {wanted}, not {x.dtype} of shape {tuple(x.shape)}")


# --- compiling --------------------------------------------------------------------------------------------------------


def source_of(text: str) -> str:
    """The whole C file: what is given, with `text` in its place. Its lines are counted as in `text`."""
    before, _, after = GIVEN.read_text("utf-8").partition(HOLE)
    return f'{before}#line 1 "{_TEXT}"\n{text}\n{after}'


def _build(text: str, function: str, more: tuple[str, ...]) -> Path:
    """The compiled file; from the same text, the same file, as long as this process lives."""
    if not isinstance(text, str):
        raise AnswerFailed(
            "type", f"It returned {type(text).__name__}. Return C code as text: the definition of {function}."
        )
    compiler = find_compiler()
    if compiler is None:
        raise CompilerMissingError
    return _built(compiler, text, function, more, os.getpid())


@functools.lru_cache(maxsize=512)
def _built(compiler: str, text: str, function: str, more: tuple[str, ...], _process: int) -> Path:
    key = hashlib.sha256("\0".join((text, function, *more)).encode("utf-8", "replace")).hexdigest()[:16]
    folder = Path(_scratch(_process)) / key
    folder.mkdir(exist_ok=True)
    (folder / _TEXT).write_text(source_of(text), "utf-8", "replace")
    sources = [_TEXT] if "-shared" in more else [_TEXT, str(HARNESS)]
    command = [compiler, *FLAGS, *more, f"-DFUNCTION={function}", *sources, "-o", "program", "-lm"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMPILE_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise AnswerFailed("exception", f"The compiler was stopped after {COMPILE_LIMIT_S:g} s.") from None
    if done.returncode:
        raise AnswerFailed("exception", _complaint(done.stderr.decode("utf-8", "replace"), function))
    return folder / "program"


@functools.lru_cache(maxsize=1)
def _scratch(_process: int) -> str:
    """A folder for what is compiled, which vanishes with this process (a fork of it has another)."""
    folder = tempfile.TemporaryDirectory(prefix="lowprec-c-", ignore_cleanup_errors=True)
    _KEPT.append(folder)
    return folder.name


_KEPT: list[tempfile.TemporaryDirectory] = []


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _search_path(), "LC_ALL": "C", "TMPDIR": tempfile.gettempdir()}


def _complaint(said: str, function: str) -> str:
    """The first messages of a compiler, without its folders and its drawings."""
    pattern = re.compile(
        rf"^(?:.*/)?{re.escape(_TEXT)}:(\d+)(?::\d+)?: (?:fatal )?(error|warning): (.*)$", re.MULTILINE
    )
    found = [f"line {line}, {_plain(message)}" for line, kind, message in pattern.findall(said)]
    if found:
        more = len(found) - _MOST_MESSAGES
        ending = f"; and {more} more" if more > 0 else ""
        return f"It does not compile: {'; '.join(found[:_MOST_MESSAGES])}{ending}."
    if f"undefined reference to `{function}'" in said or f"_{function}" in said:
        return f"It does not compile: there is no function {function} in it."
    lines = [
        line for line in said.splitlines() if "error" in line or "undefined reference" in line
    ] or said.splitlines()
    return f"It does not compile: {_plain(lines[0].rpartition(': ')[2]) if lines else 'the compiler does not say why'}."


def _plain(message: str) -> str:
    return message.replace("[-Werror=", "[-W").replace("‘", "'").replace("’", "'")


# --- running ----------------------------------------------------------------------------------------------------------


def _execute(
    text: str, function: str, x: Tensor, block: int, block_bytes: int, more: tuple[str, ...], seconds: float,
    repeats: int,
) -> tuple[bytes, float]:  # fmt: skip
    _require_blocks(x, block)
    program = _build(text, function, more)
    blocks = x.numel() // block
    memory = 0 if more == SANITIZE else _MEMORY_BYTES
    numbers = (blocks, block, block_bytes, int(seconds) + 1, memory, repeats)
    told, printed, code = _child([str(program), *map(str, numbers)], x.detach().contiguous().numpy().tobytes(), seconds)
    if printed and not (_by_sanitizer(printed) and not told):
        print(printed.decode("utf-8", "replace")[:_MOST_PRINTED])
    if not told:
        raise AnswerFailed("exception", _how_it_ended(code, printed))
    if told[0]:
        raise AnswerFailed("exception", ENDINGS.get(told[0], "Its process ended in an unknown way."))
    took, raw = struct.unpack("d", told[1:9])[0], told[9:]
    if len(raw) != blocks * block_bytes:
        raise AnswerFailed("exception", _how_it_ended(code, printed))
    return raw, took


def _child(command: list[str], given: bytes, seconds: float) -> tuple[bytes, bytes, int]:
    """(what it wrote, what it printed, how it ended) of a process in a session of its own, which ends with it."""
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, cwd="/"
    )  # fmt: skip
    try:
        told, printed = child.communicate(given, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise AnswerFailed(
            "timeout", f"It was stopped after {seconds:g} s: is there an endless loop in your C?"
        ) from None
    finally:
        _end(child)
    return told, printed, child.returncode


def _end(child: subprocess.Popen) -> None:
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        with contextlib.suppress(OSError):
            pipe.close()


def _by_sanitizer(printed: bytes) -> bool:
    return b"Sanitizer" in printed or b"runtime error" in printed


def _how_it_ended(code: int, printed: bytes) -> str:
    if _by_sanitizer(printed):
        line = next(line for line in printed.decode("utf-8", "replace").splitlines() if "rror" in line)
        said = re.sub(rf"^.*{re.escape(_TEXT)}:(\d+):\d+:", r"line \1:", line)
        return f"{_STOPPED}{said}"
    if code == 0:
        return "It ended its process before it was done. Return from your function; do not call exit."
    if code > 0:
        return f"Its process ended with the code {code} before it was done."
    names = {
        "SIGFPE": "it divides a whole number by zero",
        "SIGABRT": "it gave up (abort, or an assertion that is not true)",
        "SIGILL": "it did what no processor can do",
        "SIGXCPU": "it took too much processor time: is there an endless loop?",
        "SIGKILL": "the system ended it: does it take too much memory?",
        "SIGXFSZ": "it writes to a file",
    }
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        return f"Its process crashed ({name}): {names.get(name, 'look for an address that is none of its own')}."
    return f"Its process crashed (signal {-code})."
