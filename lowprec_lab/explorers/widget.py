"""What the explorers share in Python: one widget class, its still picture, and new code as soon as it is filled."""

from __future__ import annotations

import base64
import weakref
from collections import deque
from pathlib import Path

import anywidget
import traitlets
from matplotlib.figure import Figure

from lowprec_lab import exercises, plots
from lowprec_lab.formats import Format, get_format

_FOLDER = Path(__file__).parent

# The explorers that may still be on the page, and take up new code as soon as it is filled.
_RECENT: deque[weakref.ref] = deque(maxlen=6)


def code(name: str, ending: str) -> str:
    """The "js" or the "css" of an explorer: what all share, then its own. anywidget takes one text."""
    files = (_FOLDER / f"{each}.{ending}" for each in ("shared", name))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


class Explorer(anywidget.AnyWidget):
    """A widget drawn in the browser from `_panels` (what the kernel worked out) and `_state` (what is shown).

    runs_on: the exercises whose code it runs on. Subclasses define `plot()`, `refresh()` and `__repr__`.
    """

    runs_on: tuple[str, ...] = ()
    _panels = traitlets.List().tag(sync=True)
    _state = traitlets.Dict().tag(sync=True)

    def __init__(self) -> None:
        super().__init__()
        _RECENT.append(weakref.ref(self))

    def plot(self) -> Figure:
        """The same as a static picture."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Take up the code that is in use now."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **kwargs: dict) -> tuple[dict, dict]:
        """The widget, and for where no widget can live (GitHub, PDF, an untrusted page) its picture and its text."""
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        picture = base64.b64encode(plots.png(self.plot())).decode("ascii")
        return {**data, "text/plain": repr(self), "image/png": picture}, metadata


class OneOfFormats:
    """For an explorer that shows one of a few formats: `fmt` can be read, and set to a Format or its name."""

    formats: tuple[Format, ...] = ()

    @classmethod
    def _known(cls, fmt: str | Format) -> str:
        chosen = fmt if isinstance(fmt, Format) else get_format(fmt)
        return one_of(chosen.name, tuple(each.name for each in cls.formats))

    @property
    def fmt(self) -> Format:
        """The format that the numbers are rounded to."""
        return get_format(self._state["fmt"])

    @fmt.setter
    def fmt(self, fmt: str | Format) -> None:
        self._state = {**self._state, "fmt": self._known(fmt)}


def refresh_recent(name: str) -> None:
    """Called when an exercise is filled: the explorers of this page that run on it take up the new code."""
    for reference in list(_RECENT):
        explorer = reference()
        if explorer is None or not explorer._panels:  # no panel: its constructor refused what it was given
            continue
        if name in explorer.runs_on and explorer.comm is not None:
            explorer.refresh()


def one_of(choice: str, known: tuple[str, ...]) -> str:
    """`choice`, if it is known; else ValueError."""
    if choice not in known:
        raise ValueError(f"{choice!r} is not one of {', '.join(map(repr, known))}")
    return choice


def text_of(value: float) -> str:
    """The shortest decimal that reads back as `value`: what a person means by it."""
    text = repr(float(value))
    return text[:-2] if text.endswith(".0") else text


def panel_of(fmt: Format) -> dict:
    """What the browser must know of a format."""
    names = ("name", "width", "exponent_bits", "mantissa_bits", "bias", "specials", "signed", "subnormals")
    return {
        **{name: getattr(fmt, name) for name in names},
        "color": plots.color_of(fmt),
        "values": None,
        "classes": None,
    }


exercises.on_fill(refresh_recent)
