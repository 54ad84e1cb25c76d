"""Saved answers: nothing is lost, whoever writes at the same moment, and whatever happens to the file."""

import errno
import os
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta

import pytest

from lowprec_lab import answers as answers_module
from lowprec_lab import files
from lowprec_lab.answers import load_answers, save_answer
from lowprec_lab.files import WorkspaceError

DECODE = "@fill\ndef decode(codes, fmt):\n    return codes * 2.0"
ULP = "@fill\ndef ulp(x, fmt):\n    # ε, the step\n    return x"


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWPREC_WORK", str(tmp_path / "work"))
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)
    return tmp_path / "work"


@pytest.fixture
def bits(work):
    (work / "answers").mkdir(parents=True)
    return work / "answers" / "bits.py"


def sources(saved):
    return {name: answer.source for name, answer in saved.answers.items()}


def set_aside(work):
    return sorted((work / "answers" / "set_aside").glob("*"))


# ---- saving and loading


def test_what_is_saved_is_loaded(work):
    path = save_answer("bits", "decode", DECODE, helpers="import torch\n")
    assert path == work / "answers" / "bits.py"
    save_answer("bits", "ulp", ULP)
    saved = load_answers("bits")
    assert sources(saved) == {"decode": DECODE, "ulp": ULP}
    assert saved.helpers == "import torch"
    assert saved.problems == []
    assert datetime.now(UTC) - saved.answers["ulp"].saved_at < timedelta(minutes=1)
    lines = path.read_text("utf-8").split("\n")
    for answer in saved.answers.values():
        assert lines[answer.line - 1] == f"# %% answer: {answer.name} | saved {answer.saved_at.isoformat()}"
        assert lines[answer.line] == "@fill"
    assert not set_aside(work)


def test_the_file_is_python_and_nothing_else_is_left_in_the_folder(work):
    path = save_answer("bits", "decode", DECODE)
    compile(path.read_text("utf-8"), str(path), "exec")
    assert {entry.name for entry in path.parent.iterdir()} <= {"bits.py", ".lock"}


def test_saving_again_replaces_only_that_section(work):
    save_answer("bits", "decode", DECODE, helpers="A = 1")
    save_answer("bits", "ulp", ULP)
    newer = DECODE.replace("2.0", "3.0")
    save_answer("bits", "decode", newer)
    saved = load_answers("bits")
    assert sources(saved) == {"decode": newer, "ulp": ULP}
    assert saved.helpers == "A = 1"


def test_helpers_are_kept_replaced_and_removed(work):
    save_answer("bits", "decode", DECODE, helpers="A = 1")
    save_answer("bits", "decode", DECODE)
    assert load_answers("bits").helpers == "A = 1"
    save_answer("bits", "decode", DECODE, helpers="A = 2")
    assert load_answers("bits").helpers == "A = 2"
    save_answer("bits", "decode", DECODE, helpers="\n")
    assert load_answers("bits").helpers is None


def test_sections_follow_the_order_of_the_exercises(work):
    order = ["bit_pattern", "decode", "ulp"]
    save_answer("bits", "ulp", ULP, order=order)
    save_answer("bits", "mine", "def mine(): pass", order=order)
    save_answer("bits", "decode", DECODE, helpers="A = 1", order=order)
    assert list(load_answers("bits").answers) == ["decode", "ulp", "mine"]
    assert (work / "answers" / "bits.py").read_text("utf-8").index("# %% helpers") < 200


def test_without_an_order_sections_stay_in_the_order_of_saving(work):
    save_answer("bits", "ulp", ULP)
    save_answer("bits", "decode", DECODE)
    save_answer("bits", "ulp", ULP + "  # again")
    assert list(load_answers("bits").answers) == ["ulp", "decode"]


@pytest.mark.parametrize(
    "inside",
    [
        "# %% answer: ulp | saved 2026-11-30T10:11:12+00:00",
        "# %% helpers",
        "#%%",
        r"# \%% answer: ulp",
        r"#\\%% x",
        "# %% [markdown]",
    ],
)
def test_a_header_line_inside_an_answer_is_part_of_the_answer(work, inside):
    source = f'@fill\ndef decode(codes, fmt):\n    """A text.\n{inside}\n    """\n    return codes\n{inside}\n# end'
    for _ in range(2):
        save_answer("bits", "decode", source)
        save_answer("bits", "ulp", ULP)
    saved = load_answers("bits")
    assert sources(saved) == {"decode": source, "ulp": ULP}
    assert saved.problems == []


@pytest.mark.parametrize("odd", ["\x0c", "\x85", "\u2028", "\x1c", "é ∞ 𝟙", "\t", "   "])
def test_odd_characters_survive(work, odd):
    source = f"@fill\ndef decode(codes, fmt):\n    # before {odd} after\n    return '''{odd}'''"
    save_answer("bits", "decode", source)
    save_answer("bits", "ulp", ULP)
    assert load_answers("bits").answers["decode"].source == source


def test_newlines_are_stable(work):
    path = save_answer("bits", "decode", DECODE.replace("\n", "\r\n"))
    first = path.read_bytes()
    assert b"\r" not in first
    assert load_answers("bits").answers["decode"].source == DECODE
    path.write_bytes(first.replace(b"\n", b"\r\n"))  # as an editor on Windows leaves it
    assert sources(load_answers("bits")) == {"decode": DECODE}
    assert load_answers("bits").problems == []
    path.write_bytes(b"\xef\xbb\xbf" + first)
    assert load_answers("bits").problems == []


def test_a_file_written_by_hand_needs_no_dates(work, bits):
    bits.write_text(f"# my own words\n\n# %% helpers\nA = 1\n\n#%%answer: decode\n{DECODE}\n", "utf-8")
    saved = load_answers("bits")
    assert saved.problems == []
    assert sources(saved) == {"decode": DECODE}
    assert saved.helpers == "A = 1"
    assert datetime.now(UTC) - saved.answers["decode"].saved_at < timedelta(minutes=1)
    save_answer("bits", "ulp", ULP)
    assert bits.read_text("utf-8").startswith("# my own words\n")


def test_a_missing_file_is_empty(work):
    saved = load_answers("bits")
    assert (saved.answers, saved.helpers, saved.problems) == ({}, None, [])
    assert not work.exists()


def test_a_module_is_a_name_not_a_path(work):
    for name in ("../bits", "a/b", ""):
        with pytest.raises(ValueError, match="Python name"):
            load_answers(name)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("@fill\ndef decode(codes, fmt)\n    return 1", "Line 2 of the answer decode is at fault: it is not Python"),
        ("@fill\ndef encode(x):\n    return x", "it has no 'def decode'"),
        ("%%time\n" + DECODE, "take the line with the % or ! command out"),
        (DECODE + "  # \ud800", "Line 3 .* not UTF-8"),
        (DECODE + "  # \0", "Line 3 .* zero byte"),
        ("", "it has no 'def decode'"),
    ],
)
def test_what_could_not_be_loaded_again_is_not_saved(work, source, expected):
    save_answer("bits", "decode", DECODE)
    with pytest.raises(WorkspaceError, match=expected):
        save_answer("bits", "decode", source)
    assert sources(load_answers("bits")) == {"decode": DECODE}


def test_under_nbgrader_nothing_is_read_or_written(work, monkeypatch):
    path = save_answer("bits", "decode", DECODE)
    before = path.read_bytes()
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    assert save_answer("bits", "ulp", ULP) is None
    saved = load_answers("bits")
    assert (saved.path, saved.answers, saved.helpers, saved.problems) == (None, {}, None, [])
    assert path.read_bytes() == before


# ---- broken files

GOOD = f"# %% answer: decode | saved 2026-11-30T10:11:12+00:00\n{DECODE}\n\n".encode()
TAIL = f"# %% answer: ulp | saved 2026-11-30T10:11:13+00:00\n{ULP}\n".encode()


@pytest.mark.parametrize(
    ("middle", "line", "words"),
    [
        (
            b"# %% answer: max_finite | saved 2026-11-30T10:11:12+00:00\n@fill\ndef max_finite(fmt)\n  x\n",
            8,
            "not Python",
        ),
        (b"# %% answer: max_finite | saved 2026-11-30T10:11:12+00:00\ndef f():\n  '\xff'\n", 8, "not UTF-8"),
        (b"# %% answer: max_finite | saved 2026-11-30T10:11:12+00:00\ndef g(): pass\n", 7, "no 'def max_finite'"),
        (b"# %% answer: max_finite | saved 2026-11-30T10:11:12+00:00\nreturn 5\n", 7, "outside function"),
        (b"# %% answer: max_finite | saved 2026-11-30T10:11:12+00:00\n" + b"(" * 5000 + b"\n", 7, "not Python"),
        (b"# %% answer: max_finite | saved yesterday\ndef max_finite(fmt): pass\n", 6, "cannot be read"),
        (b"# %% answr: max_finite\ndef max_finite(fmt): pass\n", 6, "cannot be read"),
        (b"# %% \xff\xfe\ndef max_finite(fmt): pass\n", 6, "cannot be read"),
        (b"# %% helpers | saved 2026-11-30T10:11:12+00:00\nimport\n", 7, "the helpers cell cannot be used"),
        (b"# %% answer: decode | saved 2026-11-30T10:11:12+00:00\n" + DECODE.encode() + b"\n", 6, "there twice"),
    ],
)
def test_a_broken_section_is_named_and_the_others_are_used(work, bits, middle, line, words):
    original = GOOD + middle + TAIL
    bits.write_bytes(original)
    saved = load_answers("bits")
    assert sources(saved) == {"decode": DECODE, "ulp": ULP}
    assert saved.problems[0].startswith(f"answers/bits.py, line {line}: ")
    assert words in saved.problems[0]
    [kept] = set_aside(work)
    assert kept.read_bytes() == original
    assert kept.name in saved.problems[-1]
    assert kept.name.startswith(f"bits.{datetime.now(UTC):%Y-%m-%d}")
    again = load_answers("bits")  # the live file is whole again
    assert again.problems == []
    assert sources(again) == {"decode": DECODE, "ulp": ULP}
    lines = bits.read_text("utf-8").split("\n")
    assert all(lines[a.line - 1].startswith(f"# %% answer: {a.name}") for a in saved.answers.values())


def test_code_before_the_first_section_is_reported(work, bits):
    bits.write_bytes(b"# words\n\nimport torch\n" + GOOD)
    saved = load_answers("bits")
    assert saved.problems[0].startswith("answers/bits.py, line 3: this line stands before the first section")
    assert sources(saved) == {"decode": DECODE}


def test_a_file_that_is_no_text_at_all(work, bits):
    content = (GOOD + TAIL).decode().encode("utf-16")
    bits.write_bytes(content)
    saved = load_answers("bits")
    assert saved.answers == {}
    assert saved.problems[0].startswith("answers/bits.py, line 1: ")
    assert [kept.read_bytes() for kept in set_aside(work)] == [content]


def test_set_aside_copies_are_never_overwritten(work, bits):
    contents = [GOOD + f"# %% broken {number}\n".encode() for number in range(4)]
    for content in [*contents, contents[0]]:
        bits.write_bytes(content)
        assert load_answers("bits").problems
    assert sorted(kept.read_bytes() for kept in set_aside(work)) == contents


def test_saving_into_a_broken_file_loses_nothing(work, bits):
    original = GOOD + b"# %% nonsense\nx = 1\n"
    bits.write_bytes(original)
    with pytest.warns(UserWarning, match="answers/bits.py, line 6"):
        save_answer("bits", "ulp", ULP)
    assert sources(load_answers("bits")) == {"decode": DECODE, "ulp": ULP}
    assert [kept.read_bytes() for kept in set_aside(work)] == [original]


def test_another_folder_is_read_and_never_changed(tmp_path, work):
    folder = tmp_path / "handed_in"
    folder.mkdir()
    original = GOOD + b"# %% nonsense\n"
    (folder / "bits.py").write_bytes(original)
    saved = load_answers("bits", folder)
    assert sources(saved) == {"decode": DECODE}
    assert saved.problems[0].startswith("handed_in/bits.py, line 6")
    assert [entry.name for entry in folder.iterdir()] == ["bits.py"]
    assert (folder / "bits.py").read_bytes() == original
    assert not work.exists()


# ---- folders and disks that do not cooperate


def failing(monkeypatch, number, *names):
    """Make the calls that write fail, as a full disk or a folder without permission does (root passes any chmod)."""

    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number))

    for name in names:
        monkeypatch.setattr(files.os, name, fail)


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "Input/output")]
)
@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_full_disk_leaves_the_old_file(work, monkeypatch, number, words, call):
    path = save_answer("bits", "decode", DECODE)
    before = path.read_bytes()
    with monkeypatch.context() as broken:
        failing(broken, number, call)
        with pytest.raises(WorkspaceError, match=words) as caught:
            save_answer("bits", "ulp", ULP)
    assert "What was saved before is unchanged" in str(caught.value)
    assert path.read_bytes() == before
    assert {entry.name for entry in path.parent.iterdir()} <= {"bits.py", ".lock"}
    save_answer("bits", "ulp", ULP)
    assert len(load_answers("bits").answers) == 2


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_is_not_writable(work, monkeypatch, number):
    path = save_answer("bits", "decode", DECODE)
    failing(monkeypatch, number, "open")
    with pytest.raises(WorkspaceError, match="not writable.*LOWPREC_WORK"):
        save_answer("bits", "ulp", ULP)
    assert sources(load_answers("bits")) == {"decode": DECODE}
    assert path.is_file()


def test_a_broken_file_in_a_folder_that_is_not_writable(work, bits, monkeypatch):
    original = GOOD + b"# %% nonsense\n" + TAIL
    bits.write_bytes(original)
    failing(monkeypatch, errno.EROFS, "open")
    saved = load_answers("bits")
    assert sources(saved) == {"decode": DECODE, "ulp": ULP}
    assert "line 6" in saved.problems[0]
    assert "nothing was set aside" in saved.problems[-1]
    assert bits.read_bytes() == original
    assert not set_aside(work)


def test_a_file_where_a_folder_should_be(work):
    work.write_text("I am a file")
    with pytest.raises(WorkspaceError, match="work is a file, and a folder is needed"):
        save_answer("bits", "decode", DECODE)
    saved = load_answers("bits")
    assert saved.answers == {}
    assert len(saved.problems) <= 1
    assert work.read_text() == "I am a file"


def test_a_folder_where_the_file_should_be(work):
    (work / "answers" / "bits.py").mkdir(parents=True)
    with pytest.raises(WorkspaceError, match="is a folder, and a file is needed"):
        save_answer("bits", "decode", DECODE)
    saved = load_answers("bits")
    assert saved.answers == {}
    assert "could not be read" in saved.problems[0]


def test_a_lock_that_is_never_given_back(work, monkeypatch):
    import filelock

    save_answer("bits", "decode", DECODE)
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.1)
    holder = filelock.FileLock(work / "answers" / ".lock")
    with holder, pytest.raises(WorkspaceError, match="Another notebook has been writing"):
        save_answer("bits", "ulp", ULP)
    save_answer("bits", "ulp", ULP)


def test_a_drive_without_file_locks_is_locked_by_a_file(work, monkeypatch):
    import filelock

    def refuse(*arguments, **options):
        raise NotImplementedError

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    save_answer("bits", "decode", DECODE)
    assert sources(load_answers("bits")) == {"decode": DECODE}
    assert not (work / "answers" / ".lock.soft").exists()


def test_a_linked_file_stays_a_link(work, bits, tmp_path):
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_bytes(GOOD)
    bits.symlink_to(elsewhere)
    save_answer("bits", "ulp", ULP)
    assert bits.is_symlink()
    assert b"def ulp" in elsewhere.read_bytes()


# ---- many at once, and killed


def test_two_notebooks_that_save_at_the_same_moment_lose_nothing(work, tmp_path):
    script = textwrap.dedent("""
        import pathlib, sys, time
        from lowprec_lab.answers import save_answer
        me, folder = sys.argv[1], pathlib.Path(sys.argv[2])
        (folder / f"ready_{me}").touch()
        while not (folder / "go").exists():
            time.sleep(0.001)
        for number in range(50):
            save_answer("bits", f"{me}_{number}", f"def {me}_{number}(): return {number}")
    """)
    processes = [subprocess.Popen([sys.executable, "-c", script, me, str(tmp_path)]) for me in ("left", "right")]
    while not all((tmp_path / f"ready_{me}").exists() for me in ("left", "right")):
        assert all(process.poll() is None for process in processes)
    (tmp_path / "go").touch()
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    saved = load_answers("bits")
    assert saved.problems == []
    assert set(saved.answers) == {f"{me}_{number}" for me in ("left", "right") for number in range(50)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_process_killed_in_the_middle_of_a_save_leaves_no_half_file(work, tmp_path):
    script = textwrap.dedent("""
        import os, pathlib, signal, sys, time
        from lowprec_lab.answers import load_answers, save_answer
        filler = "#" + "x" * 50_000
        save_answer("bits", "first", "def first(): pass")
        path = load_answers("bits").path
        last = -1
        for round in range(25):
            child = os.fork()
            if child == 0:
                number = last
                while True:
                    number += 1
                    save_answer("bits", "second", f"def second(): return {number}\\n{filler}\\nEND = {number}")
            time.sleep(0.02 + 0.0013 * round)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            saved = load_answers("bits")
            assert saved.problems == [], saved.problems
            assert "first" in saved.answers
            if "second" in saved.answers:
                lines = saved.answers["second"].source.split("\\n")
                number = int(lines[0].split()[-1])
                assert lines[1] == filler and lines[2] == f"END = {number}" and number >= last
                last = number
        assert last >= 5, last
    """)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    save_answer("bits", "decode", DECODE)
    assert set(load_answers("bits").answers) == {"first", "second", "decode"}
    assert not set_aside(work)


def test_what_killed_processes_left_behind_is_cleared_away(work, bits):
    old, fresh = bits.with_name(".bits.py.1-aa.tmp"), bits.with_name(".bits.py.2-bb.tmp")
    old.touch()
    fresh.touch()
    os.utime(old, (1_000_000, 1_000_000))
    save_answer("bits", "decode", DECODE)
    assert not old.exists()
    assert fresh.exists()


def test_the_escape_is_undone_exactly():
    for line in ("# %% a", "#%%", r"# \%% a", r"# \\%%", "#  %%", "# \\ %%", "x # %%"):
        stored = answers_module._TO_ESCAPE.sub(r"\1\\\2", line)
        assert not answers_module._MARKER.match(stored)
        assert answers_module._ESCAPED.sub(r"\1\2", stored) == line
