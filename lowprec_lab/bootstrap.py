"""Sets up the lab: makes .venv, installs the package into it, and opens JupyterLab.

Run by path, before anything is installed: `python3 lowprec_lab/bootstrap.py [--extras dev] [--lab]`. So it uses the
standard library only, and a syntax that old Pythons read: they must be told in a sentence that they are too old.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)

# PyTorch's own index of builds without CUDA. On Linux the default build brings CUDA along, ten times the size.
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 3

# What comes with what, so that `make lab` starts at once after `make test`.
INCLUDED = {"dev": {"class", "peers"}}

# Compressed downloads, and what they become on disk. Measured with constraints.txt; PyTorch with CUDA and PyTorch
# outside Linux are estimates.
DOWNLOAD_MB = {"torch": {"cpu": 200, "cuda": 2600, "other": 130}, "peers": 140, "dev": 220}
DISK_GB = {"cpu": 2, "cuda": 8, "other": 2}

# On its first start JupyterLab asks whether it may fetch news and look for updates: a question about the network, in
# front of the first page.
QUIET_START = {"@jupyterlab/apputils-extension:notification": {"checkForUpdates": False, "fetchNews": "false"}}


class SetupError(Exception):
    """A reason why the lab cannot be set up: one sentence, and what to do."""


def require_python(version=sys.version_info[:2], system=None, machine=None):
    """Raises SetupError where the course cannot run, whatever is installed."""
    system, machine = system or platform.system(), machine or platform.machine()
    if tuple(version) < OLDEST_PYTHON:
        newer = next((name for name in _newer_pythons() if shutil.which(name)), None)
        advice = (
            "{} is installed: make lab PYTHON={}".format(newer, newer)
            if newer
            else "Install a newer one and try again (make lab PYTHON=python3.12, where python3 is another)"
        )
        raise SetupError(
            "Python {}.{} is too old: the lab needs Python {}.{} or newer. {}.".format(*version, *OLDEST_PYTHON, advice)
        )
    if system == "Darwin" and machine == "x86_64":
        raise SetupError(
            "PyTorch has no recent builds for Macs with an Intel processor, and this Python is for one. On a Mac with "
            "an M chip, install a native (arm64) Python. On an Intel Mac, use Colab: README.md has its first cell."
        )


def _newer_pythons():
    return ["python3.{}".format(minor) for minor in (13, 12, 11, 14)]


def venv_python(folder):
    """Path of the interpreter in the virtual environment `folder`, whether or not it exists."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


# What is installed: a stamp that is written last, so that an interrupted setup is taken up again.


def wanted_state(root, extras):
    """What the stamp says when `extras` are installed from the project file and the constraints as they are now."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((root / name).read_bytes())
    return {"root": str(root), "files": digest.hexdigest(), "extras": sorted({extras} | INCLUDED.get(extras, set()))}


def read_stamp(folder):
    """The stamp in the virtual environment, or {} where setting up has not come to its end."""
    try:
        stamp = json.loads((folder / "lowprec_lab.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def is_ready(stamp, wanted):
    """Whether what `stamp` says is installed is all that `wanted` needs."""
    same = all(stamp.get(key) == wanted[key] for key in ("root", "files"))
    return same and set(wanted["extras"]) <= set(stamp.get("extras", ()))


def write_stamp(folder, stamp, wanted):
    """Records `wanted`, and what else the same files installed earlier; the file appears whole or not at all."""
    extras = set(wanted["extras"])
    if all(stamp.get(key) == wanted[key] for key in ("root", "files")):
        extras |= set(stamp.get("extras", ()))
    part = folder / "lowprec_lab.json.part"
    part.write_text(json.dumps(dict(wanted, extras=sorted(extras)), indent=1) + "\n", encoding="utf-8")
    os.replace(str(part), str(folder / "lowprec_lab.json"))


# The virtual environment.


def make_environment(folder, stamp, root):
    """Makes the virtual environment, or repairs what an interrupted setup or a moved folder left."""
    python = venv_python(folder)
    if stamp and stamp.get("root") != str(root):
        print("This folder was moved since .venv was made; its scripts point to the old place. Making it again.")
        _create(folder, clear=True)
    elif not _answers(python, "-c", "pass"):
        _create(folder, clear=folder.exists())
    elif not _answers(python, "-c", "import sys; sys.exit(sys.version_info[:2] < {})".format(OLDEST_PYTHON)):
        raise SetupError(
            ".venv was made with a Python older than {}.{}. Delete the folder .venv and try again.".format(
                *OLDEST_PYTHON
            )
        )
    if not _answers(python, "-m", "pip", "--version") and not _answers(python, "-m", "ensurepip", "--upgrade"):
        _create(folder, clear=True)


def _answers(python, *arguments):
    if not python.exists():
        return False
    return subprocess.call([str(python), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def _create(folder, clear):
    command = [sys.executable, "-m", "venv", *(["--clear"] if clear else []), str(folder)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    if result.returncode:
        advice = "Debian and Ubuntu keep that part of Python apart: sudo apt-get install python3-venv"
        raise SetupError("Python could not make .venv. It said:\n{}\n{}".format(result.stdout.strip(), advice))


# Which PyTorch.


def has_nvidia_gpu():
    """Whether there is an NVIDIA driver: told by its files, since nothing is installed yet that could ask it."""
    return shutil.which("nvidia-smi") is not None or os.path.exists("/proc/driver/nvidia")


def is_reachable(address, seconds=PROBE_SECONDS):
    """Whether `address` answers within `seconds`, name look-up and connection together."""
    answered = []

    def ask():
        try:
            request = urllib.request.Request(address, method="HEAD")
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                answered.append(answer.status < 400)
        except (
            OSError,
            ValueError,
        ):  # no network, no such host, refused, timed out, a proxy setting that is no address
            answered.append(False)

    # A thread, since no timeout of urllib's covers the look-up of the name.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answered) and answered[0]


def torch_build(system=None, nvidia=None, probe=is_reachable):
    """Which build to install: "cpu" (from PyTorch's CPU index), "cuda" (what pip finds on Linux), "other" elsewhere."""
    if (system or platform.system()) != "Linux":
        return "other"
    if has_nvidia_gpu() if nvidia is None else nvidia:
        return "cuda"
    return "cpu" if probe(CPU_WHEELS + "/torch/") else "cuda"


def download_sentence(build, extras):
    """How much will be downloaded, at most: what pip has in its cache or on disk comes from there."""
    megabytes = DOWNLOAD_MB["torch"][build] + DOWNLOAD_MB[extras]
    size = "{:.1f} GB".format(megabytes / 1000) if megabytes >= 1000 else "{} MB".format(megabytes)
    what = {
        "cpu": "with PyTorch's CPU build, since there is no NVIDIA GPU here",
        "cuda": "PyTorch with CUDA included; a few hundred MB where pip finds a smaller build",
        "other": "PyTorch included",
    }[build]
    return "Installing the lab into .venv: up to {} to download, {} GB on disk ({}).".format(size, DISK_GB[build], what)


def require_disk(folder):
    """Raises SetupError where the disk cannot hold even the smallest installation."""
    free, needed = shutil.disk_usage(str(folder)).free / 1e9, min(DISK_GB.values())
    if free < needed:
        raise SetupError(
            "{:.1f} GB are free on the disk of {}, and installing takes {} GB or more. Make room and try again.".format(
                free, folder, needed
            )
        )


def pip_commands(python, root, extras, build):
    """The pip commands to run, in order; each entry is (command, whether setting up can go on without it)."""
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    commands = []
    if build == "cpu":
        # Torch alone comes from that index; what torch needs comes with the rest.
        commands.append((pip + ["--no-deps", "--index-url", CPU_WHEELS, pinned(root, "torch")], True))
    constraints = ["--constraint", str(root / "constraints.txt")]
    commands.append((pip + constraints + ["--editable", "{}[{}]".format(root, extras)], False))
    return commands


def pinned(root, package):
    """The requirement that constraints.txt has for `package`, "torch==2.13.0" say."""
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.strip() for line in lines if line.startswith(package + "=="))


def install(folder, root, extras):
    """Installs the package with `extras` under the constraints. Raises SetupError when pip does not manage."""
    build = torch_build()
    require_disk(root)
    print(download_sentence(build, extras), flush=True)
    for command, optional in pip_commands(venv_python(folder), root, extras, build):
        if subprocess.call(command, cwd=str(root)) == 0:
            continue
        if not optional:
            raise SetupError(
                "pip could not install the lab; its last lines above say why. Without a network, it needs the packages "
                "on disk (PIP_FIND_LINKS). Then run the same command again: it goes on where it stopped."
            )
        print("PyTorch's CPU index did not have it after all; taking what pip finds.", flush=True)


def silence_first_start(folder):
    """Answers JupyterLab's question about news with no, in this environment only; an existing file is left alone."""
    settings = folder / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    if not settings.exists():
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(json.dumps(QUIET_START, indent=1) + "\n", encoding="utf-8")


def set_up(root, extras):
    """Makes sure that .venv holds the lab with `extras`. Returns the path of its Python."""
    folder = root / ".venv"
    stamp, wanted = read_stamp(folder), wanted_state(root, extras)
    if not (is_ready(stamp, wanted) and venv_python(folder).exists()):
        make_environment(folder, stamp, root)
        install(folder, root, extras)
        silence_first_start(folder)
        write_stamp(folder, stamp, wanted)
    return venv_python(folder)


# JupyterLab.


def lab_command(python, page, arguments, is_root=False):
    """The command that opens JupyterLab on `page`, with the reader's own `arguments` (LAB_ARGS) after ours."""
    allow_root = ["--allow-root"] if is_root and "--allow-root" not in arguments else []
    return [str(python), "-m", "jupyterlab", page, *allow_root, *arguments]


def open_lab(python, chapter="00"):
    """Copies the chapter to the learner's folder and becomes JupyterLab there; returns an exit status if it cannot."""
    opened = subprocess.run(
        [str(python), "-m", "lowprec_lab", "open", chapter, "--json"], stdout=subprocess.PIPE, universal_newlines=True
    )
    if opened.returncode:
        return opened.returncode
    page = Path(json.loads(opened.stdout)["path"])
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    if is_root:
        print("You are root, so JupyterLab is started with --allow-root.")
    print("Opening {} in JupyterLab. Ctrl-C here ends it.".format(page), flush=True)
    command = lab_command(python, page.name, shlex.split(os.environ.get("LAB_ARGS", "")), is_root)
    os.chdir(str(page.parent))
    if os.name != "nt":
        os.execv(command[0], command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is JupyterLab's to answer
    return subprocess.call(command)


def main(arguments=None):
    """Sets up, and opens JupyterLab when asked. Returns the exit status: 0, 1 (see stderr), or 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="bootstrap.py", description="Set up the lab in .venv.")
    parser.add_argument("--extras", choices=["peers", "dev"], default="peers", help="dev: the tests' tools as well")
    parser.add_argument("--lab", action="store_true", help="open JupyterLab on chapter 00 (options for it: LAB_ARGS)")
    options = parser.parse_args(arguments)
    try:
        require_python()
        python = set_up(ROOT, options.extras)
        return open_lab(python) if options.lab else 0
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again: it goes on where it stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
