"""The known misconceptions, and verdicts that many tests look at and no process makes twice."""

import functools
from dataclasses import replace

from lowprec_lab.blanks import BLANKS, in_order
from lowprec_lab.graders import judging, naming, registry
from lowprec_lab.graders.registry import CHECKS, MISCONCEPTIONS
from lowprec_lab.graders.run import PUBLIC_SEED
from lowprec_lab.sources import load, reference

registry.load_graders()
NAMES = [blank.name for blank in in_order()]
WRONG = [wrong for name in NAMES for wrong in MISCONCEPTIONS[name]]


def label(wrong):
    """The id of a misconception in a test's name."""
    return f"{wrong.exercise}-{wrong.function.__name__}"


@functools.cache
def verdict_on(wrong):
    """What is said of it when nobody looks for its name. Its checks are run once, for naming as well."""
    outcomes = [
        naming.known_outcome(wrong, check, PUBLIC_SEED, 1) for check in CHECKS[wrong.exercise] if not check.last
    ]
    return judging.summary(BLANKS[wrong.exercise], wrong.function, outcomes)


def named_verdict(wrong):
    """The same with its name, as naming puts it in front; here nobody asks whether another would fit as well."""
    told = verdict_on(wrong)
    return replace(told, misconception=wrong.function.__name__, sentences=[wrong.sentence, *told.sentences])


@functools.cache
def in_notebook(name, source):
    """What is said of an answer's source in the notebook, named if it is known."""
    return judging.grade(BLANKS[name], load(source, BLANKS[name], reference, f"answer: {name}"))
