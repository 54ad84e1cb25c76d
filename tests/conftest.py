"""What all tests share: the --answers option, and what happens where there is no Chromium."""

import os
import shutil
from pathlib import Path

import pytest

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
CHROMIUM_ON_MACOS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
NO_CHROMIUM = (
    "no Chromium was found. Install one (Debian: apt-get install chromium; macOS: brew install --cask chromium) "
    "or set LOWPREC_CHROMIUM to its path"
)


def find_chromium() -> str | None:
    """Path of a Chromium (or Chrome) that the browser tests can drive; None where there is none."""
    chosen = os.environ.get("LOWPREC_CHROMIUM")
    if chosen:
        return chosen
    on_path = (shutil.which(name) for name in CHROMIUM_NAMES)
    on_macos = (path for path in CHROMIUM_ON_MACOS if Path(path).exists())
    return next((path for path in (*on_path, *on_macos) if path), None)


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """Path of the browser; tests that use it are marked `browser`."""
    path = find_chromium()
    assert path is not None, NO_CHROMIUM
    return path


def pytest_addoption(parser):
    parser.addoption(
        "--answers",
        metavar="DIR",
        default=None,
        help="folder with saved answers (or solutions/) that tests/test_exercises.py grades, one test per check",
    )


def pytest_collection_modifyitems(items):
    needs_browser = [item for item in items if item.get_closest_marker("browser")]
    if not needs_browser or find_chromium() is not None:
        return
    if os.environ.get("LOWPREC_REQUIRE_BROWSER") == "1":
        raise pytest.UsageError(f"LOWPREC_REQUIRE_BROWSER=1, but {NO_CHROMIUM}")
    for item in needs_browser:
        item.add_marker(pytest.mark.skip(reason=NO_CHROMIUM))
