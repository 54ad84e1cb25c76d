"""What all tests share: the --answers option, a browser that shows explorers, and what happens where there is none."""

import os

# Tests run in two processes on two cores: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator

import pytest

from lowprec_lab.bench.chromium import chromium, find_chromium, show_widget
from lowprec_lab.blanks import BLANKS, load_chapters

load_chapters()

NO_CHROMIUM = (
    "no Chromium was found. Install one (Debian: apt-get install chromium; macOS: brew install --cask chromium) "
    "or set LOWPREC_CHROMIUM to its path"
)


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


def pytest_addoption(parser):
    parser.addoption(
        "--answers",
        metavar="DIR",
        default=None,
        help="folder with saved answers (or solutions/) that tests/test_exercises.py grades, one test per check",
    )


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    needs_browser = [item for item in items if item.get_closest_marker("browser")]
    if not needs_browser or find_chromium() is not None:
        return
    if os.environ.get("LOWPREC_REQUIRE_BROWSER") == "1":
        raise pytest.UsageError(f"LOWPREC_REQUIRE_BROWSER=1, but {NO_CHROMIUM}")
    for item in needs_browser:
        item.add_marker(pytest.mark.skip(reason=NO_CHROMIUM))


def _group(item):
    """Tests of one group run in one process: an exercise's, for its misconceptions are run once, or a file's."""
    parameters = getattr(item, "callspec", None) and item.callspec.params
    for case in (parameters or {}).values():
        exercise = getattr(case, "exercise", case)
        if isinstance(exercise, str) and exercise in BLANKS:
            return exercise
    return item.path.name
