"""Where submissions are judged: workers of dask.distributed, each of which keeps one sandbox and judges many.

A submission's answers go to a worker as bytes, and come back as the verdicts' JSON. https://distributed.dask.org
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import signal
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass

import dask
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster, Worker, WorkerPlugin, as_completed, get_worker
from distributed.scheduler import KilledWorker
from tornado.util import TimeoutError as TornadoTimeoutError

from lowprec_lab.graders.registry import load_graders
from lowprec_lab.grading.course import CourseError, installed_release
from lowprec_lab.grading.judge import judge_all
from lowprec_lab.grading.processes import open_workers
from lowprec_lab.grading.verdicts import grader_hash, to_json
from lowprec_lab.sources import Source

_CONNECT_S, _WORKERS_S = 15.0, 60.0
# Nobody looks at these: no dashboard, no pages, no profile; and a task is given up when it killed two workers.
_SETTINGS = {
    "distributed.worker.profile.enabled": False,
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "distributed.scheduler.allowed-failures": 1,
    "distributed.scheduler.worker-saturation": 1.0,
}


@dataclass(frozen=True)
class Job:
    """One submission to judge: whose, and its answers (see `packed`)."""

    student: str
    answers: bytes


@dataclass(frozen=True)
class Judged:
    """What became of a job: the verdicts as JSON (see `verdicts.from_json`), or why there are none."""

    job: Job
    verdicts: str = ""
    failure: str = ""


def packed(answers: Mapping[str, Source]) -> bytes:
    """Answers as JSON: {exercise: [source, helpers]}."""
    return json.dumps({name: [source.text, source.helpers] for name, source in answers.items()}).encode()


class Judge(WorkerPlugin):
    """What each dask worker keeps: where processes for answers come from, and a lock, for it judges one at a time."""

    def __init__(self, name: str, sandbox: bool) -> None:
        self.name, self._sandbox = name, sandbox

    def setup(self, worker: Worker) -> None:
        """Open the sandbox. Raises what the sandbox raises where it cannot start."""
        load_graders()
        self.lock, self._open = threading.Lock(), contextlib.ExitStack()
        self.workers = self._open.enter_context(open_workers(self._sandbox))

    def teardown(self, worker: Worker) -> None:
        """Close it, with all that runs in it."""
        self._open.close()


def judge_answers(answers: bytes, judge: str, chapter: str, seed: int, grader: str) -> str:
    """Runs on a dask worker: the verdicts on a submission's answers, as JSON. judge: the name of the plugin there.

    Raises RuntimeError on a worker that joined later, with another grader than the one of that hash.
    """
    if grader_hash() != grader:
        raise RuntimeError(f"the worker at {get_worker().address} has another version of lowprec_lab")
    kept, sources = get_worker().plugins[judge], {name: Source(*each) for name, each in json.loads(answers).items()}
    with kept.lock:
        return to_json(judge_all(sources, chapter, kept.workers, seed=seed))


class Judges:
    """Workers that are ready to judge. Made by `judges`."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name

    def judge(self, jobs: Iterable[Job], chapter: str, seed: int) -> Iterator[Judged]:
        """Judge submissions, many at once; they come back as they are done, in any order."""
        task = functools.partial(judge_answers, judge=self._name, chapter=chapter, seed=seed, grader=grader_hash())
        return spread(self._client, task, jobs)


@contextlib.contextmanager
def judges(workers: int | None = None, scheduler: str | None = None, sandbox: bool = True) -> Iterator[Judges]:
    """Workers of this machine (one for each processor when omitted), or those of the scheduler at an address.

    Raises CourseError for a scheduler that cannot be reached, one without workers, workers of another version, and a
    sandbox that cannot start there.
    """
    name = f"lowprec_lab-{uuid.uuid4().hex}"  # two classes may share a scheduler
    with _quiet_logs(), _client(workers, scheduler) as client:
        _require_workers(client, scheduler)
        _open_sandboxes(client, Judge(name, sandbox))
        try:
            yield Judges(client, name)
        finally:
            with contextlib.suppress(Exception):  # the scheduler may be gone, and the sandboxes with it
                client.unregister_worker_plugin(name)


@contextlib.contextmanager
def _client(workers: int | None, scheduler: str | None) -> Iterator[Client]:
    if scheduler is None:
        with dask.config.set(_SETTINGS), contextlib.ExitStack() as opened:
            with _ctrl_c_ignored():
                cluster = opened.enter_context(_local_cluster(workers or CPU_COUNT))
            yield opened.enter_context(Client(cluster))
        return
    try:
        client = Client(scheduler, timeout=_CONNECT_S)
    except (OSError, ValueError, TypeError, TornadoTimeoutError) as problem:
        raise CourseError(
            f"no scheduler answers at {scheduler} ({_first_line(problem)}). Start one with `dask scheduler`, and give "
            "the address that it prints, or leave --scheduler out to grade on this machine. Nothing was changed"
        ) from None
    with client:
        yield client


def _local_cluster(workers: int) -> LocalCluster:
    # TLS with a certificate that lives as long as the cluster: any user of this machine could otherwise connect to the
    # scheduler, and have code run in the instructor's name.
    return LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=True, host="127.0.0.1", protocol="tls", security=True,
        dashboard_address="127.0.0.1:0", worker_dashboard_address=None, silence_logs=logging.CRITICAL,
        scheduler_kwargs={"dashboard": False}, memory_limit=0,
    )  # fmt: skip


@contextlib.contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Let processes that are started here inherit that Ctrl-C is not for them.

    A terminal sends it to all, and it is this process that ends the others, in order.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Silence distributed's own log: what it has to say comes back as sentences."""
    loggers = [logging.getLogger(name) for name in ("distributed", "tornado.application")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _describe() -> tuple[str, str]:
    """Runs on a dask worker: the release and the grader there."""
    return installed_release(), grader_hash()


def _require_workers(client: Client, scheduler: str | None) -> None:
    try:
        client.wait_for_workers(1, timeout=_WORKERS_S)
    except TimeoutError:
        raise CourseError(
            f"the scheduler at {scheduler} has no workers. Start some with `dask worker {scheduler} --nthreads 1`, "
            "on machines where lowprec_lab is installed, and run this again"
        ) from None
    ours, theirs = _describe(), _ask_all(client)
    for address, found in sorted(theirs.items()):
        if found != ours:
            raise CourseError(
                f"the worker at {address} has {_version_text(found)}, and this machine {_version_text(ours)}: their "
                "verdicts would differ. Install the same release, and the same reference answers, in both places"
            )


def _version_text(found: tuple[str, str] | str) -> str:
    return found if isinstance(found, str) else f"lowprec_lab {found[0]} with grader {found[1]}"


def _ask_all(client: Client) -> dict[str, tuple[str, str] | str]:
    found = client.run(_describe, on_error="return")
    return {
        address: f"no usable lowprec_lab ({_first_line(answer)})" if isinstance(answer, Exception) else tuple(answer)
        for address, answer in found.items()
    }


def _open_sandboxes(client: Client, judge: Judge) -> None:
    try:
        client.register_plugin(judge, name=judge.name)
    except Exception as problem:
        raise CourseError(f"a worker cannot judge. {problem}") from problem


# --- many at once -----------------------------------------------------------------------------------------------------


def spread(client: Client, task: Callable[[bytes], str], jobs: Iterable[Job]) -> Iterator[Judged]:
    """Run `task` on each job's answers, on all workers of `client`; results come as they are done.

    A job during which a worker died, or whose result died with one, is set aside and run again alone: only what kills
    its worker then is to blame.
    Raises CourseError when the connection to the scheduler is lost.
    """
    suspects: list[Job] = []
    for judged in _spread(client, task, jobs):
        if judged.failure in (_KILLED, _LOST):
            suspects.append(judged.job)
        else:
            yield judged
    for job in suspects:
        yield from _spread(client, task, [job])


_KILLED = "The process that judged it ended, and ended again when it was tried alone."
_LOST = "Its verdicts were lost twice, with the process that held them. Run this again."


def _spread(client: Client, task: Callable[[bytes], str], jobs: Iterable[Job]) -> Iterator[Judged]:
    waiting, finished, running = iter(jobs), as_completed(), {}
    while True:
        # Two for each worker: one that it works on, and one that waits there. More would only sit in memory.
        wanted = 2 * max(len(client.nthreads()), 1)
        while len(running) < wanted and (job := next(waiting, None)) is not None:
            future = client.submit(task, job.answers, key=f"judge-{uuid.uuid4().hex}", retries=1)
            running[future] = job
            finished.add(future)
        if not running:
            return
        future = next(finished)
        yield _judged(running.pop(future), future, connected=client.status == "running")


def _judged(job: Job, future, connected: bool) -> Judged:
    if future.status == "finished":
        try:
            return Judged(job, verdicts=future.result())
        except CancelledError:
            return Judged(job, failure=_LOST)
    if future.status != "error":
        # A result stays with its worker until it is fetched, and is lost when the worker dies before that.
        if connected:
            return Judged(job, failure=_LOST)
        raise CourseError(
            "the connection to the scheduler was lost. What was judged until then is kept: start it again, and run "
            "this again to go on"
        )
    problem = future.exception()
    if isinstance(problem, KilledWorker):
        return Judged(job, failure=_KILLED)
    return Judged(job, failure=f"It could not be judged: {type(problem).__name__}: {_first_line(problem)}.")


def _first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]
