"""What all tests share: the --answers option, a browser that shows explorers, and which process runs which tests."""

import os

# Tests run in two processes on two cores: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowprec_lab import blanks, exercises
from lowprec_lab.bench.chromium import chromium, find_chromium, show_widget
from lowprec_lab.blanks import BLANKS, load_chapters

load_chapters()

NO_CHROMIUM = (
    "no Chromium was found. Install one (Debian: apt-get install chromium; macOS: brew install --cask chromium) "
    "or set LOWPREC_CHROMIUM to its path"
)

# Files that take a minute or more. They begin first: nothing long is left for one process at the end.
LONGEST_FIRST = (
    "test_course.py", "test_red_team.py", "test_runner.py", "test_plugin.py", "test_journey.py", "test_train.py",
    "test_guide.py", "test_explorers_in_jupyterlab.py", "test_sandbox.py",
)  # fmt: skip
# Files that look at the same verdicts on the answers to an exercise.
BY_EXERCISE = ("test_graders.py", "test_judge.py", "test_verdicts.py")
# Files of long tests that have nothing in common: each may run in any process.
NOTHING_SHARED = ("test_pages.py",)


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """Path of the browser; tests that use it are marked `browser`."""
    path = find_chromium()
    assert path is not None, NO_CHROMIUM
    return path


@pytest.fixture(scope="module")
def browser(chromium_path: str) -> Iterator[object]:
    """A running Chromium, a playwright Browser."""
    with chromium() as running:
        yield running


@pytest.fixture
def show_until(browser) -> Iterator[Callable]:
    """From the selector of what an explorer draws last to a function that shows explorers, each in a page of its own.

    A JavaScript error in one of the pages fails the test.
    """
    pages, errors = [], []

    def show_until(selector: str) -> Callable:
        def show(explorer, background="#ffffff", width=1000, **options):
            page = browser.new_page(viewport={"width": width, "height": 900}, **options)
            pages.append(page)
            page.on("pageerror", lambda error: errors.append(str(error)))
            show_widget(page, explorer, background)
            page.wait_for_selector(selector)
            return page

        return show

    yield show_until
    for page in pages:
        page.close()
    assert errors == []


@pytest.fixture
def answer_in_use(monkeypatch, tmp_path):
    """Put an answer in use as `fill` would, and take it out again."""
    monkeypatch.setenv("LOWPREC_WORK", str(tmp_path))

    def use(name, answer):
        monkeypatch.setitem(blanks.FILLED, name, answer)
        for tell in exercises._LISTENERS:
            tell(name)

    return use


def pytest_addoption(parser):
    parser.addoption(
        "--answers",
        metavar="DIR",
        default=None,
        help="folder with saved answers (or solutions/) that tests/test_exercises.py grades, one test per check",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests that share something run in one process. (pytest-xdist 3.8 does not see a test's group under pytest 9.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # groups are handed out in the order of the tests
    return Groups(config, log)


def group_of(nodeid):
    """What runs in one process: the tests of an exercise, of a file (which may have fixtures), or a test alone."""
    path, _, test = nodeid.partition("::")
    if Path(path).name in NOTHING_SHARED:
        return nodeid
    named = test.partition("[")[2].rstrip("]").split("-") if Path(path).name in BY_EXERCISE else []
    return next((part for part in named if part in BLANKS), path)


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:  # each of these trains a model, once or more
        if item.path.name in BY_EXERCISE and "design_recipe" in item.name:
            item.add_marker(pytest.mark.slow)
    needs_browser = [item for item in items if item.get_closest_marker("browser")]
    if not needs_browser or find_chromium() is not None:
        return
    if os.environ.get("LOWPREC_REQUIRE_BROWSER") == "1":
        raise pytest.UsageError(f"LOWPREC_REQUIRE_BROWSER=1, but {NO_CHROMIUM}")
    for item in needs_browser:
        item.add_marker(pytest.mark.skip(reason=NO_CHROMIUM))
