"""What tests of a class share: a machine's worth of class, pages with answers in them, and the gradebook's scores."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat

from lowprec_lab import authoring
from lowprec_lab.authoring import source_notebook
from lowprec_lab.bench import classroom
from lowprec_lab.blanks import BLANKS, load_chapters
from lowprec_lab.grading.course import Course, init_course

ROOT = Path(__file__).resolve().parents[1]
_TOKEN = "secret"


@dataclass
class Room:
    """A home, an exchange, and nbgrader run as whoever is at home there."""

    place: Path

    def __post_init__(self) -> None:
        self.exchange.mkdir(exist_ok=True)
        self.exchange.chmod(0o777)

    @property
    def work(self) -> Path:
        return self.place / "work"

    @property
    def exchange(self) -> Path:
        return self.place / "exchange"

    @property
    def environment(self) -> dict[str, str]:
        return classroom.nobodys_settings(self.place / "home", self.work)

    def run(self, folder: Path, *words: str, status: int = 0) -> str:
        """Run an nbgrader command in `folder`, and return what it said."""
        command = [sys.executable, "-m", "nbgrader", *words, f"--Exchange.root={self.exchange}"]
        done = subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True, timeout=900)
        said = done.stdout + done.stderr
        assert done.returncode == status, f"nbgrader {' '.join(words)}:\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
        return said

    def course(self, course_id: str, chapters: list | None = None, release: bool = True) -> Course:
        """A new course, its assignments generated and released."""
        load_chapters()
        made = init_course(self.place / course_id, course_id, chapters)
        for page in made.pages:
            self.run(made.folder, "generate_assignment", page.stem)
            if release:
                self.run(made.folder, "release_assignment", page.stem)
        return made

    @contextmanager
    def form_grader(self, folder: Path) -> Iterator[str]:
        """A Jupyter server in a course's folder: its address. `address + path + "?token=secret"` opens a page."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "jupyter", "server", "--no-browser", f"--ServerApp.port={port}"]
        command += [f"--IdentityProvider.token={_TOKEN}", "--ServerApp.ip=127.0.0.1", "--allow-root"]
        command += [f"--Exchange.root={self.exchange}"]
        log = self.place / "server.log"
        with log.open("w") as output:
            server = subprocess.Popen(command, cwd=folder, env=self.environment, stdout=output, stderr=output)
        try:
            address = f"http://127.0.0.1:{port}/"
            read_page(f"{address}api/status?token={_TOKEN}", server)
            yield address
        finally:
            server.terminate()
            server.wait(timeout=30)


def read_page(url: str, server: subprocess.Popen | None = None, seconds: int = 90) -> str:
    """What a server answers, as soon as it does."""
    for _ in range(4 * seconds):
        assert server is None or server.poll() is None, "the Jupyter server ended"
        try:
            with urllib.request.urlopen(url, timeout=seconds) as reply:
                return reply.read().decode()
        except urllib.error.HTTPError:  # it answers, and not with the page
            raise
        except urllib.error.URLError:
            time.sleep(0.25)
    raise AssertionError(f"the Jupyter server did not start in {seconds} s")


# --- pages ------------------------------------------------------------------------------------------------------------


def answered(page: Path, answers: dict[str, str]) -> nbformat.NotebookNode:
    """The released page at `page`, with the given sources in its answer cells."""
    return classroom.answered(nbformat.read(page, as_version=4), answers)


def references(name: str) -> dict[str, str]:
    """The reference answers of a chapter by exercise."""
    cells = source_notebook(authoring.SOLUTIONS / f"{name}.py").cells
    return {cell.id: cell.source for cell in cells if cell.id in BLANKS}


def released(course: Course, name: str) -> Path:
    return course.folder / "release" / name / f"{name}.ipynb"


def hand_in(course: Course, student: str, name: str, page: object, timestamp: str = "") -> Path:
    """A submission as a learning-management system gives it: a file in submitted/. page: a notebook, or its bytes."""
    path = classroom.submission(course.folder, student, name)
    path.write_bytes(page) if isinstance(page, bytes) else nbformat.write(page, path)
    if timestamp:
        (path.parent / "timestamp.txt").write_text(timestamp)
    return path


# --- the gradebook ----------------------------------------------------------------------------------------------------


def gradebook(course: Course) -> object:
    from nbgrader.api import Gradebook

    return Gradebook(f"sqlite:///{course.folder / 'gradebook.db'}")


def scores(course: Course, student: str, name: str) -> dict[str, tuple[float, float]]:
    """Points of each exercise in the gradebook, and the most there are."""
    with gradebook(course) as book:
        [notebook] = book.find_submission(name, student).notebooks
        return {grade.name.removeprefix("check_"): (grade.auto_score, grade.max_score) for grade in notebook.grades}


def points_of(name: str) -> dict[str, float]:
    return {exercise: blank.points for exercise, blank in BLANKS.items() if blank.chapter.name == name}


def full_marks(name: str) -> dict[str, tuple[float, float]]:
    return {exercise: (points, points) for exercise, points in points_of(name).items()}


def no_marks(name: str) -> dict[str, tuple[float, float]]:
    return {exercise: (0, points) for exercise, points in points_of(name).items()}


def verdicts(course: Course, student: str, name: str) -> str:
    """What an autograded page says under each check, as text."""
    page = course.folder / "autograded" / student / name / f"{name}.ipynb"
    checks = [cell for cell in nbformat.read(page, as_version=4).cells if cell.source.startswith("check(")]
    outputs = [output for cell in checks for output in cell.outputs]
    return "\n".join(str(output.get("data", output).get("text/plain", output)) for output in outputs)
