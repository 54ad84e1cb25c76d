"""What browser tests share: a Chromium, axe-core, and a JupyterLab of their own to drive in it.

    with chromium() as browser, jupyter_lab(root) as lab:
        page = lab.open(browser, "page.ipynb")
        page.run_cell("decode")
        page.wait_for_output("check-decode", "bit-exact")

Cells are named by their id or their position. JupyterLab is a real server in a process of its own; it ends with the
`with` block.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lowprec_lab.bench.chromium import chromium, find_chromium, show_widget

__all__ = ["Lab", "NotebookPage", "axe_violations", "chromium", "find_chromium", "jupyter_lab", "show_widget"]

_START_SECONDS = 90
_PAGE_MS = 45_000
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}

# --- accessibility ----------------------------------------------------------------------------------------------------


def axe_violations(page: object, within: str | None = None) -> list[str]:
    """What axe-core finds wrong with a page, or with the part that a CSS selector names: a line for each violation."""
    import axe_playwright_python

    source = Path(axe_playwright_python.__file__).with_name("axe.min.js")
    if not page.evaluate("'axe' in window"):
        page.evaluate(source.read_text(encoding="utf-8") + "\n;0")
    found = page.evaluate("within => axe.run(within ? within : document)", within)
    assert found["passes"], f"axe-core looked at nothing: {within!r} is not on the page"
    return [
        f"{violation['id']}: {violation['help']}: {node['html'][:160]} {node['failureSummary']}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]


# --- JupyterLab -------------------------------------------------------------------------------------------------------


@dataclass
class Lab:
    """A running JupyterLab."""

    url: str
    token: str
    root: Path
    process: subprocess.Popen
    log: Path
    opened: list = field(default_factory=list)

    def open(self, browser: object, path: str, *, width: int = 1300, height: int = 950) -> NotebookPage:
        """The notebook at `path` (relative to the root) in a page of its own, its kernel ready."""
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(_PAGE_MS)
        workspace = f"test{len(self.opened)}"
        self.opened.append(page)
        page.goto(f"{self.url}lab/workspaces/{workspace}/tree/{path}?token={self.token}&reset")
        page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.context?.isReady")
        opened = NotebookPage(page)
        opened.choose_kernel()
        opened.wait_until_idle()
        return opened


@contextmanager
def jupyter_lab(root: Path, work: Path | None = None, **environment: str) -> Iterator[Lab]:
    """JupyterLab on a free port with `root` as its folder, and with settings and a runtime folder of its own.

    work: the learner's folder (LOWPREC_WORK); `root` when omitted. environment: further variables for the kernels.
    """
    private = root.parent / f"{root.name}-jupyter"
    notification = private / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    notification.parent.mkdir(parents=True, exist_ok=True)
    notification.write_text('{"fetchNews": "false", "checkForUpdates": false}')  # a box over the page, else
    port, token, log = _free_port(), secrets.token_hex(16), private / "lab.log"
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": str(root),
        "ServerApp.allow_root": True,
        "ServerApp.open_browser": False,
        "IdentityProvider.token": token,
        "LabApp.expose_app_in_browser": True,  # the tests give JupyterLab its commands through window.jupyterapp
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
    }
    command = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=root, env=_environment(private, work or root, environment), stdout=output, stderr=output
        )
    try:
        lab = Lab(f"http://127.0.0.1:{port}/", token, root, process, log)
        _wait_until_up(lab)
        yield lab
    finally:
        _end(process)


def _environment(private: Path, work: Path, more: dict[str, str]) -> dict[str, str]:
    package = str(Path(__file__).parents[1])
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    own = {name: str(private / folder) for name, folder in folders.items()}
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, **own, "LOWPREC_WORK": str(work), "PYTHONPATH": paths, **more}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_up(lab: Lab) -> None:
    ask = urllib.request.Request(f"{lab.url}api/status", headers={"Authorization": f"token {lab.token}"})
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if lab.process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(ask, timeout=5) as reply:
                json.load(reply)
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.3)
    raise RuntimeError(f"JupyterLab did not start:\n{lab.log.read_text()[-3000:]}")


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class NotebookPage:
    """One notebook in JupyterLab. `page` is the playwright Page, for what a person does with mouse and keys."""

    def __init__(self, page: object) -> None:
        self.page = page

    def evaluate(self, function: str, argument: object = None) -> object:
        """The result of a JavaScript function of (panel, argument): JupyterLab's NotebookPanel, and the argument."""
        code = (
            f"argument => Promise.race([({function})(window.jupyterapp.shell.currentWidget, argument), new Promise("
            f"(_, refuse) => setTimeout(() => refuse(new Error('JupyterLab did not answer')), {_PAGE_MS}))])"
        )
        return self.page.evaluate(code, argument)

    def command(self, name: str, **arguments: object) -> None:
        """Run one of JupyterLab's commands, and wait for it."""
        run = "async (panel, [name, args]) => { await window.jupyterapp.commands.execute(name, args); }"
        self.evaluate(run, [name, arguments])

    def choose_kernel(self) -> None:
        """Wait for the kernel; where the notebook names none, take the one that JupyterLab proposes."""
        has_kernel = "() => Boolean(window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel)"
        accept = self.page.locator(".jp-Dialog button.jp-mod-accept")
        deadline = time.monotonic() + _PAGE_MS / 1000
        while not self.page.evaluate(has_kernel):
            assert time.monotonic() < deadline, "the notebook got no kernel"
            if accept.is_visible():
                accept.click()
            self.page.wait_for_timeout(200)

    def position(self, cell: str | int) -> int:
        """Where a cell is; AssertionError for an id that the notebook does not have."""
        if isinstance(cell, int):
            return cell
        ids = self.evaluate("panel => panel.content.widgets.map(cell => cell.model.id)")
        assert cell in ids, f"no cell has the id {cell!r}; there are {ids}"
        return ids.index(cell)

    def run_cell(self, cell: str | int) -> str:
        """Run a cell, wait until it is done, and return what its output says."""
        self.select(cell)
        self.command("notebook:run-cell")
        self.wait_until_idle()
        return self.output(cell)

    def run_all(self) -> None:
        """Run every cell from the top, and wait until all are done. JupyterLab stops at the first one that raises."""
        self.command("notebook:run-all-cells")
        self.wait_until_idle()

    def select(self, cell: str | int) -> None:
        """Make a cell the active one, and bring it into view."""
        go = (
            "async (panel, at) => { panel.content.activeCellIndex = at;"
            " await panel.content.scrollToItem(at); panel.content.deselectAll(); }"
        )
        self.evaluate(go, self.position(cell))

    def source(self, cell: str | int) -> str:
        """A cell's source."""
        return self.evaluate(
            "(panel, at) => panel.content.widgets[at].model.sharedModel.getSource()", self.position(cell)
        )

    def set_source(self, cell: str | int, text: str) -> None:
        """Replace a cell's source, as typing does."""
        write = "(panel, [at, text]) => panel.content.widgets[at].model.sharedModel.setSource(text)"
        self.evaluate(write, [self.position(cell), text])

    def outputs(self, cell: str | int) -> list[dict]:
        """A cell's outputs as the notebook file would hold them."""
        return self.evaluate(
            "(panel, at) => panel.content.widgets[at].model.outputs?.toJSON() ?? []", self.position(cell)
        )

    def output(self, cell: str | int) -> str:
        """What a cell's output says on the screen, and the text of its exceptions."""
        return self.output_area(cell).inner_text() if self.outputs(cell) else ""

    def output_area(self, cell: str | int) -> object:
        """The part of the page (a playwright Locator) that shows a cell's output."""
        return self.page.locator(f'.jp-Cell[data-windowed-list-index="{self.position(cell)}"] .jp-OutputArea').first

    def wait_for_output(self, cell: str | int, text: str, timeout: float = 60) -> str:
        """Wait until a cell's output contains `text`, and return all of it. AssertionError if it never does."""
        deadline = time.monotonic() + timeout
        while text not in (seen := self.output(cell)):
            assert time.monotonic() < deadline, f"no {text!r} in the output of {cell!r} after {timeout:g} s:\n{seen}"
            self.page.wait_for_timeout(100)
        return seen

    def wait_until_idle(self) -> None:
        """Wait until the kernel has nothing to do."""
        self.page.wait_for_function(
            "() => window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'"
        )

    def restart_kernel(self) -> None:
        """Restart the kernel, as the button does after its dialog."""
        self.evaluate("async panel => { await panel.sessionContext.session.kernel.restart(); }")
        self.wait_until_idle()

    def set_theme(self, theme: str) -> None:
        """Switch to the "light" or the "dark" theme."""
        self.command("apputils:change-theme", theme=THEMES[theme])
        self.page.wait_for_function(
            "light => document.body.dataset.jpThemeLight === light", arg="true" if theme == "light" else "false"
        )

    def is_trusted(self) -> bool:
        """Whether JupyterLab trusts every code cell of the notebook."""
        return self.evaluate("panel => [...panel.context.model.cells].every(c => c.type !== 'code' || c.trusted)")

    def trust(self) -> None:
        """Trust the notebook, and confirm it."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:trust'); }")
        self.page.locator(".jp-Dialog button.jp-mod-accept").click()
        self.page.wait_for_function(
            "() => [...window.jupyterapp.shell.currentWidget.context.model.cells]"
            ".every(cell => cell.type !== 'code' || cell.trusted)"
        )

    def save(self) -> None:
        """Save the notebook."""
        self.evaluate("async panel => { await panel.context.save(); }")

    def close(self) -> None:
        """Leave the page without a question about unsaved changes."""
        self.page.close(run_before_unload=False)
