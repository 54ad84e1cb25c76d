"""The sandbox: what an answer cannot see, change or use up, and what is left of it for the next one: nothing.

Every attack here is bounded by itself too: a fork bomb stops at 500, memory at 2 GiB, a loop at 60 s.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from sandboxes import ask, open_sandbox, run

from lowprec_lab import __main__ as command_line
from lowprec_lab.blanks import BLANKS, load_chapters
from lowprec_lab.grading import sandbox as sandbox_module
from lowprec_lab.grading import sandbox_view, wire
from lowprec_lab.grading.judge import judge
from lowprec_lab.grading.sandbox import Limits, Sandbox, SandboxError, _tree
from lowprec_lab.grading.sandbox_check import Machine, check_sandbox, explain
from lowprec_lab.grading.sandbox_view import ViewError, libraries, make_view, package_files
from lowprec_lab.sources import Source, reference_source

load_chapters()
RIGHT = "def sign_bit(x):\n    return x.signbit().int()"


@pytest.fixture(scope="module")
def workers():
    with open_sandbox() as sandbox:
        yield sandbox


def value(workers, body, *args, **options):
    """The result of an answer with this body, which must have one."""
    outcome, why = run(workers, body, *args, **options)
    assert why == "", (outcome, why)
    return outcome


def still_works(workers):
    return judge(BLANKS["sign_bit"], {"sign_bit": Source(RIGHT)}, workers).passed


def exist(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


# --- what an answer can see -------------------------------------------------------------------------------------------


def test_an_answer_is_called(workers):
    assert value(workers, "return x + 1", torch.tensor([1, 2])).tolist() == [2, 3]


def test_the_root_holds_what_was_bound_and_no_more(workers):
    names = set(value(workers, "return tuple(sorted(os.listdir('/')))", imports="import os"))
    bound = {target.split("/")[1] for _, target in make_view().binds} | {
        link.strip("/") for _, link in make_view().links
    }
    assert names == bound | {"dev", "home", "proc", "tmp"}


def test_no_grader_reference_test_or_notebook_is_there(workers):
    body = """
    found = []
    for folder, _, files in os.walk('/', onerror=lambda error: None):
        if folder.startswith(('/proc', '/sys')):
            continue
        found += [os.path.join(folder, name) for name in files if pattern.search(os.path.join(folder, name))]
    return tuple(found[:50])
    """
    pattern = r"lowprec_lab.*(grader|judge|exercises|solution|terminal|bench|tests)|\.ipynb$|gradebook|/etc/passwd"
    assert re.search(pattern, str(sandbox_view.PACKAGE / "graders" / "case.py"))
    found = value(workers, body, imports=f"import os, re\npattern = re.compile({pattern!r})", within=60)
    assert found == ()


def test_an_answer_reads_none_of_this_machines_files(workers, tmp_path):
    (tmp_path / "secret").write_text("the seed")
    places = [tmp_path, tmp_path / "secret", Path(__file__), "/etc/passwd", "/etc/hostname", "/bin/sh", "/usr/bin/env"]
    body = f"return tuple(path for path in {[str(place) for place in places]!r} if os.path.exists(path))"
    assert value(workers, body, imports="import os") == ()


@pytest.mark.parametrize(
    "module",
    ["lowprec_lab.graders", "lowprec_lab.graders.oracle", "lowprec_lab.exercises", "lowprec_lab.grading.judge",
     "lowprec_lab.grading.sandbox", "lowprec_lab.terminal", "lowprec_lab.bench", "torchao", "ml_dtypes", "gfloat",
     "gguf", "IPython", "nbgrader", "pytest"],
)  # fmt: skip
def test_graders_and_peers_cannot_be_imported(workers, module):
    outcome, _ = run(workers, f"import {module}")
    assert outcome[0] == "failed"
    assert "ModuleNotFoundError" in outcome[1] or "ImportError" in outcome[1]


def test_what_answers_may_import_can_be_imported(workers):
    body = "import numpy, torch, math, ctypes, lowprec_lab.formats, lowprec_lab.bits\nreturn str(torch.__version__)"
    assert value(workers, body) == str(torch.__version__)


def test_the_process_has_nothing_of_the_judge_in_memory(workers):
    loaded = value(workers, "return tuple(name for name in sys.modules if 'lowprec_lab' in name)", imports="import sys")
    assert {"lowprec_lab.formats", "lowprec_lab.grading.worker"} <= set(loaded)
    assert not any(word in name for name in loaded for word in ("graders", "judge", "exercises", "oracle", "terminal"))


def test_only_the_channel_is_open(workers):
    body = """
    return tuple(os.readlink(f'/proc/self/fd/{fd}').split(':')[0] for fd in os.listdir('/proc/self/fd')
                 if os.path.exists(f'/proc/self/fd/{fd}') or os.path.islink(f'/proc/self/fd/{fd}'))
    """
    opened = sorted(value(workers, body, imports="import os"))
    assert opened == ["/dev/null"] * 3 + ["socket"]


def test_the_environment_is_a_short_list(workers, monkeypatch):
    monkeypatch.setenv("LOWPREC_SEED", "the instructor's")
    with open_sandbox() as fresh:
        names = value(fresh, "return tuple(sorted(os.environ))", imports="import os")
    assert set(names) <= set(sandbox_module._ENVIRONMENT) | {"PWD", "LC_CTYPE", "LD_LIBRARY_PATH", "CC"}


def test_only_its_own_processes_are_there(workers):
    body = "return tuple(int(name) for name in os.listdir('/proc') if name.isdigit())"
    assert len(value(workers, body, imports="import os")) == 2


def test_torch_computes_as_it_does_here(workers):
    """The same instructions: without /sys torch would not know the processor, and round some functions differently."""
    assert value(workers, "return torch.backends.cpu.get_cpu_capability()") == torch.backends.cpu.get_cpu_capability()


# --- what an answer can do --------------------------------------------------------------------------------------------

RIGHTS = """
fields = dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())
return tuple(fields[name].split()[0] for name in ('CapPrm', 'CapEff', 'CapBnd', 'NoNewPrivs', 'Seccomp'))
"""


def test_it_has_no_rights(workers):
    permitted, effective, bounding, no_more, filtered = value(workers, RIGHTS)
    assert int(permitted, 16) == int(effective, 16) == int(bounding, 16) == 0
    assert (no_more, filtered) == ("1", "2")
    assert value(workers, "return os.getuid(), os.getgid(), tuple(os.getgroups())", imports="import os")[:2] == (
        65534,
        65534,
    )


@pytest.mark.parametrize(
    "attempt",
    ["socket.socket(socket.AF_INET)", "socket.socket(socket.AF_UNIX)", "socket.create_connection(('1.1.1.1', 53), 2)",
     "os.setuid(0)", "os.setgid(0)", "os.setgroups([0])", "os.chroot('/tmp')", "os.mknod('/tmp/x', 0o60600, 259)",
     "os.nice(-5)", "os.memfd_create('x')", "open('/proc/sys/kernel/hostname', 'w').write('x')",
     "open('/proc/self/oom_score_adj', 'w').write('-1000')", "os.kill(1, 9) or [][0 if alive() else 1:][0]",
     "open('/proc/1/mem', 'rb')", "os.listdir('/proc/1/fd')",
     "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
     "resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"],
)  # fmt: skip
def test_it_may_not(workers, attempt):
    imports = "import os, resource, socket\ndef alive():\n    os.kill(1, 0)\n    return True"
    outcome, why = run(workers, attempt, imports=imports)
    assert outcome[0] == "failed", outcome
    assert why == ""


@pytest.mark.parametrize(
    "call",
    ["unshare(0x10000000)", "unshare(0x00020000)", "setns(0, 0)", "mount(b'x', b'/tmp', b'tmpfs', 0, b'')",
     "umount2(b'/tmp', 2)", "ptrace(0, 0, 0, 0)", "syscall(321, 0, 0, 0)", "syscall(425, 8, 0)", "syscall(250, 0, 0)",
     "syscall(298, 0, 0, 0, 0, 0)", "syscall(323, 0)", "shmget(0, 4096, 0o1600)", "personality(0x0040000)",
     "syscall(56, 0x10000000 | 17, 0, 0, 0, 0)", "syscall(435, 0, 0)", "syscall(0x40000000 + 39)",
     "process_vm_readv(1, 0, 0, 0, 0, 0)"],
)  # fmt: skip
@pytest.mark.skipif(os.name != "posix" or os.uname().machine != "x86_64", reason="numbers of x86_64's system calls")
def test_the_kernel_is_not_asked(workers, call):
    body = f"result = libc.{call}\nreturn result, ctypes.get_errno()"
    result, error = value(workers, body, imports="import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)")
    assert result == -1
    assert error in (1, 38)  # not permitted; no such call


@pytest.mark.parametrize(
    "place", ["/", "/lab", "/lab/package/lowprec_lab", "/dev", "/usr/lib", "/proc", "/sys", "/home"]
)
def test_nothing_can_be_written_outside_its_own_folders(workers, place):
    outcome, _ = run(workers, f"open({place + '/mine'!r}, 'w')")
    assert outcome[0] == "failed", outcome


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/home/answer"])
def test_its_own_folders_are_there_small_and_empty(workers, place):
    body = f"""
    before = os.listdir({place!r})
    written = 0
    try:
        for number in range(40):
            with open(f'{place}/{{number}}', 'wb') as file:
                file.write(bytes(2**23))
                written += 2**23
    except OSError as error:
        return len(before), written, error.errno
    """
    before, written, error = value(workers, body, imports="import os", within=60)
    assert (before, error) == (0, 28)
    assert written <= Limits().scratch_bytes


# --- limits -----------------------------------------------------------------------------------------------------------


def test_one_large_tensor_is_an_error_of_the_answer(workers):
    outcome, why = run(workers, "return torch.ones(2**30).sum()")
    assert outcome == ("failed", "It needs more memory than a check may take.")
    assert why == ""


def test_memory_over_several_processes_is_counted_together():
    body = """
    for _ in range(4):
        if os.fork() == 0:
            kept = b'x' * (200 * 2**20)
            time.sleep(60)
    time.sleep(60)
    """
    with open_sandbox(Limits(memory_bytes=400 * 2**20)) as small:
        began = time.monotonic()
        outcome, why = run(small, body, imports="import os, time")
        assert outcome[0] == "gone"
        assert why == "it used too much memory"
        assert time.monotonic() - began < 15
        assert still_works(small)


def test_what_lies_in_its_folders_is_bounded_too(workers):
    body = """
    for number in range(100_000):
        open(f'/tmp/{number}', 'w').close()
    """
    outcome, _ = run(workers, body, within=60)
    assert "No space left" in outcome[1]


def test_a_fork_bomb_is_bounded_and_ends(workers):
    body = """
    made = 0
    for _ in range(500):
        try:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            made += 1
        except BlockingIOError:
            break
    return made
    """
    worker = workers.worker()
    ask(worker, "load", "sign_bit", "import os, time\ndef sign_bit():\n" + body, "", {})
    made = ask(worker, "call", (), {})["ok"]
    time.sleep(0.5)  # idle processes share their memory, and that is counted once
    started = _tree(worker.pid)
    assert 10 < made <= Limits().processes
    assert len(started) >= made
    worker.kill()
    assert not exist(started)
    assert still_works(workers)


def test_many_threads_are_bounded(workers):
    body = """
    for made in range(500):
        try:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        except (RuntimeError, MemoryError):
            return made
    return 500
    """
    assert value(workers, body, imports="import threading, time") <= Limits().processes


def test_open_files_and_large_files_are_bounded(workers):
    body = """
    kept = []
    try:
        while len(kept) < 5000:
            kept.append(open('/dev/null'))
    except OSError as error:
        return len(kept), error.errno
    """
    count, error = value(workers, body)
    assert count < Limits().open_files
    assert error == 24
    small = Limits(file_bytes=2**20)
    with open_sandbox(small) as fresh:
        outcome, _ = run(fresh, "open('/tmp/x', 'wb').write(bytes(2**21))")
    assert "File too large" in outcome[1]


@pytest.mark.slow
def test_processor_time_is_bounded():
    with open_sandbox(Limits(cpu_s=1)) as hasty:
        outcome, why = run(hasty, "while True:\n    pass", within=30)
    assert outcome[0] == "gone"
    assert "processor time" in why


def test_endless_output_goes_nowhere(workers):
    body = """
    for _ in range(2000):
        os.write(1, b'x' * 65536)
        os.write(2, b'x' * 65536)
        sys.__stdout__.write('y' * 65536)
    return 'done'
    """
    assert value(workers, body, imports="import os, sys") == "done"


def test_endless_printing_is_cut(workers):
    worker = workers.worker()
    ask(
        worker,
        "load",
        "sign_bit",
        "def sign_bit():\n    for _ in range(10**6):\n        print('line')\n    return 1",
        "",
        {},
    )
    reply = ask(worker, "call", (), {})
    assert reply["ok"] == 1
    assert len(reply["printed"]) <= 2000
    worker.kill()


def test_time_is_the_judges(workers):
    began = time.monotonic()
    outcome, why = run(workers, "time.sleep(60)", imports="import time", within=0.5)
    assert outcome == ("gone", "no reply in time")
    assert why == ""
    assert time.monotonic() - began < 5


# --- answers that will not go -----------------------------------------------------------------------------------------

STUBBORN = {
    "a thread that outlives the call": "threading.Thread(target=time.sleep, args=(60,)).start()\nreturn 1",
    "a child": "if os.fork() == 0:\n    time.sleep(60)\nreturn 1",
    "a daemon": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\nreturn 1"
    ),
    "ignored signals": (
        "for number in range(1, 65):\n    try:\n        signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nif os.fork() == 0:\n    time.sleep(60)\nreturn 1"
    ),
    "a stopped process": "if os.fork() == 0:\n    time.sleep(60)\nos.kill(os.getpid(), signal.SIGSTOP)",
    "signals for all": "os.kill(-1, signal.SIGSTOP)\nreturn 1",
    "SIGSTOP for process 1": "os.kill(1, signal.SIGSTOP)\nos.kill(1, signal.SIGTERM)\nreturn 1",
    "a closed channel": (
        "if os.fork() == 0:\n    time.sleep(60)\nos.closerange(3, 200)\ntime.sleep(60)"
    ),
    "a process of its own interpreter": (
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\nreturn 1"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("body", STUBBORN.values(), ids=STUBBORN)
def test_it_ends_with_all_that_it_started(workers, body):
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    worker = workers.worker()
    imports = "import os, signal, subprocess, sys, threading, time\n"
    ask(worker, "load", "sign_bit", f"{imports}def sign_bit():\n{lines}", "", {})
    with contextlib.suppress(wire.WireError):
        ask(worker, "call", (), {}, within=1.5)
    time.sleep(0.2)
    started = _tree(worker.pid)
    began = time.monotonic()
    worker.kill()
    assert time.monotonic() - began < 5
    assert not exist(started)
    assert still_works(workers)


ENDINGS = {
    "exit status": ("os._exit(7)", "it ended itself, with exit status 7"),
    "a crash": ("ctypes.string_at(0)", "it crashed (a segmentation fault"),
    "abort": ("os.abort()", "it was ended by SIGABRT"),
    "its own kill": ("os.kill(os.getpid(), signal.SIGKILL)", "it was killed"),
    "a hung-up channel": ("os.closerange(3, 200)\ntime.sleep(60)", "it closed its connection"),
    "an endless recursion in C": (
        "x = []\nfor _ in range(10**6):\n    x = [x]\nsys.setrecursionlimit(10**9)\nreturn repr(x)", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "why"), ENDINGS.values(), ids=ENDINGS)
def test_how_it_ended_is_said(workers, body, why):
    outcome, said = run(workers, body, imports="import ctypes, os, signal, sys, time")
    assert outcome[0] in ("gone", "failed")
    assert said.startswith(why)
    assert still_works(workers)


FLOODS = {
    "zeros": "os.write(fd, bytes(2**16))",
    "noise": "os.write(fd, os.urandom(2**16))",
    "a giant announcement": "os.write(fd, b'\\xff' * 12)",
    "valid frames": "os.write(fd, FRAME)",
    "file descriptors": "socket.socket(fileno=os.dup(fd)).sendmsg([b'x'], [(1, 1, array.array('i', [0] * 200))])",
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flooded_channel_is_the_answers_loss(workers, flood):
    """The answer writes to the channel what it likes, for half a minute: it does not pass, and the next one does."""
    frame = b"".join([wire._LENGTHS.pack(len(h), len(r)) + h + r for h, r in [wire.pack({"ok": 1, "printed": ""})]])
    text = f"""
import array, os, socket, time
FRAME = {frame!r}
def sign_bit(x):
    fd = max(int(name) for name in os.listdir('/proc/self/fd') if os.path.islink('/proc/self/fd/' + name)
             and os.readlink('/proc/self/fd/' + name).startswith('socket'))
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        {flood}
"""
    began = time.monotonic()
    verdict = judge(BLANKS["sign_bit"], {"sign_bit": Source(text)}, workers)
    assert verdict.points == 0
    assert time.monotonic() - began < 60
    assert still_works(workers)


# --- the next answer --------------------------------------------------------------------------------------------------

LEAVES_TRACES = """
for place in ('/tmp', '/dev/shm', '/home/answer'):
    open(place + '/trace', 'w').write('here')
os.environ['TRACE'] = 'here'
sys.path.append('/trace')
torch.trace_of_mine = np.trace_of_mine = lowprec_lab.formats.trace_of_mine = 1
torch.manual_seed(999)
torch.signbit = lambda x: x
if os.fork() == 0:
    time.sleep(60)
memory = shared_memory.SharedMemory('memory', create=True, size=4096)
return 'left'
"""
LOOKS_FOR_TRACES = """
found = [name for place in ('/tmp', '/dev/shm', '/home/answer') for name in os.listdir(place)]
found += [name for name in os.environ if name == 'TRACE'] + [name for name in sys.path if 'trace' in name]
found += [str(each) for each in (torch, np, lowprec_lab.formats) if hasattr(each, 'trace_of_mine')]
found += [name for name in os.listdir('/proc') if name.isdigit() and int(name) not in (1, os.getpid())]
return tuple(found), torch.initial_seed() == 999
"""
IMPORTS = "import os, sys, time\nfrom multiprocessing import shared_memory\nimport lowprec_lab.formats"


def test_the_next_answer_finds_no_trace(workers):
    assert value(workers, LEAVES_TRACES, imports=IMPORTS) == "left"
    assert value(workers, LOOKS_FOR_TRACES, imports=IMPORTS) == ((), False)
    assert still_works(workers)


def test_two_at_once_do_not_see_each_other(workers):
    first = workers.worker()
    body = "\n".join(f"    {line}" for line in LEAVES_TRACES.strip().splitlines())
    ask(first, "load", "sign_bit", f"{IMPORTS}\ndef sign_bit():\n{body}", "", {})
    assert ask(first, "call", (), {})["ok"] == "left"
    assert value(workers, LOOKS_FOR_TRACES, imports=IMPORTS) == ((), False)
    first.kill()


def test_many_threads_may_ask_for_workers(workers):
    verdicts = []

    def one():
        worker = workers.worker()
        ask(worker, "load", "sign_bit", RIGHT, "", {})
        verdicts.append(ask(worker, "call", (torch.tensor([-1.0]),), {})["ok"].item())
        worker.kill()

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [1] * 8


def test_a_worker_costs_little(workers):
    spent = []
    for _ in range(15):
        began = time.perf_counter()
        worker = workers.worker()
        ask(worker, "load", "sign_bit", RIGHT, "", {})
        ask(worker, "call", (torch.tensor([-1.0]),), {})
        worker.kill()
        spent.append(time.perf_counter() - began)
    assert statistics.median(spent) < 0.25  # 0.025 on an idle machine; a start of Python with torch takes 1 to 3


# --- when something dies ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dead_sandbox_is_started_again():
    with open_sandbox() as sandbox:
        kept = sandbox.worker()
        zygote = _tree(sandbox._process.pid)[1]
        os.kill(zygote, signal.SIGKILL)
        assert still_works(sandbox)
        assert kept.kill() != ""


@pytest.mark.slow
def test_a_sandbox_that_will_not_live_is_an_error(monkeypatch):
    with open_sandbox() as sandbox:

        def gone(self):
            raise sandbox_module._ZygoteGone("the sandbox gives no more processes")

        monkeypatch.setattr(Sandbox, "_fork", gone)
        with pytest.raises(SandboxError, match="--no-sandbox"):
            sandbox.worker()


def test_a_closed_sandbox_says_so():
    with open_sandbox() as sandbox:
        worker = sandbox.worker()
    assert not exist([worker.pid])
    with pytest.raises(SandboxError, match="was closed"):
        sandbox.worker()


def test_killing_twice_says_the_same(workers):
    worker = workers.worker()
    ask(worker, "load", "sign_bit", "import os\ndef sign_bit():\n    os._exit(3)", "", {})
    with pytest.raises(wire.WireError):
        ask(worker, "call", (), {})
    assert worker.kill() == worker.kill() == "it ended itself, with exit status 3"


DIES = """
import sys, time
from lowprec_lab.grading.sandbox import Sandbox
from lowprec_lab.grading import wire
with Sandbox() as sandbox:
    worker = sandbox.worker()
    text = "import time\\ndef sign_bit():\\n    time.sleep(60)"
    wire.send(worker.channel, ("load", "sign_bit", text, "", {}))
    wire.receive(worker.channel)
    wire.send(worker.channel, ("call", (), {}))
    print(sandbox._process.pid, worker.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_nothing_outlives_a_killed_judge(workers):
    judges = subprocess.Popen([sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True)
    pids = [int(number) for number in judges.stdout.readline().split()]
    started = [each for pid in pids for each in _tree(pid)]
    assert len(started) >= 4
    judges.kill()
    judges.wait()
    judges.stdout.close()
    ends = time.monotonic() + 10
    while exist(started) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not exist(started)


def test_this_machines_folders_stay_as_they_are(workers):
    mounted = Path("/proc/self/mounts").read_text()
    with open_sandbox() as sandbox:
        sandbox.worker()
        assert Path("/proc/self/mounts").read_text() == mounted


# --- the view ---------------------------------------------------------------------------------------------------------


def test_the_view_follows_imports_and_leaves_the_rest():
    names = package_files(sandbox_view.PACKAGE)
    assert {"__init__.py", "formats.py", "bits.py", "start.py", "blanks.py", "calls.py", "grading/worker.py"} <= set(
        names
    )
    assert not [name for name in names if name.startswith(("graders/", "bench/", "explorers/")) or "judge" in name]


def test_a_chapter_that_imports_a_grader_is_refused(tmp_path):
    for name in ("grading/zygote.py", "grading/worker.py", "grading/__init__.py", "__init__.py", "bits.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "graders").mkdir()
    (tmp_path / "graders/oracle.py").write_text("")
    (tmp_path / "chapters.py").write_text("CHAPTERS = (Chapter('01_bit_layouts', 'bits', 'What?'),)")
    assert "bits.py" in package_files(tmp_path)
    (tmp_path / "bits.py").write_text("if True:\n    from lowprec_lab.graders import oracle")
    with pytest.raises(ViewError, match="graders/oracle.py"):
        package_files(tmp_path)


def test_the_libraries_are_torch_numpy_and_what_they_need():
    names = set(libraries())
    assert {"torch", "numpy", "typing_extensions.py", "sympy"} <= names
    assert not names & {"torchao", "ml_dtypes", "IPython", "nbgrader", "pytest", "lowprec_lab", "matplotlib"}


# --- where there can be no sandbox ------------------------------------------------------------------------------------

FREE, CONTAINER = Machine(most=15000), Machine(most=15000, container=True)
MESSAGES = [
    ("bwrap: not found", FREE, "not installed", "apt-get install bubblewrap"),
    ("unsupported system: darwin", FREE, "needs Linux", "WSL 2"),
    ("unsupported processor: riscv64", FREE, "x86_64 and arm64", "such a machine"),
    (
        "bwrap: Creating new namespace failed: nesting depth or /proc/sys/user/max_*_namespaces exceeded (ENOSPC)",
        Machine(most=0),
        "user.max_user_namespaces is 0",
        "sysctl user.max_user_namespaces=15000",
    ),
    (
        "bwrap: Creating new namespace failed: nesting depth or /proc/sys/user/max_*_namespaces exceeded (ENOSPC)",
        FREE,
        "too many user namespaces",
        "Raise",
    ),
    (
        "bwrap: No permissions to create a new namespace, likely because the kernel does not allow non-privileged user "
        "namespaces. See <https://deb.li/bubblewrap> or <file:///usr/share/doc/bubblewrap/README.Debian.gz>.",
        Machine(clone=0, most=15000),
        "root only",
        "sysctl kernel.unprivileged_userns_clone=1",
    ),
    ("bwrap: setting up uid map: Permission denied", Machine(apparmor=1, most=9), "AppArmor", "sysctl kernel.apparmor"),
    (
        "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted",
        Machine(apparmor=1, most=9),
        "Ubuntu 23.10",
        "kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    (
        "worker: SetupError: mounting tmpfs on /tmp: Permission denied",
        Machine(apparmor=1, most=9),
        "AppArmor",
        "kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    (
        "bwrap: Creating new namespace failed: Operation not permitted",
        CONTAINER,
        "this container may not",
        "--security-opt seccomp=unconfined",
    ),
    ("bwrap: pivot_root: Permission denied", CONTAINER, "this container may not", "Kubernetes"),
    ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", CONTAINER, "hides parts", "systempaths"),
    ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", FREE, "parts of /proc", "procMount"),
    ("worker: SetupError: mounting proc on /proc: Operation not permitted", FREE, "parts of /proc", "procMount"),
    ("bwrap: Creating new namespace failed: Operation not permitted", FREE, "refuses namespaces", "sysctl settings"),
    ("bwrap: Unknown option --size", FREE, "too old", "newer"),
    ("Traceback\n  File \"x.py\"\nImportError: libtorch.so", FREE, "does not load", "import torch"),
    ("something nobody has seen", FREE, "did not start", "report"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "machine", "cause", "cure"), MESSAGES)
def test_cause_and_cure_are_named(message, machine, cause, cure):
    found = explain(message, machine)
    assert cause in found.cause
    assert cure in found.cure
    assert "--no-sandbox" in str(found)
    assert " ".join(message.split()) in str(found)


@pytest.fixture
def fake_bubblewrap(tmp_path, monkeypatch):
    """Put a bwrap on PATH that says something and fails."""

    def make(message, status=1):
        program = tmp_path / "bin" / "bwrap"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho {message!r} >&2\nexit {status}\n")
        program.chmod(0o755)
        for folder in (tmp_path, *tmp_path.parents):  # the user that the sandbox belongs to must find it
            if folder.stat().st_uid == os.getuid() and str(folder).startswith(tempfile.gettempdir() + "/"):
                folder.chmod(folder.stat().st_mode | 0o055)
        monkeypatch.setenv("PATH", str(program.parent))
        return program

    return make


def test_a_bubblewrap_that_fails_is_an_error_with_its_message(fake_bubblewrap):
    fake_bubblewrap("bwrap: setting up uid map: Permission denied")
    with pytest.raises(SandboxError, match="setting up uid map") as caught:
        Sandbox().worker()
    assert "--no-sandbox" in str(caught.value)


def test_a_bubblewrap_that_says_nothing_is_an_error(fake_bubblewrap):
    fake_bubblewrap("", status=9)
    with pytest.raises(SandboxError, match="status 9"), Sandbox():
        pass


def test_no_bubblewrap_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="not installed"), Sandbox():
        pass


def test_another_system_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="needs Linux, and this is macOS"), Sandbox():
        pass


def test_a_system_without_resource_limits_can_still_say_so():
    """Windows has no module `resource`."""
    program = (
        "import sys; sys.modules['resource'] = None; sys.platform = 'win32'\n"
        "from lowprec_lab.grading.sandbox import Sandbox, SandboxError\n"
        "try:\n    Sandbox().worker()\nexcept SandboxError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "this is Windows" in done.stdout


# --- lowprec-lab doctor --grading -------------------------------------------------------------------------------------


def test_the_doctor_makes_a_sandbox_and_tries_it(workers, capsys):
    assert command_line.main(["doctor", "--grading"]) == 0
    shown = capsys.readouterr().out
    assert "sign_bit was judged" in shown
    assert "MISSING" not in shown


def test_the_doctor_names_the_cause(fake_bubblewrap, capsys):
    fake_bubblewrap("bwrap: Unknown option --clearenv")
    assert command_line.main(["doctor", "--grading", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["healthy"]
    assert "too old" in report["lines"][0]["finding"]


def test_the_doctor_notices_what_is_possible(workers, monkeypatch):
    """With the package's graders in view, the line about them fails: the doctor's checks can."""
    shown = package_files(sandbox_view.PACKAGE)
    more = [f"graders/{path.name}" for path in (sandbox_view.PACKAGE / "graders").glob("*.py")]
    monkeypatch.setattr(sandbox_view, "package_files", lambda package: [*shown, *more])
    lines = {line.topic: line.fine for line in check_sandbox().lines}
    assert not lines.pop("the graders")
    assert all(lines.values())


def test_references_run_inside(workers):
    sources = {"decode": reference_source("decode")}
    assert judge(BLANKS["decode"], sources, workers).passed


def test_signals_reach_the_judge_alone(workers):
    """Ctrl-C in a terminal goes to a whole session: the sandbox has one of its own."""
    assert os.getsid(workers._process.pid) != os.getsid(0)
    os.kill(workers._process.pid, signal.SIGCONT)
    assert still_works(workers)
