"""A headless Chromium, and a page that shows one widget without a notebook: for measuring and for tests."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
CHROMIUM_ON_MACOS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
CHROMIUM_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
]

# What a widget's JavaScript needs of a notebook: a model with get, set, save_changes, on and off.
_HARNESS = """
class Model {
  constructor(state) { this.state = state; this.listeners = {}; this.saves = 0; }
  get(name) { return this.state[name]; }
  set(name, value) { this.state[name] = value; (this.listeners["change:" + name] ?? []).forEach((call) => call()); }
  save_changes() { this.saves += 1; }
  on(name, call) { (this.listeners[name] ??= []).push(call); }
  off(name, call) { this.listeners[name] = (this.listeners[name] ?? []).filter((each) => each !== call); }
}
function revive(name, value) {
  if (value === null || typeof value !== "object" || !("base64" in value)) return value;
  const bytes = Uint8Array.from(atob(value.base64), (character) => character.charCodeAt(0));
  return new DataView(bytes.buffer);
}
window.showWidget = async (source, state) => {
  const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  window.widgetModule = module;
  window.model = new Model(JSON.parse(state, revive));
  const el = document.getElementById("widget");
  el.replaceChildren();
  window.unmount = await module.default.render({ model: window.model, el });
};
"""


def find_chromium() -> str | None:
    """The path of an installed Chromium or Chrome (LOWPREC_CHROMIUM chooses one); None if there is none."""
    chosen = os.environ.get("LOWPREC_CHROMIUM")
    on_path = (shutil.which(name) for name in CHROMIUM_NAMES)
    on_macos = (path for path in CHROMIUM_ON_MACOS if Path(path).exists())
    return next((path for path in (chosen, *on_path, *on_macos) if path), None)


@contextmanager
def chromium(**options: object) -> Iterator[object]:
    """A running headless Chromium (a playwright Browser), closed at the end. Raises RuntimeError if it cannot run."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise RuntimeError("playwright is not installed: pip install 'lowprec_lab[dev]'") from error
    path = find_chromium()
    if path is None:
        raise RuntimeError("no Chromium was found. Install one, or set LOWPREC_CHROMIUM to its path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_OPTIONS, **options)
        try:
            yield browser
        finally:
            browser.close()


def show_widget(page: object, widget: object, background: str = "#ffffff") -> None:
    """Show an anywidget alone in a playwright page, with a model that has no kernel behind it (`window.model`)."""
    page.set_content(
        f"<!doctype html><html lang='en'><head><title>widget</title><style>{widget._css}</style></head>"
        f"<body style='margin:16px;background:{background}'><main><div id='widget'></div></main></body></html>"
    )
    page.add_script_tag(content=_HARNESS)
    state = {name: getattr(widget, name) for name in ("_panels", "_state")}
    text = json.dumps(state, default=lambda raw: {"base64": base64.b64encode(raw).decode("ascii")})
    page.evaluate("([source, state]) => window.showWidget(source, state)", [widget._esm, text])
