"""The known misconceptions, and the verdict on each, which many tests look at and no process makes twice."""

import functools

from lowprec_lab.blanks import BLANKS, in_order
from lowprec_lab.graders import registry
from lowprec_lab.graders.judging import grade
from lowprec_lab.graders.registry import MISCONCEPTIONS

registry.load_graders()
NAMES = [blank.name for blank in in_order()]
WRONG = [wrong for name in NAMES for wrong in MISCONCEPTIONS[name]]


def label(wrong):
    """The id of a misconception in a test's name."""
    return f"{wrong.exercise}-{wrong.function.__name__}"


@functools.cache
def verdict_on(wrong):
    """What is said of it when nobody looks for its name."""
    return grade(BLANKS[wrong.exercise], wrong.function, naming=False)
