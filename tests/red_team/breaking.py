"""Attacks that break what grades: its memory, disk, processes, time and output; each is bounded in itself."""

from lowprec_lab.bench.attacks import Attack

NOTHING = "return torch.zeros(x.shape, dtype=torch.int32)"
STAYS = """
    import os, subprocess, sys
    def stay():
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)", "@MARK@", "@NAME@"], start_new_session=True
        )
"""

ATTACKS = [
    Attack(
        "fork_bomb",
        "Starts 500 processes.",
        """
        import os, time
        for _ in range(500):
            try:
                if os.fork() == 0:
                    time.sleep(5)
                    os._exit(0)
            except OSError:
                break
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack(
        "thread_bomb",
        "Starts 2,000 threads.",
        """
        import threading, time
        for _ in range(2000):
            try:
                threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
            except RuntimeError:
                break
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack(
        "memory",
        "Takes 2 GiB of memory, piece by piece.",
        "held = [bytearray(2**26) for _ in range(32)]\n" + NOTHING,
    ),
    Attack("memory_at_once", "Asks for 2^50 bytes.", "return torch.zeros(2**48, dtype=torch.int32)"),
    Attack(
        "memory_when_loaded",
        "Takes 2 GiB of memory when its cell is loaded.",
        NOTHING,
        before="held = [b'1' * 2**26 for _ in range(32)]",
    ),
    Attack(
        "disk",
        "Writes files of 256 MiB.",
        """
        import os, tempfile
        for folder in (tempfile.gettempdir(), "@DROP@", "."):
            try:
                with open(os.path.join(folder, "@MARK@-disk"), "wb") as file:
                    for _ in range(256):
                        file.write(bytes(2**20))
            except OSError:
                pass
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack(
        "many_files",
        "Makes 20,000 files, and opens as many as it can.",
        """
        import tempfile
        folder = tempfile.mkdtemp(prefix="@MARK@")
        held = []
        for number in range(20_000):
            try:
                file = open(f"{folder}/{number}", "w")
            except OSError:
                break
            held.append(file)
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack(
        "endless_output",
        "Prints for 15 s, to Python's output and to the process's.",
        """
        import os, time
        ends = time.monotonic() + 15
        while time.monotonic() < ends:
            print("x" * 10_000)
            os.write(1, b"x" * 10_000)
            os.write(2, b"y" * 10_000)
            time.sleep(0.005)
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack(
        "endless_loop",
        "Loops for 60 s and keeps all interrupts to itself.",
        """
        import time
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            try:
                while time.monotonic() < ends:
                    pass
            except BaseException:
                pass
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack(
        "endless_loop_when_loaded",
        "Loops for 60 s when its cell is loaded.",
        NOTHING,
        before="""
            import time
            ends = time.monotonic() + 60
            loop = [1 for _ in iter(lambda: time.monotonic() < ends, False)]
        """,
    ),
    Attack(
        "endless_loop_in_c",
        "Holds the interpreter in one call of C.",
        "import re\nre.match('(a+)+$', 'a' * 30 + 'b')\n" + NOTHING,
    ),
    Attack("exit", "Calls exit().", "import sys\nsys.exit(0)"),
    Attack("exit_at_once", "Ends its process without a word.", "import os\nos._exit(0)"),
    Attack(
        "exit_when_loaded", "Ends its process when its cell is loaded.", NOTHING, before="import os\ngone = os._exit(0)"
    ),
    Attack("segfault", "Writes to address 0.", "import ctypes\nctypes.memset(0, 1, 1)"),
    Attack("abort", "Aborts its process.", "import os\nos.abort()"),
    Attack("kills_itself", "Sends SIGKILL to itself.", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"),
    Attack(
        "stops_itself",
        "Sends SIGSTOP to itself.",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n" + NOTHING,
    ),
    Attack(
        "ignores_signals",
        "Ignores every signal that can be ignored, and sleeps.",
        """
        import signal, time
        for number in range(1, 64):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            time.sleep(0.1)
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack("recursion", "Calls itself for ever.", "return bit_pattern(x)"),
    Attack(
        "deep_recursion",
        "Calls itself until the stack of C is used up.",
        """
        import sys, threading
        sys.setrecursionlimit(10**8)
        class Deep:
            def __repr__(self):
                return repr(self) + "!"
        return repr(Deep())
        """,
    ),
    Attack(
        "parser_bomb",
        "Makes Python's parser use up the stack.",
        "return eval('(' * 90 + '1' + ')' * 90) * eval('-' * 100_000 + '1')",
    ),
    Attack(
        "source_of_a_megabyte",
        "Has a cell of a megabyte, all in one expression.",
        answers={"bit_pattern": "@fill\ndef bit_pattern(x):\n    return " + "+".join(["1"] * 500_000)},
    ),
    Attack(
        "threads_that_stay",
        "Starts threads that work on after the call.",
        """
        import threading, time
        def work():
            ends = time.monotonic() + 30
            while time.monotonic() < ends:
                sum(range(10_000))
        for _ in range(4):
            threading.Thread(target=work).start()
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack(
        "processes_that_stay",
        "Starts a process in a session of its own, which stays when the answer is gone.",
        "stay()\n" + NOTHING,
        before=STAYS,
    ),
    Attack(
        "daemon",
        "Forks twice and lets go of everything, as daemons do.",
        """
        import os
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                stay()
            os._exit(0)
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
        before=STAYS,
    ),
    Attack(
        "at_its_end",
        "Asks Python to run more of it when the process ends.",
        """
        import atexit, time
        atexit.register(time.sleep, 30)
        atexit.register(stay)
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
        before=STAYS,
    ),
    Attack(
        "large_results",
        "Returns 64 MB for every call, so that whoever keeps results runs out of memory.",
        "return torch.zeros(2**23 - 4096, dtype=torch.float64)",
        exercise="decode",
    ),
    Attack("many_parts", "Returns ten million numbers in a list.", "return [0] * 10_000_000"),
    Attack(
        "nested_parts",
        "Returns a tuple that is nested 50,000 deep.",
        "result = ()\nfor _ in range(50_000):\n    result = (result,)\nreturn result",
    ),
    Attack("part_of_itself", "Returns a list that holds itself.", "result = []\nresult.append(result)\nreturn result"),
    Attack("large_number", "Returns a number of ten million bits.", "return 1 << 10_000_000", exercise="max_finite"),
    Attack("long_text", "Returns 100 MB of text.", "return 'x' * 100_000_000", exercise="max_finite"),
    Attack(
        "strange_text",
        "Returns text that is no text: half of a pair.",
        "return chr(0xD800) * 10",
        exercise="max_finite",
    ),
    Attack("long_exception", "Raises an exception with 50 MB of text.", "raise ValueError('x' * 50_000_000)"),
    Attack(
        "exception_that_raises",
        "Raises an exception whose text cannot be had.",
        "raise Odd()",
        before="""
            class Odd(Exception):
                def __str__(self):
                    raise Odd()
                __repr__ = __str__
        """,
    ),
    Attack(
        "exception_above_exceptions",
        "Raises what is no Exception: a BaseException of its own, a KeyboardInterrupt, a GeneratorExit.",
        """
        calls = globals().setdefault("calls", [])
        calls.append(1)
        class Own(BaseException):
            pass
        raise [Own, KeyboardInterrupt, GeneratorExit][len(calls) % 3]()
        """,
    ),
    Attack(
        "slow_to_say",
        "Raises an exception whose text takes 60 s.",
        "raise Slow()",
        before="""
            class Slow(Exception):
                def __str__(self):
                    import time
                    time.sleep(60)
                    return "slow"
        """,
    ),
]
