"""`lowprec-lab gpu-check`: what a GPU does with FP8, in one command of at most five minutes, as JSON.

Its parts: "machine", versions and the doctor's lines; "products", the hardware path next to the emulated one;
"training", the speed of three models in BF16 and FP8; "rules", torch's errors next to chapter 09's. The rules come
last: a call that a GPU should have refused may leave it unusable for this process. Each part has a share of the time,
its error is data and stops no other part, and the file is written whole again whenever something new is known.

It needs torch and numpy alone; torchao takes part where it can be imported.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lowprec_lab import __version__, fused
from lowprec_lab.files import write_whole
from lowprec_lab.gpu_check import products, rules, training
from lowprec_lab.gpu_check.device import Device, NoGPUError, find_gpu, stand_in
from lowprec_lab.gpu_check.timing import OutOfTimeError, countdown, stop_after

__all__ = ["SECONDS", "STAND_IN", "Check", "NoGPUError", "find_gpu", "stand_in"]

SECONDS = 270.0  # of five minutes: importing, and the driver's first call, come on top
STAND_IN = "LOWPREC_GPU_STAND_IN"  # for tests: where it is set, a CPU stands in for a GPU, and every size is tiny
_FOR_RULES = 15.0
_COUNTED = tuple((way, what) for way in products.WAYS for what in ("codes", "scales"))
_GRACE = 15.0  # what a part that does not listen may take more, before the process is ended


@dataclass(frozen=True)
class _Part:
    """name: in the report. run: fills in a dict, given save and left. share: of the time that is left."""

    name: str
    run: Callable[[dict, Callable, Callable], None]
    share: float


class Check:
    """A check of a GPU. report: what is known so far, as JSON holds it.

    device: see `find_gpu`. path: of the file, in a folder that is made if it is missing. seconds: that all parts
    together may take. tiny: small sizes, for tests. say: called with each line that a reader should see.
    """

    def __init__(
        self, device: Device, path: Path, seconds: float = SECONDS, tiny: bool = False, say: Callable = print
    ) -> None:
        self.device, self.path, self._tiny, self._say = device, path, tiny, say
        self._left = countdown(seconds)
        self.report: dict = {
            "lab": __version__, "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "seconds": seconds,
            "finished": False, "stand_in": device.where == "cpu", "parts": {},
        }  # fmt: skip

    def run(self) -> dict:
        """Run all parts and return the report."""
        self.save()
        for part in self._parts():
            self._run(part)
        self.report["finished"] = True
        self.save()
        return self.report

    @property
    def holds(self) -> bool:
        """Whether every part came to its end, without an error, and all codes and scales are those of the emulation."""
        parts = self.report["parts"]
        if not self.report["finished"] or any(part["status"] != "done" for part in parts.values()):
            return False
        differ = [each.get(f"{way}_{what}") for each in parts["products"]["codes"].values() for way, what in _COUNTED]
        return not _anywhere("failed", parts) and not any(differ)

    def save(self) -> None:
        """Write what is known, whole or not at all."""
        write_whole(self.path, (json.dumps(plain(self.report), indent=1, allow_nan=False) + "\n").encode())

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """End the process if it is still inside when all time is over, and does not listen: a driver that hangs."""
        watch = threading.Timer(self._left() + _GRACE, self._give_up)
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()

    def _give_up(self) -> None:
        self.report["gave_up"] = "the process did not answer, and was ended"
        with contextlib.suppress(Exception):
            self.save()
        self._say(f"gpu-check: {self.report['gave_up']}. What was found is in {self.path}.")
        os._exit(1)

    def _parts(self) -> tuple[_Part, ...]:
        device, tiny = self.device, self._tiny
        sizes = training.TINY if tiny else training.SIZES
        return (
            _Part("machine", lambda found, save, left: _machine(device, found), 1.0),
            _Part("products", lambda found, save, left: products.check(device, found, save, tiny), 0.3),
            _Part("training", lambda found, save, left: training.check(device, found, save, left, sizes), 1.0),
            _Part("rules", lambda found, save, left: rules.check(device, found, save), 1.0),
        )

    def _run(self, part: _Part) -> None:
        found: dict = {"status": "running"}
        self.report["parts"][part.name] = found
        kept_back = 0.0 if part.name == "rules" else min(_FOR_RULES, 0.2 * self._left())
        seconds = part.share * (self._left() - kept_back)
        started = time.monotonic()
        self.save()
        if seconds <= 0:
            found["status"] = "out of time"
        else:
            found["status"] = self._status_of(part, found, seconds)
        found["seconds"] = round(time.monotonic() - started, 2)
        self.save()
        self._say(describe(part.name, found))

    def _status_of(self, part: _Part, found: dict, seconds: float) -> str:
        """Run a part: "done", "failed" or "out of time"."""
        try:
            with stop_after(seconds):
                part.run(found, self.save, countdown(seconds))
        except OutOfTimeError:
            return "out of time"
        except Exception as error:  # whatever a driver, a compiler or an answer may raise
            found["error"] = fused.first_line(error)
            return "failed"
        return "done"


def _machine(device: Device, found: dict) -> None:
    from lowprec_lab.devices import doctor

    found.update(device.facts())
    found["doctor"] = doctor().to_dict()


def plain(value: object) -> object:
    """The same with texts in place of NaN and infinities, for which JSON has nothing."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in list(value.items())}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- in words ---------------------------------------------------------------------------------------------------------


def describe(name: str, found: dict) -> str:
    """A part's findings in a few lines."""
    lines = [
        f"{name}: {found['status']}, {found['seconds']:.0f} s" + (f" ({found['error']})" if "error" in found else "")
    ]
    made = {"machine": _machine_lines, "products": _product_lines, "training": _training_lines, "rules": _rule_lines}
    return "\n  ".join([*lines, *made[name](found)])


def _machine_lines(found: dict) -> Iterator[str]:
    if "name" in found:
        yield f"{found['name']}, capability {found['capability']}, {found['memory_gib']} GiB"
        yield f"torch {found['torch']}, CUDA {found['cuda']}, cuBLAS {found['cublas']}, driver {found['driver'] or '?'}"


def _product_lines(found: dict) -> Iterator[str]:
    for name, counts in found.get("codes", {}).items():
        total = counts.get("codes", 0) + counts.get("scales", 0)
        differ = ", ".join(f"{way} {counts.get(f'{way}_{what}', 0):,} {what}" for way, what in _COUNTED)
        yield _told(counts) or f"{name}: of {total:,} codes and scales, these are others: {differ}"
    for each in found.get("products", []):
        name = f"{each['kind']} {' x '.join(map(str, each['shape']))}"
        yield f"{name}: {_told(each) or _errors_and_times(each)}"
    for name, each in found.get("layers", {}).items():
        errors = (f"{way} {product} {value:.1e}" for way in each for product, value in each[way].items())
        yield f"layer {name}, next to emulation: {_told(each) or ', '.join(errors)}"


def _told(report: dict) -> str:
    """Why something was not measured, or not to its end; "" if it was."""
    return report.get("skipped") or report.get("failed") or ""


def _errors_and_times(each: dict) -> str:
    errors = ", ".join(f"{way} {each[way]['relative']:.1e}" for way in ("emulated", "slow", "fast"))
    times = f"{each['slow']['milliseconds']:.3f} and {each['fast']['milliseconds']:.3f} ms"
    return f"errors {errors}; {times}, BF16 {each['bf16_milliseconds']:.3f} ms; public product: {each['public']}"


def _training_lines(found: dict) -> Iterator[str]:
    for name, model in found.items():
        if not isinstance(model, dict):
            continue
        if _told(model):
            yield f"{name}: {_told(model)}"
        for variant, each in model.get("variants", {}).items():
            yield f"{name} {variant}: {_told(each) or _speed(each)}"
        for ratio, value in model.get("times_as_fast", {}).items():
            yield f"{name} {ratio}: {value:.2f} times as fast"


def _speed(each: dict) -> str:
    if "milliseconds" not in each:
        return "not measured"
    return f"{each['milliseconds']:.1f} ms, {each['peak_gib']} GiB, compiled in {each['compile_seconds']:.0f} s"


def _rule_lines(found: dict) -> Iterator[str]:
    calls = found.get("calls", [])
    for verdict, count in found.get("counts", {}).items():
        yield f"{count} of {len(calls)}: {verdict}"
    for each in calls:
        if each["verdict"] != rules.AGREE:
            yield f"{each['title']}: expected {each['expected']!r}, torch says {each['said']!r}"


def _anywhere(key: str, value: object) -> bool:
    """Whether a dict inside of this one, or of a list in it, has that key."""
    if isinstance(value, dict):
        return key in value or any(_anywhere(key, each) for each in value.values())
    return isinstance(value, list) and any(_anywhere(key, each) for each in value)
