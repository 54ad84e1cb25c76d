"""Everything works without a network once it is installed: the commands and a page, run where only loopback exists."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A new network namespace has a loopback interface that is down: kernels talk over it, so it is brought up first.
LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket() as probe:
    request = struct.pack("16sh14x", b"lo", 0)
    flags = struct.unpack("16sh14x", fcntl.ioctl(probe, 0x8913, request))[1]
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh14x", b"lo", flags | 1))
with socket.socket() as probe:
    probe.settimeout(2)
    try:
        probe.connect(("192.0.2.1", 80))
    except OSError as error:
        print("offline:", error.strerror or error, file=sys.stderr)
    else:
        sys.exit("there is a network in here")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """Runs Python with arguments in a namespace of its own without a network; fails where that cannot be had."""
    if sys.platform != "linux":
        pytest.skip("network namespaces exist on Linux only")
    unshare = shutil.which("unshare")
    assert unshare, "install util-linux: this test needs `unshare`"
    work = tmp_path_factory.mktemp("work")

    def run(*args: str, **environment: str) -> subprocess.CompletedProcess:
        command = [unshare, "--map-root-user", "--net", sys.executable, "-c", LOOPBACK_UP, *args]
        env = {**os.environ, "LOWPREC_WORK": str(work), **environment}
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=240)

    return run


@pytest.mark.slow
def test_the_commands_work(offline, tmp_path):
    for command in (["doctor"], ["open", "00"], ["progress"], ["reveal", "decode"]):
        done = offline("-m", "lowprec_lab", *command)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith("offline: ")
    done = offline("-m", "lowprec_lab", "check", "--answers", "solutions", "--json")
    assert json.loads(done.stdout)["passed"] == json.loads(done.stdout)["total"] >= 11


@pytest.mark.slow
def test_a_released_page_runs_and_a_build_succeeds(offline, tmp_path):
    page = ROOT / "notebooks" / "01_bit_layouts" / "01_bit_layouts.ipynb"
    run = ["-m", "nbconvert", "--to", "notebook", "--execute", "--output-dir"]
    done = offline(*run, str(tmp_path), str(page))
    assert done.returncode == 0, done.stderr
    code = "import sys; from pathlib import Path; from lowprec_lab import authoring; authoring.build(Path(sys.argv[1]))"
    done = offline("-c", code, str(tmp_path / "built"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "built/01_bit_layouts/01_bit_layouts.ipynb").read_bytes() == page.read_bytes()


def test_pages_and_widgets_load_nothing_from_the_net():
    """No page, script or style of the package names a remote script or style sheet."""
    files = [*ROOT.glob("notebooks/**/*.ipynb"), *ROOT.glob("lowprec_lab/explorers/*.[jc]s*")]
    assert len(files) >= 4
    for path in files:
        text = path.read_text()
        assert "<script" not in text, path
        assert 'src=\\"http' not in text, path
        assert "@import" not in text, path
        assert 'import("http' not in text, path
