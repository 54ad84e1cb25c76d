"""A course in a folder of its own, in which attacks are graded by nbgrader, and what can be found there afterwards.

The evidence is what an attacker can hope for: points, a secret in what they get back, a file changed or left, a word
sent over the network, a process that stays, a script in a page that an instructor opens, another student's grade.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import nbformat

from lowprec_lab import authoring
from lowprec_lab.bench.attacks import CHAPTER, Attack
from lowprec_lab.bench.classroom import nobodys_settings
from lowprec_lab.blanks import BLANKS
from lowprec_lab.grading.course import CONFIG, init_course
from lowprec_lab.sources import reference_source

# nbgrader as it is without this package's engine.
STOCK_CONFIG = """\
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "stock"
c.CourseDirectory.root = str(HERE)
c.CourseDirectory.db_url = f"sqlite:///{HERE / 'gradebook.db'}"
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
"""
# In the jail: run nbgrader, then say which processes with the mark are still there. All end with the jail.
_LEFT = "red team: left "
_IN_JAIL = f"""
import glob, hashlib, subprocess, sys
mark, *command = sys.argv[1:]
note = hashlib.sha256(mark.encode()).hexdigest()
status = subprocess.call(command)
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        words = open(path, "rb").read().decode(errors="replace").split(chr(0))
    except OSError:
        continue
    jail = words[0].endswith("bwrap")
    if (mark in words or note in words) and not jail and words[1:3] != ["-c", sys.orig_argv[2]]:
        print("{_LEFT}" + " ".join(words[3:]), flush=True)
sys.exit(status)
"""
HONEST_ANSWERS = ("bit_pattern", "max_finite", "machine_epsilon")
_SCORES = """
    SELECT submitted_assignment.student_id, base_cell.name, grade.auto_score, grade.manual_score, grade.extra_credit
    FROM grade JOIN base_cell ON base_cell.id = grade.cell_id
    JOIN submitted_notebook ON submitted_notebook.id = grade.notebook_id
    JOIN submitted_assignment ON submitted_assignment.id = submitted_notebook.assignment_id
"""


def student_of(number: int, attack: Attack) -> str:
    """The student who hands in an attack: nbgrader grades them in the order of their names."""
    return f"s{number:04d}-{attack.kind}-{attack.name}"


@dataclass
class Room:
    """One course, with its secrets and canaries. mark: a word that occurs nowhere else.

    log: what the last command said; peak_bytes: the most memory that nbgrader's own process took; left: the command
    lines of processes that attacks had started and that were there when it ended.
    """

    place: Path
    stock: bool
    mark: str = field(default_factory=lambda: "rt" + secrets.token_hex(8))
    heard: set[str] = field(default_factory=set)
    log: str = ""
    port: int = 0
    peak_bytes: int = 0
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.secrets = {
            kind: f"secret-{secrets.token_hex(16)}" for kind in ("seed", "gradebook", "environment", "home")
        }
        self.secrets["note"] = hashlib.sha256(self.mark.encode()).hexdigest()
        for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname"):
            with contextlib.suppress(OSError):
                self.secrets[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()

    @property
    def course(self) -> Path:
        return self.place / "course"

    @property
    def home(self) -> Path:
        return self.place / "home"

    # --- before ---

    def prepare(self) -> None:
        """Make the course with its release. Its page holds the answers and the checks, and nothing that takes time."""
        for folder in ("home", "drop", "canary"):
            (self.place / folder).mkdir(parents=True)
        (self.home / ".red_team").write_text(self.secrets["home"])
        init_course(self.course, "red-team", [CHAPTER])
        if self.stock:
            (self.course / CONFIG).write_text(STOCK_CONFIG)
        seed = self.course / "seed"
        seed.write_text(self.secrets["seed"] + "\n")
        page = self.course / "source" / CHAPTER / f"{CHAPTER}.ipynb"
        nbformat.write(_trimmed(authoring.source_notebook(authoring.SOLUTIONS / f"{CHAPTER}.py")), page)
        self.nbgrader("generate_assignment", CHAPTER, limit_s=120)
        self.released = nbformat.read(self.course / "release" / CHAPTER / f"{CHAPTER}.ipynb", as_version=4)

    def hand_in_honestly(self, student: str) -> None:
        """A submission of right answers, which must be graded right whoever sits beside it."""
        attack = Attack("", "", honest=HONEST_ANSWERS)
        self._write(student, attack.submit(self.released, {}))

    def hand_in(self, student: str, attack: Attack) -> None:
        """The attack's submission."""
        self._write(student, attack.submit(self.released, self._words(attack)))
        if attack.place:
            attack.place(self._folder(student), self.course)

    def _words(self, attack: Attack) -> dict[str, str]:
        canary = self.place / "canary" / f"{attack.name}.txt"
        canary.write_text(self._secret_of(attack))
        drop = self.place / "drop" / attack.name
        drop.mkdir(exist_ok=True)
        places = {"COURSE": self.course, "CANARY": canary, "DROP": drop, "HOME": self.home}
        words = {word: str(path) for word, path in places.items()}
        return words | {"MARK": self.mark, "NAME": attack.name, "PORT": str(self.port), "PIDS": _process_namespace()}

    def _secret_of(self, attack: Attack) -> str:
        return "secret-" + hashlib.sha256(f"{self.mark} {attack.name}".encode()).hexdigest()[:32]

    def _folder(self, student: str) -> Path:
        return self.course / "submitted" / student / CHAPTER

    def _write(self, student: str, notebook: nbformat.NotebookNode) -> None:
        folder = self._folder(student)
        folder.mkdir(parents=True)
        (folder / f"{CHAPTER}.ipynb").write_text(json.dumps(notebook, indent=1), encoding="utf-8")

    def name_a_student(self, student: str) -> None:
        """Put a secret into the gradebook: a student's name."""
        with contextlib.closing(sqlite3.connect(self.course / "gradebook.db", timeout=20)) as book, book:
            book.execute("INSERT OR IGNORE INTO student (id) VALUES (?)", (student,))
            book.execute("UPDATE student SET last_name = ? WHERE id = ?", (self.secrets["gradebook"], student))

    # --- grading ---

    def nbgrader(self, *words: str, limit_s: float) -> bool:
        """Run one of nbgrader's commands in the course. Returns whether it ended in time; its output is in `log`."""
        command = [sys.executable, "-m", "nbgrader", *words]
        command = [*_jail(self.place), sys.executable, "-c", _IN_JAIL, self.mark, *command] if self.stock else command
        log = self.place / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=self.course, env=self._environment(), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            ends = time.monotonic() + limit_s
            while process.poll() is None and time.monotonic() < ends:
                self.peak_bytes = max(self.peak_bytes, _memory_of(process.pid))
                time.sleep(0.2)
            in_time = process.poll() is not None
            if not in_time:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.log = log.read_text(errors="replace")
        self.left += [line.removeprefix(_LEFT) for line in self.log.splitlines() if line.startswith(_LEFT)]
        return in_time

    def _environment(self) -> dict[str, str]:
        return nobodys_settings(self.home) | {
            "LOWPREC_CANARY": self.secrets["environment"],
            "RED_TEAM": self.mark,
        }

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen on loopback for what an attack may send: its name."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]

            def listen() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        line, _ = server.accept()
                        with line, contextlib.suppress(OSError):
                            line.settimeout(2)
                            self.heard.add(line.recv(100).decode(errors="replace"))

            threading.Thread(target=listen, daemon=True).start()
            yield
            server.shutdown(socket.SHUT_RDWR)

    # --- afterwards ---

    def gains(self, student: str, attack: Attack) -> list[str]:
        """What an attack has gained, as sentences; nothing if it got what its honest part deserves."""
        return [
            *self._points(student, attack),
            *self._leaks(student, attack),
            *self._changes(attack),
            *([f"{attack.name} was heard on the network"] if attack.name in self.heard else []),
        ]

    def scores(self) -> dict[str, dict[str, float | None]]:
        """{student: {exercise: points}} of the gradebook; None where nothing was graded."""
        with contextlib.closing(sqlite3.connect(f"file:{self.course / 'gradebook.db'}?mode=ro", uri=True)) as book:
            rows = book.execute(_SCORES).fetchall()
        found: dict[str, dict[str, float | None]] = {}
        for student, cell, automatic, manual, extra in rows:
            points = automatic if manual is None else manual
            score = points if points is None else points + (extra or 0)
            found.setdefault(student, {})[cell.removeprefix("check_")] = score
        return found

    def _points(self, student: str, attack: Attack) -> list[str]:
        return [
            f"{points:g} points for {name}, which deserves {attack.earns.get(name, 0):g}"
            for name, points in self.scores().get(student, {}).items()
            if (points or 0) > attack.earns.get(name, 0) + 1e-9
        ]

    def lost(self, student: str, attack: Attack) -> list[str]:
        """The exercises for which less was given than the honest part deserves."""
        scores = self.scores().get(student, {})
        return [name for name, points in attack.earns.items() if (scores.get(name) or 0) < points - 1e-9]

    def disturbed(self, honest: list[str]) -> list[str]:
        """The honest students who were not graded, or not right."""
        try:
            scores = self.scores()
        except sqlite3.Error as error:
            return [f"the gradebook cannot be read: {error}"]
        full = {name: (float(BLANKS[name].points) if name in HONEST_ANSWERS else 0.0) for name in _exercises()}
        wrong = {student: _difference(scores.get(student, {}), full) for student in honest}
        return [f"{student} was not graded as they deserve ({what})" for student, what in wrong.items() if what]

    def _leaks(self, student: str, attack: Attack) -> list[str]:
        texts = [path.read_bytes() for path in self._pages(student)]
        texts += [path.read_bytes() for path in (self.place / "drop" / attack.name).glob("*")]
        known = {**self.secrets, "a file": self._secret_of(attack)}
        return [f"read {kind}" for kind, secret in known.items() if any(secret.encode() in text for text in texts)]

    def _pages(self, student: str) -> list[Path]:
        places = [self.course / folder / student / CHAPTER for folder in ("autograded", "feedback")]
        return [path for place in places if place.is_dir() for path in place.iterdir() if path.is_file()]

    def _changes(self, attack: Attack) -> list[str]:
        found = [f"left {path.name} outside" for path in (self.place / "drop" / attack.name).glob("*")]
        canary = self.place / "canary" / f"{attack.name}.txt"
        if not canary.is_file() or canary.read_text() != self._secret_of(attack):
            found.append("changed a file")
        return found

    def changed_outside(self, honest: list[str]) -> list[str]:
        """What of the course's own has changed: the seed, the home, the pages of honest students, new files."""
        found = []
        if (self.course / "seed").read_text().strip() != self.secrets["seed"]:
            found.append("changed the seed")
        if (self.home / ".red_team").read_text() != self.secrets["home"]:
            found.append("changed the home")
        if (self.course / "left").exists():
            found.append("left a file in the course")
        page = json.dumps(Attack("", "", honest=HONEST_ANSWERS).submit(self.released, {}), indent=1)
        handed_in = [self._folder(student) / f"{CHAPTER}.ipynb" for student in honest]
        return found + [f"changed {path.parts[-3]}'s page" for path in handed_in if path.read_text("utf-8") != page]

    def remains(self) -> list[str]:
        """End the processes that are left of a grading; the command lines of those that attacks had started."""
        found = list(self.left)
        if self.stock:
            return found  # the others have ended with their jail
        for folder in glob.glob("/proc/[0-9]*"):
            with contextlib.suppress(OSError):
                words = Path(folder, "cmdline").read_bytes().split(b"\0")
                environment = Path(folder, "environ").read_bytes().split(b"\0")
                by_attack = self.mark.encode() in words or self.secrets["note"].encode() in words
                if by_attack or f"RED_TEAM={self.mark}".encode() in environment:
                    found += [b" ".join(words[3:]).decode(errors="replace")] if by_attack else []
                    os.kill(int(Path(folder).name), signal.SIGKILL)
        return found

    def left_on_the_machine(self) -> list[str]:
        """Files that attacks have left outside of the room. They stay: nothing is deleted where an attack has been."""
        folders = ("/tmp", "/var/tmp", "/dev/shm", str(Path.home()))
        return [f"left {path}" for folder in folders for path in glob.glob(f"{folder}/{self.mark}*")]

    # --- the pages that people open ---

    def pages_for_people(self, student: str) -> dict[str, str]:
        """The HTML that an instructor gets to see of a submission: the form grader's page, and the feedback."""
        graded = self.course / "autograded" / student / CHAPTER / f"{CHAPTER}.ipynb"
        feedback = self.course / "feedback" / student / CHAPTER / f"{CHAPTER}.html"
        pages = {"form grader": _form_grader_page(graded, student)} if graded.is_file() else {}
        return pages | ({"feedback": feedback.read_text("utf-8")} if feedback.is_file() else {})


def _jail(place: Path) -> list[str]:
    """Bubblewrap around stock nbgrader, which holds no attack back: of the machine, only the room may be written.

    Inside are no rights of root, and a process namespace, a /tmp and a /dev of its own; all files can be read, as they
    can where a class is graded. Raises RuntimeError where there is no bubblewrap.
    """
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise RuntimeError("attacks on stock nbgrader run in a jail of bubblewrap. Install it (Debian: bubblewrap)")
    return [
        bubblewrap, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--cap-drop", "ALL", "--die-with-parent",
        "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/var/tmp",
        "--bind", str(place), str(place), "--",
    ]  # fmt: skip


def remove(place: Path) -> None:
    """Remove the folder of rooms. Raises RuntimeError, and removes nothing, where something is mounted in it."""
    mounts = Path("/proc/self/mountinfo")
    if mounts.is_file():
        inside = f"{os.path.realpath(place)}/"
        points = [line.split()[4] for line in mounts.read_text().splitlines()]
        if any(f"{point}/".startswith(inside) for point in points):
            raise RuntimeError(
                f"an attack has mounted something in {place}: nothing there was removed. Look before you do"
            )
    shutil.rmtree(place, ignore_errors=True)


def _difference(scores: dict[str, float | None], full: dict[str, float]) -> str:
    if not scores or None in scores.values():
        return "not at all"
    return ", ".join(f"{scores[name]:g} of {most:g} for {name}" for name, most in full.items() if scores[name] != most)


def _memory_of(process: int) -> int:
    """The most memory that a process has taken, in bytes; 0 where that cannot be known."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return 0


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _exercises() -> list[str]:
    return [name for name, blank in BLANKS.items() if blank.chapter.name == CHAPTER]


def _trimmed(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    keep = ("setup", "helpers")
    notebook.cells = [
        cell for cell in notebook.cells if cell.id in keep or cell.id in BLANKS or cell.id.startswith("check-")
    ]
    assert all(reference_source(name) for name in _exercises()), "the attacks need the references: run this in a clone"
    return notebook


def _form_grader_page(notebook: Path, student: str) -> str:
    """What nbgrader's form grader serves for an autograded notebook."""
    import nbgrader
    from nbconvert.exporters import HTMLExporter
    from traitlets.config import Config

    templates = Path(nbgrader.__file__).parent / "server_extensions" / "formgrader" / "templates"
    config = Config()
    config.HTMLExporter.template_name = "formgrade"
    config.HTMLExporter.extra_template_basedirs = [str(templates)]
    resources = {
        "assignment_id": CHAPTER, "notebook_id": CHAPTER, "submission_id": "0" * 32, "index": 0, "total": 1,
        "base_url": "", "student": student, "last_name": "", "first_name": "", "notebook_path": CHAPTER,
    }  # fmt: skip
    return HTMLExporter(config=config).from_filename(str(notebook), resources=resources)[0]


class _ActiveContent(HTMLParser):
    """Finds what a browser would run or fetch: scripts, handlers, addresses of scripts with the mark in them."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark, self.found, self.inside = mark, [], ""

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.inside = tag if tag in ("script", "style") else self.inside
        for name, value in attributes:
            text = (value or "").strip().lower()
            runs = name.startswith("on") or name in ("src", "href", "data", "action", "srcdoc", "formaction", "content")
            if self.mark in text and runs and self._is_active(name, text):
                self.found.append(f"<{tag} {name}>")

    def _is_active(self, name: str, text: str) -> bool:
        schemes = ("javascript:", "data:text/html", "data:image/svg", "http:", "https:", "//")
        plain = "".join(text.split())
        return name.startswith("on") or name in ("srcdoc", "content") or plain.startswith(schemes)

    def handle_endtag(self, tag: str) -> None:
        self.inside = "" if tag == self.inside else self.inside

    def handle_data(self, data: str) -> None:
        if self.inside == "script" and self.mark in data:
            self.found.append("<script>")


def active_content(page: str, mark: str) -> list[str]:
    """What in a page would run or fetch something with `mark` in it, as tags."""
    parser = _ActiveContent(mark)
    parser.feed(page)
    parser.close()
    return list(dict.fromkeys(parser.found))
