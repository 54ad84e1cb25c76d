"""Race functions against each other: interleaved runs, medians, ratios, and a bar chart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from lowprec_lab import plots
from lowprec_lab.limits import TookTooLongError, time_limit


@dataclass(frozen=True)
class Race:
    """seconds: all runs of each runner, in the order in which they ran. left_out: runners that took too long."""

    seconds: dict[str, list[float]]
    left_out: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        lines = [f"{statistics.median(runs) * 1e3:10.2f} ms  {name}" for name, runs in self.seconds.items()]
        return "\n".join(["median of each; draw them with .plot(to=...)", *lines])

    def ratios(self, to: str) -> dict[str, float]:
        """The median time of each runner, relative to that of `to`."""
        base = statistics.median(self.seconds[to])
        return {name: statistics.median(runs) / base for name, runs in self.seconds.items()}

    def plot(self, to: str) -> Figure:
        """A bar for each runner: its time relative to that of `to`."""
        ratios = self.ratios(to)
        with plots.style():
            made, axes = plots.figure(8, 0.9 + 0.45 * len(ratios))
            axes.barh(list(ratios), list(ratios.values()), height=0.6)
            axes.bar_label(axes.containers[0], fmt=" %.2f", padding=2)
            axes.set_xlabel(f"time relative to {to} (median; shorter is faster)")
            axes.invert_yaxis()
            axes.margins(x=0.15)
        return made


def race(runners: Mapping[str, Callable[[], object]], rounds: int = 7, limit_s: float = 5.0) -> Race:
    """Run each function once to warm up, then all of them in turn, `rounds` times: noise hits all of them alike.

    A runner whose first run takes more than `limit_s` seconds is stopped and left out, with a line that says so; with
    slow runners there are fewer rounds, so that a race ends within about 4 * limit_s.
    """
    warm: dict[str, float] = {}
    for name, run in runners.items():
        start = time.perf_counter()
        try:
            with time_limit(limit_s):
                run()
        except TookTooLongError:
            print(f"{name} is left out: one run takes more than {limit_s:g} s")
            continue
        warm[name] = time.perf_counter() - start
    rounds = max(1, min(rounds, int(3 * limit_s / max(sum(warm.values()), 1e-9))))
    seconds: dict[str, list[float]] = {name: [] for name in warm}
    for _ in range(rounds):
        for name in warm:
            start = time.perf_counter()
            runners[name]()
            seconds[name].append(time.perf_counter() - start)
    return Race(seconds, [name for name in runners if name not in warm])
