"""Attacks that reach another submission, another exercise, or a process that is not theirs.

Each leaves a note, and looks for one: that of an earlier exercise, or of the student before. A note that was found
tells a fingerprint which stands nowhere in the source.
"""

import os
import shutil

from lowprec_lab.bench.attacks import Attack, answer_cell

FINGERPRINT = """
    import hashlib
    note = hashlib.sha256(b"@MARK@").hexdigest()
"""


def leaves_and_finds(leave: str, find: str) -> dict[str, str]:
    """Two answers that first look for a note (an expression), and leave one where there is none."""
    body = f"""
        import os, socket, time
        try:
            found = {find}
        except Exception:
            found = ""
        if found:
            raise ValueError(found)
        try:
            {leave}
        except Exception:
            pass
        raise ValueError("left a note")
    """
    return {name: answer_cell(name, body, FINGERPRINT) for name in ("bit_pattern", "max_finite")}


def file_in(folder: str) -> dict[str, str]:
    path = f"{folder}/@MARK@-note"
    return leaves_and_finds(f"open({path!r}, 'w').write(note)", f"open({path!r}).read()")


BLOCK = "__import__('multiprocessing.shared_memory').shared_memory.SharedMemory('@MARK@', create={create}, size=64)"
C = "__import__('ctypes')"
SEGMENT = (
    f"(lambda c: (setattr(c.shmat, 'restype', {C}.c_void_p),"
    " c.shmat(c.shmget(int('@MARK@'[-7:], 16), 64, {{flags}}), None, 0))[1])"
    f"({C}.CDLL(None))"
)

LISTENER = r"""
    import hashlib, os
    note = hashlib.sha256(b"@MARK@").hexdigest()
    LINES = [
        "import socket, sys",
        "server = socket.socket(socket.AF_UNIX)",
        "server.bind(chr(0) + '@MARK@')",
        "server.listen()",
        "server.settimeout(50)",
        "while True: server.accept()[0].sendall(sys.argv[1].encode())",
    ]
    def ask():
        import socket
        asking = socket.socket(socket.AF_UNIX)
        asking.connect(chr(0) + "@MARK@")
        return asking.recv(100).decode()
    def listen():
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", chr(10).join(LINES), note], start_new_session=True)
        time.sleep(1)
"""

SIGNAL = """
    import os, signal
    machine = os.readlink("/proc/self/ns/pid")
    parent = os.getppid()
    if parent > 1 or machine != "@PIDS@":
        os.kill(parent, signal.{name})
    return torch.zeros(x.shape, dtype=torch.int32)
"""


def link_to_a_neighbour(folder, course):
    """The notebook that is handed in is a link to that of an honest student."""
    page = folder / "01_bit_layouts.ipynb"
    page.unlink()
    [honest, *_] = sorted((course / "submitted").glob("*honest*/01_bit_layouts/01_bit_layouts.ipynb"))
    page.symlink_to(os.path.relpath(honest, folder))


def folder_that_is_a_link(folder, course):
    """The folder that is handed in is a link to that of an honest student."""
    [honest, *_] = sorted((course / "submitted").glob("*honest*/01_bit_layouts"))
    shutil.rmtree(folder)
    folder.symlink_to(os.path.relpath(honest, folder.parent))


def links_to_everywhere(folder, course):
    """Beside the notebook lie links to the seed and the gradebook, and a link to itself."""
    (folder / "seed.txt").symlink_to(course / "seed")
    (folder / "gradebook.txt").symlink_to(course / "gradebook.db")
    (folder / "again").symlink_to(".")


def other_pages(folder, course):
    """Beside the notebook lies a module that Python would import in place of torch, and a second notebook."""
    (folder / "torch.py").write_text("raise SystemExit('no torch')\n")
    (folder / "sitecustomize.py").write_text("open('@DROP@/site', 'w')\n")
    (folder / "02_extra.ipynb").write_bytes((folder / "01_bit_layouts.ipynb").read_bytes())


ATTACKS = [
    Attack("note_in_tmp", "Leaves a note in /tmp and looks for one.", answers=file_in("/tmp"), by_students=2),
    Attack(
        "note_in_var_tmp", "Leaves a note in /var/tmp and looks for one.", answers=file_in("/var/tmp"), by_students=2
    ),
    Attack(
        "note_in_shared_memory",
        "Leaves a note in /dev/shm and looks for one.",
        answers=file_in("/dev/shm"),
        by_students=2,
    ),
    Attack(
        "note_in_the_home",
        "Leaves a note in its home and looks for one.",
        answers=leaves_and_finds(
            "open(os.path.expanduser('~/@MARK@-note'), 'w').write(note)",
            "open(os.path.expanduser('~/@MARK@-note')).read()",
        ),
        by_students=2,
    ),
    Attack(
        "note_beside_it", "Leaves a note in its working folder and looks for one.", answers=file_in("."), by_students=2
    ),
    Attack(
        "note_in_a_block",
        "Leaves a note in a named block of shared memory and looks for one.",
        answers=leaves_and_finds(
            "block = " + BLOCK.format(create=True) + "; block.buf[:64] = note.encode(); globals()['kept'] = block",
            "bytes(" + BLOCK.format(create=False) + ".buf[:64]).decode()",
        ),
        by_students=2,
    ),
    Attack(
        "note_in_a_segment",
        "Leaves a note in a System V segment of shared memory and looks for one.",
        answers=leaves_and_finds(
            f"{C}.memmove(" + SEGMENT.format(flags="0o1666") + ", note.encode(), 64)",
            f"{C}.string_at(" + SEGMENT.format(flags="0o666") + ", 64).decode().strip(chr(0))",
        ),
        by_students=2,
    ),
    Attack(
        "listens_on_a_socket",
        "Starts a process that listens on an abstract socket and tells a secret to whoever connects.",
        answers={
            name: answer_cell(
                name,
                """
                try:
                    found = ask()
                except OSError:
                    found = ""
                    listen()
                raise ValueError(found or "listens")
                """,
                LISTENER,
            )
            for name in ("bit_pattern", "max_finite")
        },
        by_students=2,
    ),
    Attack(
        "shadow_of_the_package",
        "Looks whether it may rewrite a module of the package on disk, for those who come later.",
        """
        import os
        import lowprec_lab.formats
        if os.access(lowprec_lab.formats.__file__, os.W_OK):
            raise ValueError(note)
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
        before=FINGERPRINT,
        not_on_stock="the package that measures is not laid open to it",
    ),
    Attack("kills_its_parent", "Sends SIGKILL to the process that started it.", SIGNAL.format(name="SIGKILL")),
    Attack("stops_its_parent", "Sends SIGSTOP to the process that started it.", SIGNAL.format(name="SIGSTOP")),
    Attack("interrupts_its_parent", "Sends SIGINT to the process that started it.", SIGNAL.format(name="SIGINT")),
    Attack(
        "kills_its_group",
        "Sends SIGTERM and SIGKILL to its whole process group.",
        "import os, signal\nos.killpg(0, signal.SIGTERM)\nos.killpg(0, signal.SIGKILL)\n"
        "return torch.zeros(x.shape, dtype=torch.int32)",
    ),
    Attack(
        "changes_a_neighbours_page",
        "Rewrites the submissions of everybody else.",
        """
        import glob
        for path in glob.glob("@COURSE@/[sa]u*/*honest*/*/*.ipynb"):
            open(path, "w").write("{}")
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack(
        "hands_in_a_link",
        "Hands in a link to the notebook of an honest student.",
        place=link_to_a_neighbour,
        honest=(),
    ),
    Attack(
        "hands_in_a_linked_folder",
        "Hands in a link to the folder of an honest student.",
        place=folder_that_is_a_link,
        honest=(),
    ),
    Attack(
        "links_beside_the_page",
        "Hands in links to the seed and the gradebook, and a link to its own folder.",
        "found = open('seed.txt').read()\nraise ValueError(found)",
        place=links_to_everywhere,
    ),
    Attack(
        "modules_beside_the_page",
        "Hands in a torch.py, a sitecustomize.py and a second notebook.",
        "import sitecustomize\nreturn torch.zeros(x.shape, dtype=torch.int32)",
        place=other_pages,
    ),
]
