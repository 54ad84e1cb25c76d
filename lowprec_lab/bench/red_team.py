"""The red team: submissions that cheat, break or attack people, graded by this package's engine and by stock nbgrader.

Both run `nbgrader autograde` in a course of their own, with an honest student before and after the attackers. An
attack has won when it gained points over what its honest part deserves, when a secret came back, when anything changed
outside, when a process stayed, when a page that an instructor opens holds its script, or when an honest student is not
graded.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lowprec_lab.bench.attack_room import Room, active_content, remove, student_of
from lowprec_lab.bench.attacks import CHAPTER, KINDS, Attack, load_attacks
from lowprec_lab.bench.chromium import chromium, find_chromium

ROOMS = 2
_HONEST_EVERY = 25
_BATCH_LIMIT_S = 1800.0
_MEMORY_LIMIT_BYTES = 3 * 2**30
_STOCK_LIMIT_S = 240.0  # for one attack and one honest student: a batch that takes longer holds a class up


@dataclass
class Result:
    """What one attack gained, as sentences. lost: honest exercises that were not given their points."""

    attack: str
    kind: str
    tries: str
    gains: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    seconds: float = 0.0
    not_run: str = ""


def run(progress: bool = True) -> dict:
    """Grade every attack here and with stock nbgrader. Figures: `attacks`, `won_here`, `won_on_stock`."""
    attacks = load_attacks()
    here = grade_here(attacks)
    stock = list(_with_bar(grade_on_stock(attacks), len(attacks), progress))
    ours = {result.attack: result for result in here}
    figures = {
        "attacks": len(attacks),
        "won_here": sum(bool(result.gains) for result in here),
        "won_on_stock": sum(bool(result.gains) for result in stock),
    }
    rows = [(ours[theirs.attack], theirs) for theirs in stock]
    return {
        "figures": figures,
        "kinds": _by_kind(rows),
        "table": f"{_summary(_by_kind(rows))}\n\n{table(rows)}",
        "here": [asdict(result) for result in here],
        "stock": [asdict(result) for result in stock],
    }


def table(rows: list[tuple[Result, Result]]) -> str:
    """One line for each attack: who let it win, and with what."""
    width = max(len(ours.attack) for ours, _ in rows)
    lines = [f"{'attack':<{width}}  {'here':<5} {'stock':<5}  what it tries; what it gains on stock nbgrader"]
    for ours, theirs in rows:
        won = ["won" if result.gains else "n/a" if result.not_run else "-" for result in (ours, theirs)]
        facts = [*(f"HERE: {gain}" for gain in ours.gains), *theirs.gains, theirs.not_run]
        gains = "; ".join(fact for fact in dict.fromkeys(facts) if fact)
        lines.append(f"{ours.attack:<{width}}  {won[0]:<5} {won[1]:<5}  {ours.tries} {gains}".rstrip())
    return "\n".join(lines)


def _summary(kinds: dict[str, dict[str, int]]) -> str:
    """The counts of each kind, as a table of Markdown."""
    total = {figure: sum(counts[figure] for counts in kinds.values()) for figure in next(iter(kinds.values()))}
    rows = [
        f"| {kind} | {counts['attacks']} | {counts['won_here']} | {counts['won_on_stock']} |"
        for kind, counts in [*kinds.items(), ("**all**", total)]
    ]
    return "\n".join(["| attacks that | number | win here | win on stock nbgrader |", "|---|---|---|---|", *rows])


def _by_kind(rows: list[tuple[Result, Result]]) -> dict[str, dict[str, int]]:
    counts = {}
    for kind, meaning in KINDS.items():
        mine = [row for row in rows if row[0].kind == kind]
        won_here, won_on_stock = (sum(bool(row[side].gains) for row in mine) for side in (0, 1))
        counts[meaning] = {"attacks": len(mine), "won_here": won_here, "won_on_stock": won_on_stock}
    return counts


# --- here: all of them in one batch for each room -------------------------------------------------------------------


def grade_here(attacks: list[Attack], rooms: int = ROOMS) -> list[Result]:
    """Grade the attacks with this package's engine, in `rooms` courses side by side, each in one batch."""
    shares = [attacks[start::rooms] for start in range(rooms)]
    with _folder() as place, ThreadPoolExecutor(rooms) as pool:
        made = [Room(place / str(number), stock=False) for number in range(rooms)]
        found = [result for results in pool.map(_grade_batch, made, shares) for result in results]
    order = {attack.name: place for place, attack in enumerate(attacks)}
    return sorted(found, key=lambda result: order[result.attack])


def _grade_batch(room: Room, attacks: list[Attack]) -> list[Result]:
    room.prepare()
    results = {attack.name: Result(attack.name, attack.kind, attack.tries) for attack in attacks}
    with room.listening():
        students = dict(_hand_in_all(room, attacks))
        honest = [student for student, attack in students.items() if attack is None]
        room.name_a_student(honest[0])
        ended = room.nbgrader("autograde", CHAPTER, limit_s=_BATCH_LIMIT_S)
        for line in sorted(set(room.remains())):
            _blame(results, line, f"left a process: {line[:60]}")
        room.nbgrader("generate_feedback", CHAPTER, "--student=s*-people-*", limit_s=300)
    times = _seconds_by_student(room, students)
    pages = {}
    for student, attack in students.items():
        if attack is not None:
            result = results[attack.name]
            result.gains += room.gains(student, attack)
            result.lost += room.lost(student, attack)
            result.seconds = max(result.seconds, times.get(student, 0.0))
            pages[student] = room.pages_for_people(student) if attack.kind == "people" else {}
    found = [
        *room.disturbed(honest),
        *room.changed_outside(honest),
        *room.left_on_the_machine(),
        *([] if ended else ["the batch did not end"]),
    ]
    if room.peak_bytes > _MEMORY_LIMIT_BYTES:
        found.append(f"the process that grades took {room.peak_bytes / 2**30:.1f} GiB")
    for sentence in found:
        _blame(results, _before(sentence, students), sentence)
    for student, sentence in _seen_by_people(pages, room.mark):
        results[students[student].name].gains.append(sentence)
    return list(results.values())


def _hand_in_all(room: Room, attacks: list[Attack]) -> Iterator[tuple[str, Attack | None]]:
    """Hand in the attacks, with honest students before, between and after them."""
    number = 0
    for place, attack in enumerate(attacks):
        if place % _HONEST_EVERY == 0:
            yield _honest(room, number), None
        for _ in range(attack.by_students):
            number += 1
            room.hand_in(student_of(number, attack), attack)
            yield student_of(number, attack), attack
    yield _honest(room, number), None


def _honest(room: Room, number: int) -> str:
    student = f"s{number:04d}-z-honest"  # after the attack of the same number
    room.hand_in_honestly(student)
    return student


def _blame(results: dict[str, Result], text: str, sentence: str) -> None:
    """Count a disturbance for the attack that is named in a text, else for the first."""
    name = next((name for name in results if name in text.split()), next(iter(results)))
    results[name].gains.append(sentence)


def _before(sentence: str, students: dict[str, Attack | None]) -> str:
    """The attack that was handed in just before the honest student whom a sentence is about."""
    last = ""
    for student, attack in students.items():
        if student in sentence:
            return last
        last = attack.name if attack else last
    return last


def _seconds_by_student(room: Room, students: dict) -> dict[str, float]:
    """How long each took, from the times of the autograded pages, which come one after the other."""
    times = {}
    for student in students:
        with contextlib.suppress(OSError):
            times[student] = (room.course / "autograded" / student / CHAPTER / f"{CHAPTER}.ipynb").stat().st_mtime
    in_order = sorted(times, key=times.get)
    return {student: times[student] - times[before] for before, student in zip(in_order, in_order[1:], strict=False)}


# --- stock: one batch for each attack ---------------------------------------------------------------------------------


def grade_on_stock(attacks: list[Attack], rooms: int = ROOMS) -> Iterator[Result]:
    """Grade each attack with stock nbgrader, in a fresh copy of a course, beside two honest students."""
    with _folder() as place, ThreadPoolExecutor(rooms) as pool:
        template = place / "template"
        room = Room(template, stock=True)
        room.prepare()
        room.hand_in_honestly("a-honest")
        room.nbgrader("autograde", CHAPTER, limit_s=_STOCK_LIMIT_S)
        if room.disturbed(["a-honest"]):
            raise RuntimeError(f"stock nbgrader does not grade an honest student here: {room.log[-2000:]}")
        yield from pool.map(lambda attack: _grade_one(template, place / attack.name, room, attack), attacks)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="red-team-"))
    try:
        yield place
    finally:
        remove(place)


def _grade_one(template: Path, place: Path, like: Room, attack: Attack) -> Result:
    if attack.not_on_stock:
        return Result(attack.name, attack.kind, attack.tries, not_run=attack.not_on_stock)
    shutil.copytree(template, place)
    room = Room(place, stock=True)
    room.secrets |= {kind: like.secrets[kind] for kind in ("seed", "home")}
    room.released = like.released
    room.name_a_student("a-honest")
    result, honest = Result(attack.name, attack.kind, attack.tries), ["a-honest", "z-honest"]
    with room.listening():
        students = [student_of(number, attack) for number in range(attack.by_students)]
        for student in students:
            room.hand_in(student, attack)
        room.hand_in_honestly("z-honest")
        started = time.monotonic()
        if not room.nbgrader("autograde", CHAPTER, limit_s=_STOCK_LIMIT_S):
            result.gains.append(f"the batch did not end in {_STOCK_LIMIT_S:g} s")
        result.seconds = time.monotonic() - started
        result.gains += sorted({f"left a process: {line[:60]}" for line in room.remains()})
        if attack.kind == "people":
            room.nbgrader("generate_feedback", CHAPTER, "--student=s*", limit_s=120)
    try:
        for student in students:
            result.gains += room.gains(student, attack)
            result.lost += room.lost(student, attack)
            pages = room.pages_for_people(student) if attack.kind == "people" else {}
            result.gains += [sentence for _, sentence in _seen_by_people({student: pages}, room.mark)]
    except sqlite3.Error as error:
        result.gains.append(f"the gradebook cannot be read: {error}")
    result.gains += [*room.disturbed(honest), *room.changed_outside(honest)]
    remove(place)
    return result


# --- what people see ------------------------------------------------------------------------------------------------


def _seen_by_people(pages: dict[str, dict[str, str]], mark: str) -> Iterator[tuple[str, str]]:
    """(student, sentence) for each page that holds a script of the attack's; a browser opens it where there is one."""
    for student, seen in pages.items():
        for where, page in seen.items():
            for tag in active_content(page, mark):
                yield student, f"{tag} in the page of the {where}"
    if any(pages.values()) and find_chromium() is not None:
        yield from _run_in_a_browser(pages, mark)


def _run_in_a_browser(pages: dict[str, dict[str, str]], mark: str) -> Iterator[tuple[str, str]]:
    with chromium() as browser:
        for student, seen in pages.items():
            for where, content in seen.items():
                if _script_runs(browser, content, mark):
                    yield student, f"its script runs in the page of the {where}"


def _script_runs(browser: object, content: str, mark: str) -> bool:
    """Whether the page calls the function `mark`, in itself or in a frame. Nothing is fetched from outside."""
    page = browser.new_page()
    ran: list[bool] = []
    try:
        page.expose_function(mark, lambda *_: ran.append(True))
        page.route("**/*", lambda route: _fulfil(route, content))
        page.goto("http://red-team.invalid/page", wait_until="domcontentloaded", timeout=20_000)
        page.wait_for_timeout(150)
        page.evaluate("document.querySelectorAll('a, button').forEach((each) => each.isConnected && each.dispatchEvent("
                      "new MouseEvent('mouseover', {bubbles: true})))")  # fmt: skip
        page.wait_for_timeout(50)
    finally:
        page.close()
    return bool(ran)


def _fulfil(route: object, content: str) -> None:
    wanted: Callable = route.fulfill if route.request.url.endswith("/page") else route.abort
    wanted(body=content, content_type="text/html; charset=utf-8") if wanted == route.fulfill else wanted()


def _with_bar(steps: Iterator, total: int, progress: bool) -> Iterator:
    if not progress:
        return steps
    from tqdm import tqdm

    return tqdm(steps, desc="red team", unit="attack", total=total)
