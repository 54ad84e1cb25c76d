"""Verdicts on submissions, kept as files, so that what was judged once is not judged again.

`<course>/.lowprec/verdicts/<chapter>/<student>.json` holds the verdicts on one submission and the key that they belong
to: a hash of the answers in the submission, the seed's id and the grader's hash. A file whose key differs is of no use.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from lowprec_lab.authoring import write_page
from lowprec_lab.blanks import in_order
from lowprec_lab.chapters import CHAPTERS
from lowprec_lab.graders.verdict import Row, Verdict
from lowprec_lab.grading.course import installed_release
from lowprec_lab.sources import Source, reference_source

_PACKAGE = Path(__file__).resolve().parents[1]
_PRIVATE = ".lowprec"
# What a verdict follows from, besides the answers and the seed.
_JUDGING = ("blanks.py", "calls.py", "formats.py", "limits.py", "sources.py", "graders/*.py")
_DRIVING = ("grading/clean.py", "grading/judge.py", "grading/wire.py", "grading/worker.py")


@functools.lru_cache(maxsize=1)
def grader_hash() -> str:
    """12 hex digits that change with the package's version, its graders, its judge or the installed references."""
    digest = hashlib.sha256(installed_release().encode())
    chapters = tuple(f"{chapter.module}.py" for chapter in CHAPTERS)
    for path in sorted({path for name in (*_JUDGING, *_DRIVING, *chapters) for path in _PACKAGE.glob(name)}):
        _add(digest, path.relative_to(_PACKAGE).as_posix().encode(), path.read_bytes())
    for blank in in_order():
        source = reference_source(blank.name) or Source("")
        _add(digest, blank.name.encode(), source.text.encode(), source.helpers.encode())
    return digest.hexdigest()[:12]


def seed_id(seed: int) -> str:
    """8 hex digits that say which seed was used, and not what it is."""
    return hashlib.sha256(f"seed of a course: {seed}".encode()).hexdigest()[:8]


def key_of(answers: Mapping[str, Source], chapter: str, seed: int) -> str:
    """What the verdicts on the answers of one submission are kept under."""
    digest = hashlib.sha256()
    for name, source in sorted(answers.items()):
        _add(digest, *(part.encode("utf-8", "surrogatepass") for part in (name, source.text, source.helpers)))
    _add(digest, chapter.encode())
    return f"{digest.hexdigest()[:32]}-{seed_id(seed)}-{grader_hash()}"


def _add(digest, *parts: bytes) -> None:
    for part in parts:  # lengths keep neighbouring parts apart
        digest.update(len(part).to_bytes(8, "big") + part)


def private_file(course: Path, kind: str, chapter: str, student: str) -> Path:
    """Where the runner keeps what it knows of one submission. kind: "verdicts" or "graded"."""
    return Path(course) / _PRIVATE / kind / chapter / f"{student}.json"


def to_json(verdicts: Mapping[str, Verdict]) -> str:
    """Verdicts by exercise as JSON text."""
    return json.dumps(_to_data(verdicts), indent=1)


def _to_data(verdicts: Mapping[str, Verdict]) -> dict[str, dict]:
    return {name: verdict.as_dict() for name, verdict in verdicts.items()}


def from_json(text: str) -> dict[str, Verdict]:
    """The verdicts that `to_json` wrote. Raises ValueError, KeyError or TypeError for anything else."""
    return _from_data(json.loads(text))


def _from_data(data: dict[str, dict]) -> dict[str, Verdict]:
    return {name: _verdict(fields) for name, fields in data.items()}


def _verdict(fields: dict) -> Verdict:
    rows = [Row(row["label"], row["value"], [tuple(each) for each in row["bits"]]) for row in fields["rows"]]
    return Verdict(**{**fields, "rows": rows})


def save_verdicts(course: Path, chapter: str, student: str, key: str, verdicts: Mapping[str, Verdict]) -> Path:
    """Keep the verdicts on one submission: the whole file or none of it. Raises OSError."""
    path = private_file(course, "verdicts", chapter, student)
    content = {"key": key, "release": installed_release(), "verdicts": _to_data(verdicts)}
    write_page(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def load_verdicts(course: Path, chapter: str, student: str, key: str | None = None) -> dict[str, Verdict] | None:
    """The verdicts that are kept for a student under `key` (under any when omitted); None where there are none."""
    try:
        content = json.loads(private_file(course, "verdicts", chapter, student).read_text(encoding="utf-8"))
        if key is not None and content["key"] != key:
            return None
        return _from_data(content["verdicts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
