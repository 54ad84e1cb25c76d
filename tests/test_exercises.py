"""Grades a folder of answers, one test per check: `pytest tests/test_exercises.py --answers DIR` (default: solutions/).

DIR holds saved answers (bits.py) or pages (01_bit_layouts.py or .ipynb). Earlier exercises are the references, so that
a mistake costs once.
"""

from functools import lru_cache
from pathlib import Path

import pytest

from lowprec_lab.blanks import BLANKS, in_order
from lowprec_lab.graders import registry
from lowprec_lab.graders.registry import CHECKS
from lowprec_lab.sources import sources_in
from lowprec_lab.terminal import judge_source

SOLUTIONS = Path(__file__).parents[1] / "solutions"


def pytest_generate_tests(metafunc):
    registry.load_graders()
    checks = [(blank.name, check.name) for blank in in_order() for check in CHECKS[blank.name]]
    ids = [f"{BLANKS[name].exercise}-{name}-{check}" for name, check in checks]
    metafunc.parametrize(("name", "check"), checks, ids=ids)


@pytest.fixture(scope="session")
def verdict_on(request):
    """Judges an exercise of the folder once, however many checks it has."""
    folder = Path(request.config.getoption("--answers") or SOLUTIONS)
    if not folder.is_dir():
        pytest.exit(f"--answers {folder}: there is no such folder. Give one with saved answers (bits.py) or pages", 2)
    sources = sources_in(folder)
    return lru_cache(maxsize=None)(lambda name: judge_source(BLANKS[name], sources.get(name), sources))


def test_answer(name, check, verdict_on):
    verdict = verdict_on(name)
    line = next((line for line in verdict.checks if line["name"] == check), None)
    if line is None or not line["passed"]:
        pytest.fail(verdict.text(), pytrace=False)
