"""Attacks that forge the verdict: replace what compares, what counts, or what is said between worker and judge."""

from lowprec_lab.bench.attacks import Attack

NOTHING = "return torch.zeros(x.shape, dtype=torch.int32)"

# What a worker would have to find to talk to the judge itself: the sockets that its process has open.
SOCKETS = """
    import os, socket, stat, struct

    def sockets():
        for handle in map(int, os.listdir("/proc/self/fd")):
            try:
                if stat.S_ISSOCK(os.fstat(handle).st_mode):
                    yield socket.socket(fileno=os.dup(handle))
            except OSError:
                pass

    def say(content):
        for each in sockets():
            try:
                each.settimeout(2)
                each.sendall(content)
            except OSError:
                pass
"""


def frame(header: str) -> str:
    """Python for the bytes of a message with this header."""
    return f"struct.pack('<IQ', len({header!r}), 0) + {header!r}.encode()"


ATTACKS = [
    Attack(
        "replaces_check",
        "Defines its own `check`, which returns full points.",
        NOTHING,
        before="def check(answer):\n    return 2.0",
    ),
    Attack(
        "replaces_check_in_the_package",
        "Puts a `check` that returns full points into the package and into the notebook's names.",
        NOTHING,
        before="""
            import builtins, sys
            import lowprec_lab, lowprec_lab.exercises
            lowprec_lab.check = lowprec_lab.exercises.check = builtins.check = lambda answer: 2.0
            sys.modules["__main__"].__dict__["check"] = lowprec_lab.check
        """,
    ),
    Attack(
        "patches_the_comparison",
        "Replaces the comparison by one that finds everything equal.",
        NOTHING,
        before="""
            from lowprec_lab.graders import case
            same_bits = case.Case.same_bits
            def agree(self, got, want, **more):
                return same_bits(self, want, want, **more)
            case.Case.same_bits = agree
        """,
    ),
    Attack(
        "patches_the_grade",
        "Replaces the function that turns comparisons into points.",
        NOTHING,
        before="""
            import lowprec_lab.exercises, lowprec_lab.graders.judging as judging
            from lowprec_lab.graders.verdict import Verdict
            def full_marks(blank, function, **more):
                return Verdict(blank.name, blank.exercise, "exact", "", True, blank.points, blank.points)
            judging.grade = lowprec_lab.exercises.grade = full_marks
        """,
    ),
    Attack(
        "patches_the_oracle",
        "Makes the expected values be its own results.",
        NOTHING,
        before="""
            from lowprec_lab.graders import oracle
            oracle.bit_pattern = lambda x: torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack(
        "drops_the_checks",
        "Leaves one check of the exercise, which it passes.",
        NOTHING,
        before="""
            from lowprec_lab.graders import registry
            registry.load_graders()
            def easy(answer, case):
                case.same_bits(1, 1)
            registry.CHECKS["bit_pattern"] = [registry.Check("bit_pattern", easy, 1)]
        """,
    ),
    Attack(
        "patches_numpy",
        "Replaces numpy's `any` and `stack`, with which results are compared.",
        """
        import numpy as np
        kept = np.stack
        np.stack = lambda arrays, *rest, **more: kept([np.zeros_like(a) for a in arrays], *rest, **more)
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack(
        "input_transformer",
        "One line turns every later cell of the kernel into nothing; a graded cell without a result has full points.",
        NOTHING,
        before="""
            from IPython import get_ipython
            get_ipython().input_transformers_cleanup.append(lambda lines: ["None\\n"])
        """,
    ),
    Attack(
        "input_transformer_in_a_cell_of_its_own",
        "The same line in a cell above the answer.",
        NOTHING,
        cells=("get_ipython().input_transformers_cleanup.append(lambda lines: ['None'])",),
    ),
    Attack(
        "shows_other_numbers",
        "Tells the kernel to show every number as the points of the exercise.",
        NOTHING,
        cells=(
            """
            shown = get_ipython().display_formatter.formatters["text/plain"]
            shown.for_type(float, lambda number, page, cycle: page.text("2.0"))
            """,
        ),
    ),
    Attack(
        "sends_a_result_first",
        "While it is checked it sends the kernel's client a result of its own; nbgrader believes the first.",
        """
        from IPython import get_ipython
        kernel = get_ipython().kernel
        content = {"data": {"text/plain": "2.0"}, "metadata": {}, "execution_count": 1}
        kernel.session.send(kernel.iopub_socket, "execute_result", content, parent=kernel.get_parent("shell"))
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
    ),
    Attack(
        "prints_the_points",
        "Prints full points, and a verdict that says so.",
        "print('2.0')\nprint('✓ bit_pattern   bit-exact on 9,999 of 9,999 inputs')\n" + NOTHING,
        cells=("print(2.0)\n2.0",),
    ),
    Attack(
        "raises_a_pass",
        "Raises an exception that looks like a verdict.",
        """
        from lowprec_lab.calls import AnswerFailed
        raise AnswerFailed("exact", "bit-exact on 9,999 of 9,999 inputs", "points 2.0 of 2.0")
        """,
    ),
    Attack(
        "forges_a_reply",
        "Writes a verdict to the channel between worker and judge.",
        "say(" + frame('{"dict": {"passed": true, "points": {"float": "0x1.0p+1"}}}') + ")\n" + NOTHING,
        before=SOCKETS,
    ),
    Attack(
        "replies_ahead",
        "Sends a hundred good replies in advance, so that every later question has its answer before it is put.",
        "say(" + frame('{"dict": {"ok": true}}') + " * 100)\n" + NOTHING,
        before=SOCKETS,
    ),
    Attack(
        "announces_too_much",
        "Announces a message of 2^60 bytes on the channel.",
        "say(struct.pack('<IQ', 2**31, 2**60))\n" + NOTHING,
        before=SOCKETS,
    ),
    Attack(
        "lengths_that_are_no_numbers",
        "Sends tensors of negative, endless and NaN sizes on the channel.",
        "\n".join(
            "say(" + frame(f'{{"dict": {{"ok": {{"tensor": {tensor}}}}}}}') + ")"
            for tensor in (
                '{"dtype": "int32", "shape": [-1], "order": [0], "at": 0, "size": -4}',
                '{"dtype": "int32", "shape": [NaN], "order": [0], "at": 0, "size": NaN}',
                '{"dtype": "int32", "shape": [1e400], "order": [0], "at": 0, "size": Infinity}',
                '{"dtype": "int32", "shape": [4611686018427387904], "order": [0], "at": 0, "size": 0}',
            )
        )
        + "\n"
        + NOTHING,
        before=SOCKETS,
    ),
    Attack(
        "pickles_on_the_channel",
        "Sends a pickle that runs a command wherever somebody loads it.",
        """
        import pickle
        class Command:
            def __reduce__(self):
                return os.system, ("touch @DROP@/pickled",)
        content = pickle.dumps(Command())
        say(struct.pack("<IQ", len(content), len(content)) + content * 2)
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
        before=SOCKETS,
    ),
    Attack(
        "drips_a_reply",
        "Sends a reply byte by byte, to hold the judge up.",
        """
        import time
        say(struct.pack("<IQ", 4000, 0))
        for _ in range(55):
            say(b" ")
            time.sleep(1)
        return torch.zeros(x.shape, dtype=torch.int32)
        """,
        before=SOCKETS,
    ),
    Attack(
        "hangs_up",
        "Closes every file and socket that its process has open.",
        "import os\nos.closerange(3, 4096)\n" + NOTHING,
    ),
    Attack(
        "patches_the_worker",
        "Replaces the code that packs its results by code that packs nonsense.",
        NOTHING,
        before="""
            from lowprec_lab.grading import wire
            import lowprec_lab.grading.worker
            def nonsense(value):
                return b'{"dict": {"ok": {"dict": {"passed": true, "points": {"float": "inf"}}}}}', b"0" * 1000
            wire.pack = nonsense
        """,
    ),
]
