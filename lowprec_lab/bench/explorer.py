"""How long BitExplorer takes from a click to the picture that shows it, in a headless Chromium.

A click is a real one, sent to the browser. The time runs from the browser's own time stamp of the event to the second
animation frame after it: by then the frame with the change has been painted, so the figure is an upper bound, and about
one frame (16.7 ms) of it is waiting for the screen.
"""

from __future__ import annotations

import statistics
import sys

from lowprec_lab.bench.chromium import chromium, show_widget

CLICKS = 40

CASES: dict[str, list[str]] = {
    "E4M3": ["float8_e4m3fn"],
    "BF16": ["bfloat16"],
    "three side by side": ["float8_e4m3fn", "float8_e5m2", "bfloat16"],
}

_MEASURE = """
window.times = [];
document.addEventListener("click", (event) => {
  const start = event.timeStamp;
  requestAnimationFrame(() => requestAnimationFrame(() => window.times.push(performance.now() - start)));
}, { capture: true });
"""


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
    from lowprec_lab.explorers import BitExplorer

    if progress:
        print(f"click to paint: {name}", file=sys.stderr)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    show_widget(page, BitExplorer(CASES[name]))
    times = click_to_paint(page)
    page.close()
    return {"median_ms": statistics.median(times), "worst_ms": max(times), "clicks": len(times)}


def click_to_paint(page: object, clicks: int = CLICKS) -> list[float]:
    """Milliseconds from each of `clicks` clicks on bit buttons, one after the other, to its picture."""
    page.evaluate(_MEASURE)
    boxes = [button.bounding_box() for button in page.locator(".lpbits-bit").all()]
    for click in range(clicks):
        box = boxes[click % len(boxes)]
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_function("count => window.times.length === count", arg=click + 1)
    return page.evaluate("window.times")
