"""RoundingExplorer: a number between two values of a format, and which of them each rounding mode chooses.

The browser rounds exactly, so that dragging does not wait for the kernel. The kernel tries the learner's own `round_to`
on every number where a rounding may change; where it chooses otherwise, the browser draws what it chose, and says so.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.figure import Figure

from lowprec_lab.explorers import ladder, nearest, rounding_picture
from lowprec_lab.explorers.widget import Explorer, code, one_of, panel_of, text_of
from lowprec_lab.formats import E4M3, Format, get_format
from lowprec_lab.graders import oracle, rounding_oracle
from lowprec_lab.tables import NotUsableError, ask

WIDEST = 20  # bits; between the values of wider formats there are too few float32 to try

# How many steps the kernel tries on either side of the number, and how near their end it tries anew.
_REACH, _NEAR_END = 192, 24

# Numbers that are on no step.
_ELSEWHERE = np.array([-0.0, np.inf, -np.inf, np.nan, 3.4028235e38, -3.4028235e38], dtype=np.float32)


class RoundingExplorer(Explorer):
    """A marker on the number line, and what the five rounding modes make of it.

    fmt: a Format or its name ("float8_e4m3fn", "E4M3"), of at most 20 bits.
    value: the number to start with. Its shortest decimal is what is rounded: 0.1 is one tenth.
    mode: the one whose bins are shaded: "nearest_even", "nearest_away", "toward_zero", "up" or "down".
    overflow: what becomes of numbers beyond the largest value: "saturate" or "to_special".
    `value`, `mode` and `overflow` can be read and set later; `results` says what each mode makes of the value.

    Raises ValueError for an unknown format, mode or policy.
    """

    _esm = code("rounding_explorer", "js")
    _css = code("rounding_explorer", "css")
    runs_on = ("round_to",)

    def __init__(
        self,
        fmt: str | Format = E4M3,
        value: float = 0.1,
        mode: str = "nearest_even",
        overflow: str = "saturate",
    ) -> None:
        super().__init__()
        self._format = fmt if isinstance(fmt, Format) else get_format(fmt)
        if self._format.width > WIDEST:
            raise ValueError(
                f"RoundingExplorer shows formats of at most {WIDEST} bits; {self._format.name} has {self._format.width}"
            )
        self._window = (0, 0)
        self._state = {
            "text": text_of(value),
            "mode": one_of(mode, nearest.MODES),
            "overflow": self._policy(overflow),
        }
        self.refresh()
        self.observe(self._follow, names="_state")

    def _policy(self, overflow: str) -> str:
        one_of(overflow, nearest.OVERFLOWS)
        if overflow not in self._policies():
            raise ValueError(f"{self._format.name} has no special value to overflow to: it can only 'saturate'")
        return overflow

    def _policies(self) -> tuple[str, ...]:
        return nearest.OVERFLOWS if self._format.specials != "finite" else nearest.OVERFLOWS[:1]

    @property
    def value(self) -> float:
        """The number that is rounded, as a float."""
        real = self._real()
        try:
            return float(real)
        except OverflowError:
            return math.inf if real > 0 else -math.inf

    @value.setter
    def value(self, value: float) -> None:
        self._state = {**self._state, "text": text_of(value)}

    @property
    def mode(self) -> str:
        """The mode whose bins are shaded."""
        return self._state["mode"]

    @mode.setter
    def mode(self, mode: str) -> None:
        self._state = {**self._state, "mode": one_of(mode, nearest.MODES)}

    @property
    def overflow(self) -> str:
        """The overflow policy."""
        return self._state["overflow"]

    @overflow.setter
    def overflow(self, overflow: str) -> None:
        self._state = {**self._state, "overflow": self._policy(overflow)}

    @property
    def results(self) -> dict[str, float]:
        """What each mode makes of the value, by the `round_to` in use (of the float32 next to the value)."""
        if self._panels[0]["samples"] is None:
            return {mode: self._exact(mode) for mode in nearest.MODES}
        number = torch.tensor([ladder.float32_of(self._real())], dtype=torch.float32)

        def use(round_to) -> dict[str, float]:
            return {
                mode: float(_checked(round_to(number.clone(), self._format, mode, self.overflow), number)[0])
                for mode in nearest.MODES
            }

        return ask("round_to", use, exact=rounding_oracle.round_to)[0]

    def _exact(self, mode: str) -> float:
        fmt = self._format

        def value(at: int) -> float:
            return oracle.decode(torch.tensor([at], dtype=torch.int32), fmt).item()

        chosen, problem = nearest.nearest_code(self._real(), fmt, value, mode, self.overflow)
        return math.nan if problem else value(chosen)

    def refresh(self) -> None:
        """Take up the `round_to` that is in use now."""
        fmt = self._format
        at = ladder.step_below(fmt, self._real())
        self._window = (max(ladder.first_step(fmt), at - _REACH), min(ladder.last_step(fmt), at + _REACH))
        tried = np.concatenate([ladder.numbers_between(fmt, *self._window), _ELSEWHERE])
        numbers = torch.from_numpy(tried)

        def use(round_to) -> np.ndarray:
            rows = [
                _checked(round_to(numbers.clone(), fmt, mode, overflow), numbers)
                for mode in nearest.MODES
                for overflow in self._policies()
            ]
            return np.stack(rows)

        chosen, origin, line, note = ask("round_to", use, exact=rounding_oracle.round_to)
        wrong = int(np.count_nonzero(~_same(chosen, use(rounding_oracle.round_to))))
        if wrong:
            note = f"differs from the definition in {wrong:,} of {chosen.size:,} roundings tried"
        shown = {"origin": origin, "line": line, "note": note, "policies": list(self._policies())}
        sampled = {"first": self._window[0], "samples": chosen.tobytes() if wrong else None, "tried": len(tried)}
        self._panels = [panel_of(fmt) | shown | sampled]

    def _follow(self, change: dict) -> None:
        """Try the numbers further out when the marker comes near the end of those tried."""
        at = ladder.step_below(self._format, self._real())
        low, high = self._window
        first, last = ladder.first_step(self._format), ladder.last_step(self._format)
        if (low > first and at < low + _NEAR_END) or (high < last and at > high - _NEAR_END):
            self.refresh()

    def _real(self) -> nearest.Real:
        return nearest.read_real(self._state["text"])

    def plot(self) -> Figure:
        """The same as a static picture. Returns a matplotlib Figure."""
        return rounding_picture.draw(
            self._format, self._state["text"], self.results, self.overflow, self._panels[0]["line"]
        )

    def __repr__(self) -> str:
        head = f"RoundingExplorer: {self._state['text']} in {self._format.name}, {self.overflow}"
        lines = [f"  {mode:<13} {value:.12g}" for mode, value in self.results.items()]
        return "\n".join([f"{head}  [{self._panels[0]['line']}]", *lines])


def _checked(result: object, numbers: torch.Tensor) -> np.ndarray:
    if not isinstance(result, torch.Tensor):
        raise NotUsableError(f"returned {type(result).__name__}, not a tensor")
    if result.shape != numbers.shape or not result.dtype.is_floating_point:
        raise NotUsableError(f"returned {result.dtype} of the shape {tuple(result.shape)}, not float32 of the input's")
    return result.detach().to(torch.float32).numpy().copy()


def _same(ours: np.ndarray, right: np.ndarray) -> np.ndarray:
    equal = (ours == right) & (np.signbit(ours) == np.signbit(right))
    return equal | (np.isnan(ours) & np.isnan(right))
