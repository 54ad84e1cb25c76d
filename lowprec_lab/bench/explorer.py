"""How long an explorer takes from a click or a drag to the picture that shows it, in a headless Chromium.

Clicks and drags are real ones, sent to the browser. The time runs from the browser's own time stamp of the event to
the second animation frame after it: by then the frame with the change has been painted, so the figure is an upper
bound, and about one frame (16.7 ms) of it is waiting for the screen.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

from lowprec_lab.bench.chromium import chromium, show_widget

CLICKS = 40


def _recorded() -> tuple:
    """A recording of 21 layers and 31 steps, as the page of chapter 05 makes it."""
    from lowprec_lab.recordings import Recording

    recording = Recording()
    for step in range(31):
        layers = {
            f"layer {k}": {"first": -30 + k - step // 3, "counts": [1 + k, 500, 3000, 900, 20] * 8} for k in range(21)
        }
        recording.write({"step": 10 * step, "activations": layers, "gradients": layers})
    return (recording, "gradients", "underflow")


# What is shown, by (class, arguments or a function that makes them), and what is done to it: the selector of what is
# clicked, or "drag".
CASES: dict[str, tuple[str, tuple | Callable[[], tuple], str]] = {
    "E4M3": ("BitExplorer", (["float8_e4m3fn"],), ".lplab-bit"),
    "BF16": ("BitExplorer", (["bfloat16"],), ".lplab-bit"),
    "three side by side": ("BitExplorer", (["float8_e4m3fn", "float8_e5m2", "bfloat16"],), ".lplab-bit"),
    "rounding, E4M3": ("RoundingExplorer", ("float8_e4m3fn", 0.1), "drag"),
    "rounding, BF16": ("RoundingExplorer", ("bfloat16", 0.1), "drag"),
    "a running total": ("AccumulatorExplorer", ("bfloat16",), "[aria-label='one addition']"),
    "a heat map": ("ExponentHeatmap", _recorded, ".lpheat-map"),
    "cast policies": ("CastPolicyExplorer", (), "[role=option]"),
}

_MEASURE = """kind => {
  window.times = [];
  document.addEventListener(kind, (event) => {
    const start = event.timeStamp;
    requestAnimationFrame(() => requestAnimationFrame(() => window.times.push(performance.now() - start)));
  }, { capture: true });
}"""


def run(progress: bool = True) -> dict:
    """Measure every case, with a line on stderr before each if `progress`.

    Returns {"figures": {"click_to_paint_ms": the worst of the medians}, "cases": {case: {"median_ms", "worst_ms",
    "clicks"}}}. Raises RuntimeError where there is no Chromium.
    """
    with chromium() as browser:
        cases = {name: measure(browser, name, progress) for name in CASES}
    return {"figures": {"click_to_paint_ms": max(case["median_ms"] for case in cases.values())}, "cases": cases}


def measure(browser: object, name: str, progress: bool = False) -> dict:
    """Measure the case of that name in a running browser (a playwright Browser)."""
    from lowprec_lab import explorers

    if progress:
        print(f"click to paint: {name}", file=sys.stderr)
    kind, arguments, target = CASES[name]
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    show_widget(page, getattr(explorers, kind)(*(arguments() if callable(arguments) else arguments)))
    times = drag_to_paint(page) if target == "drag" else click_to_paint(page, target)
    page.close()
    return {"median_ms": statistics.median(times), "worst_ms": max(times), "clicks": len(times)}


def click_to_paint(page: object, target: str = ".lplab-bit", clicks: int = CLICKS) -> list[float]:
    """Milliseconds from each of `clicks` clicks on what the selector finds, one after the other, to its picture."""
    page.evaluate(_MEASURE, "click")
    boxes = [button.bounding_box() for button in page.locator(target).all()]
    for click in range(clicks):
        box = boxes[click % len(boxes)]
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_function("count => window.times.length === count", arg=click + 1)
    return page.evaluate("window.times")


def drag_to_paint(page: object, moves: int = CLICKS) -> list[float]:
    """Milliseconds from each of `moves` moves of the marker that the mouse holds to its picture."""
    box = page.locator(".lpround-marker").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.evaluate(_MEASURE, "pointermove")
    for move in range(moves):
        page.mouse.move(x + 7 * (move + 1) * (-1) ** move, y)
        page.wait_for_function("count => window.times.length >= count", arg=move + 1)
    page.mouse.up()
    return page.evaluate("window.times")
