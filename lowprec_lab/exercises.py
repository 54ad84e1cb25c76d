"""What a page uses: `fill` an answer, `check` it, `reveal` the reference, see your `progress`, answer a `question`.

A blank that nobody filled in this kernel is supplied by the learner's saved answer, else by the reference, else by the
exact oracle where its grader names one; the last two say so.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lowprec_lab import blanks
from lowprec_lab.answers import SavedAnswer
from lowprec_lab.blanks import BLANKS, FILLED, Blank, blank, blank_of, in_order, load_chapters
from lowprec_lab.files import under_grading
from lowprec_lab.graders import registry
from lowprec_lab.graders.judging import grade, unwritten
from lowprec_lab.graders.verdict import Verdict
from lowprec_lab.limits import TookTooLongError, time_limit
from lowprec_lab.sources import (
    AnswerError,
    Source,
    found_when_used,
    ipython_shell,
    is_untouched,
    last_cell_defining,
    load,
    reference,
    reference_source,
    source_of,
    without_marks,
)

__all__ = [
    "BLANKS", "AnswerError", "Supply", "blank", "check", "check_answers", "fill", "load_chapters", "on_fill",
    "progress", "question", "reveal", "supply", "verdict_on",
]  # fmt: skip

_LISTENERS: list[Callable[[str], None]] = []
_SOURCES: dict[str, Source | None] = {}
# Why the last run of an answer's cell was refused; a verdict on the version before it would mislead.
_REFUSED: dict[str, str] = {}
_LISTENER_LIMIT_S = 12.0


@dataclass(frozen=True)
class Supply:
    """What stands in for a blank. origin: "yours", "saved", "reference" or "oracle"; line: a sentence that says so."""

    function: Callable
    origin: str
    line: str


def on_fill(callback: Callable[[str], None]) -> None:
    """Call `callback(name)` whenever an answer goes live, so that what runs on it can draw itself again."""
    _LISTENERS.append(callback)


# --- fill -------------------------------------------------------------------------------------------------------------


def fill(answer: Callable) -> Callable:
    """Decorator: make the learner's function (or class) live at once, everywhere the package calls it.

    An untouched stub installs nothing. Raises AnswerError, with a sentence, for a name that is no exercise, a signature
    that differs from the contract, or a cell that does not stand alone.
    """
    load_chapters()
    target = _known_blank(answer)
    source = source_of(answer)
    if _is_empty_class(answer) or source is not None and is_untouched(source.text, target.name):
        return getattr(_module_of(target), target.name)
    try:
        _require_signature(answer, target)
        if source is not None:
            load(source, target, _in_use, f"your {target.name}")
    except AnswerError as error:
        _REFUSED[target.name] = str(error)
        raise
    _REFUSED.pop(target.name, None)
    answer.__lowprec_blank__ = target.name
    _SOURCES[target.name] = source
    blanks.install(target.name, answer)
    _tell_listeners(target.name)
    return answer


def _is_empty_class(answer: Callable) -> bool:
    """Whether this is a class without a method of its own: a stub, whose source Python cannot tell."""
    return inspect.isclass(answer) and not any(map(inspect.isfunction, vars(answer).values()))


def _in_use(name: str) -> Callable:
    return getattr(_module_of(BLANKS[name]), name)


def _tell_listeners(name: str) -> None:
    """Let what runs on the answer draw itself again; an answer that never returns or raises must not stop its cell."""
    for callback in _LISTENERS:
        try:
            with time_limit(_LISTENER_LIMIT_S):
                callback(name)
        except TookTooLongError:
            print(f"{name} takes more than {_LISTENER_LIMIT_S:g} s, so the explorers wait: is there an endless loop?")
        except Exception as error:  # whatever a learner's function may raise; check will say it properly
            print(f"the explorers could not be drawn with this {name}: {type(error).__name__}: {error}")


def _known_blank(answer: Callable) -> Blank:
    name = getattr(answer, "__name__", str(answer))
    if name not in BLANKS:
        near = difflib.get_close_matches(name, BLANKS, n=1)
        hint = f" Did you mean {near[0]}?" if near else f" The exercises are: {', '.join(b.name for b in in_order())}."
        raise AnswerError(f"@fill: no exercise is called {name}.{hint}")
    return BLANKS[name]


def _module_of(target: Blank) -> object:
    return inspect.getmodule(target.contract)


def _require_signature(answer: Callable, target: Blank) -> None:
    """Compare names, order and defaults with the contract; extra parameters are allowed when they have defaults."""
    pairs = [(target.name, target.contract, answer)]
    if inspect.isclass(target.contract):
        methods = [name for name, value in vars(target.contract).items() if inspect.isfunction(value)]
        missing = [name for name in methods if not hasattr(answer, name)]
        if missing:
            raise AnswerError(f"{target.name} has no {', '.join(missing)}; the contract asks for it.")
        pairs = [(f"{target.name}.{m}", getattr(target.contract, m), getattr(answer, m)) for m in methods]
    for label, contract, given in pairs:
        wanted, found = (list(inspect.signature(f).parameters.values()) for f in (contract, given))
        same = [(p.name, p.default, p.kind) for p in wanted] == [
            (p.name, p.default, p.kind) for p in found[: len(wanted)]
        ]
        if not same or any(
            p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found[len(wanted) :]
        ):
            raise AnswerError(
                f"{label} takes {_plain(wanted)}, and your version takes {_plain(found)}. Keep the names, the order "
                "and the defaults; parameters of your own come after them and have defaults."
            )


def _plain(parameters: list[inspect.Parameter]) -> str:
    """Parameters as they are typed, without annotations: "(x, *, fmt=None)"."""
    return str(inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters]))


# --- supply -----------------------------------------------------------------------------------------------------------


def supply(name: str, living: bool = False) -> Supply:
    """What runs for a blank now: the answer filled in this kernel, the saved one, the reference, the exact oracle.

    living: a reference that stands in is to run on the learner's answers to earlier exercises, and not on references
    alone, as it does when it is compared with theirs.

    Raises AnswerError that names the exercise and the page when there is none of them.
    """
    load_chapters()
    target = BLANKS[name]
    if name in FILLED:
        return Supply(FILLED[name], "yours", f"your {name} (exercise {target.exercise})")
    saved = _saved(target)
    if saved is not None:
        return saved
    source = reference_source(name)
    if source is not None:
        function = load(source, target, _quietly_in_use, f"reference: {name}") if living else reference(name)
        return Supply(function, "reference", f"reference: {name} (exercise {target.exercise})")
    registry.load_graders()
    if name in registry.ORACLES:
        return Supply(
            registry.ORACLES[name], "oracle", f"exact oracle: {name} (exercise {target.exercise}), until you write it"
        )
    raise AnswerError(
        f"{name} is not written yet: it is exercise {target.exercise}, on the page {target.page}. "
        f"Open it with `lowprec-lab open {target.chapter.number}`."
    )


def _quietly_in_use(name: str) -> Callable:
    """What runs for an earlier exercise, without a line on whose it is."""
    return found_when_used(name, lambda name: blanks.current(name, say=False))


def _saved(target: Blank) -> Supply | None:
    entry, helpers = _saved_entry(target)
    if entry is None:
        return None
    source = Source(entry.source, helpers or "")
    try:
        function = load(source, target, _in_use, f"answers/{target.module}.py: {target.name}")
    except AnswerError as error:
        print(f"your saved {target.name} was left out: {error}")
        return None
    function.__lowprec_blank__ = target.name
    _SOURCES[target.name] = source
    return Supply(
        function, "saved", f"your saved {target.name} of {_date(entry.saved_at)} (exercise {target.exercise})"
    )


_TOLD: set[str] = set()


def _saved_entry(target: Blank) -> tuple[SavedAnswer | None, str | None]:
    """The saved answer and its helpers, None where there are none (and under nbgrader); problems are told once."""
    from lowprec_lab import workspace

    answers = workspace.load_answers(target.module)
    for problem in answers.problems:
        if problem not in _TOLD:
            _TOLD.add(problem)
            print(problem)
    return answers.answers.get(target.name), answers.helpers


def _date(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M")


# --- check ------------------------------------------------------------------------------------------------------------


def check(answer: object, *, report: bool = False) -> float | None:
    """Grade an answer at once, show the verdict, and save the answer when it passes.

    answer: the function that `@fill` returned, or a blank's name. report: also write a file with which the verdict can
    be disputed. Returns nothing in a notebook; under nbgrader the points, as the cell's result.
    """
    target = blank_of(answer)
    if target is None:
        raise AnswerError(_no_exercise(getattr(answer, "__name__", repr(answer))))
    verdict = verdict_on(answer, target)
    if verdict.passed:
        verdict.notes += _keep(target)
    if report:
        verdict.notes.append(f"report: {_write_report(target, verdict)}")
    _show(verdict)
    return verdict.points if under_grading() else None


def _no_exercise(name: str) -> str:
    if name in BLANKS:
        return f"Your {name} was defined without `@fill`. Put it on the line above `def {name}`, and run it again."
    return f"check({name}): no exercise has this name. The exercises are: {', '.join(b.name for b in in_order())}."


def verdict_on(answer: object, target: Blank) -> Verdict:
    """The verdict on what the learner filled in; an "unwritten" one where nothing was filled in this kernel."""
    registry.load_graders()
    function = FILLED.get(target.name) if isinstance(answer, str) or _is_dispatcher(answer) else answer
    if function is None:
        return _nothing_filled(target)
    stale = _stale(target)
    if stale:
        return unwritten(target, "not judged: the last run of its cell did not get through", stale)
    verdict = grade(target, function)
    if verdict.passed:
        return verdict
    at_fault = _earlier_at_fault(target, _SOURCES.get(target.name))
    if at_fault:
        _pass_all_the_same(verdict, at_fault)
    elif saved := _saved_entry(target)[0]:
        verdict.notes.append(f"Your right answer of {_date(saved.saved_at)} stays saved.")
    return verdict


def _stale(target: Blank) -> str:
    """Why the function in use is not what the cell says now; "" where it is, as far as the kernel can know."""
    if target.name in _REFUSED:
        return f"{_REFUSED[target.name]} What is in use is the version before it."
    source = _SOURCES.get(target.name)
    last = last_cell_defining(target.name)
    if source is None or not last or last.strip() == source.text.strip():
        return ""
    return "The cell ended in an error, or holds no answer. In use is the version before it. Run the cell again."


def _is_dispatcher(answer: object) -> bool:
    return hasattr(answer, "__wrapped__") and getattr(answer, "__lowprec_blank__", None) is not None


def _nothing_filled(target: Blank) -> Verdict:
    entry, _ = _saved_entry(target)
    how = f"Write exercise {target.exercise} in the cell above and run it (Shift+Enter), then run this one."
    if entry is None:
        return unwritten(target, f"not written yet (exercise {target.exercise})", how)
    headline = f"not judged now; your saved answer of {_date(entry.saved_at)} is in use"
    return unwritten(target, headline, "To judge it again, run the cell above (Shift+Enter), then this one.")


def _earlier_at_fault(target: Blank, source: Source | None) -> str:
    """The earlier answer because of which this one fails, when it passes with right ones in their place."""
    used = [b.name for b in blanks.earlier_than(target.name) if source and b.name in source.text and b.name in FILLED]
    right = {name: reference(name) or registry.ORACLES.get(name) for name in used}
    if not used or None in right.values():
        return ""

    def passes(own: set[str]) -> bool:
        def earlier(name: str) -> Callable:
            return FILLED[name] if name in own else right.get(name) or _in_use(name)

        return grade(target, load(source, target, earlier, f"your {target.name}"), naming=False).passed

    if not passes(set()):
        return ""
    return next((name for name in used if not passes({name})), used[0])


def _pass_all_the_same(verdict: Verdict, at_fault: str) -> None:
    verdict.level, verdict.passed, verdict.points = "exact", True, verdict.max_points
    verdict.headline = f"right, with a right {at_fault} under it"
    verdict.rows, verdict.try_it, verdict.misconception = [], "", ""
    verdict.sentences = [
        f"It fails now only because your {at_fault} (exercise {BLANKS[at_fault].exercise}) is wrong; with a "
        f"right one in its place it is right on every input, so this exercise counts. Mend {at_fault} next."
    ]
    for line in verdict.checks:
        line["passed"] = True


def _keep(target: Blank) -> list[str]:
    """Save a passing answer where there is a kernel to save from, and say what the pass opens."""
    notes = [target.unlocks] if target.unlocks else []
    source = _SOURCES.get(target.name)
    if under_grading() or not _interactive() or source is None:
        return notes
    from lowprec_lab import workspace

    try:
        order = [b.name for b in in_order()]
        path = workspace.save_answer(target.module, target.name, source.text, source.helpers or None, order=order)
    except workspace.WorkspaceError as error:
        return [*notes, f"Your answer is right, and could not be saved: {error}"]
    return [f"Saved to {'/'.join(path.parts[-3:])}." if path else "", *notes]


def _write_report(target: Blank, verdict: Verdict) -> Path:
    from lowprec_lab.reports import write_report

    source = _SOURCES.get(target.name)
    return write_report(target, verdict, source.text if source else "")


def _interactive() -> bool:
    return ipython_shell() is not None


def _show(thing: object) -> None:
    if _interactive():
        from IPython.display import display

        display(thing)
    else:
        print(thing)


# --- the rest of the page's tools ------------------------------------------------------------------------------------


def reveal(answer: object) -> None:
    """Show the reference answer to an exercise (a function or its name)."""
    target = blank_of(answer)
    if target is None:
        known = ", ".join(b.name for b in in_order())
        raise AnswerError(f"{answer!r} is no exercise. The exercises are: {known}")
    source = reference_source(target.name)
    if source is None:
        print(f"No reference answer for {target.name} is installed here. A teacher may publish it after the deadline.")
        return
    text = without_marks(source.text)
    if _interactive():
        from IPython.display import Code, display

        display(Code(text, language="python"))
    else:
        print(text)


def progress(whole: bool = False) -> None:
    """Show the map of chapters: what is done, and whose code runs for each exercise. whole: all exercises, listed."""
    from lowprec_lab.progress import progress_map

    _show(progress_map(whole))


def question(key: str, value: object) -> None:
    """Check the answer to a question about the real code, and say why it is right or where to look again."""
    registry.load_graders()
    if key not in registry.QUESTIONS:
        raise AnswerError(f"there is no question {key!r}. The questions are: {', '.join(registry.QUESTIONS)}")
    asked = registry.QUESTIONS[key]
    if value is ...:
        print(f"? {key}   not answered yet: put your answer in place of the dots.")
    elif isinstance(value, str) and not isinstance(asked.right, str):
        print(f"? {key}   write it without quotes: a number, True or False, not a text.")
    elif (type(value) is bool) == (type(asked.right) is bool) and _in_any_case(value) == _in_any_case(asked.right):
        print(f"✓ {key}   {asked.because}")
    else:
        known = next(
            (
                text
                for wrong, text in asked.nudges.items()
                if type(wrong) is type(value) and _in_any_case(wrong) == _in_any_case(value)
            ),
            "",
        )
        print(f"✗ {key}   {known or asked.nudge}")


def _in_any_case(value: object) -> object:
    """The value with all of its letters small."""
    if isinstance(value, tuple):
        return tuple(map(_in_any_case, value))
    return value.lower() if isinstance(value, str) else value


def check_answers(path: str | Path | None = None, names: list[str] | None = None) -> dict:
    """Grade the answers in a folder (saved answers or pages; the learner's own when omitted), as `check --json` prints.

    Every exercise runs on the references of earlier ones, and where there are none on the folder's own. Raises
    AnswerError for an unknown exercise or a folder that is not there.
    """
    from lowprec_lab.terminal import check_folder

    return check_folder(path, names)
