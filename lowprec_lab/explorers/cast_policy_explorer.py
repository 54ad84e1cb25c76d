"""CastPolicyExplorer: one forward pass of a GPT under autocast, op by op, with the dtypes that go in and come out.

The kernel runs the passes for all tables once; the browser only shows them. A table of the reader's own is run in the
kernel at each change.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from lowprec_lab.autocast import POLICIES
from lowprec_lab.explorers import cast_policy_picture, casting
from lowprec_lab.explorers.widget import Explorer, code, one_of


class CastPolicyExplorer(Explorer):
    """Which dtype goes into each op of a GPT of one block, what autocast makes of it, and what comes out.

    table: "cpu" or "cuda" (torch's tables, as `cast_policy` has them), "none" (no autocast) or "own": the CPU's table
    with the changes in `policies`, from the name of an op to a policy.
    `table`, `policies`, `op` (the chosen op, one of `casting.KEYS`) and `again` (whether the second forward pass of the
    block is shown) can be read and set later; `rows` and `casts` say what the explorer shows.

    Raises ValueError for an unknown table, op or policy.
    """

    _esm = code("cast_policy_explorer", "js")
    _css = code("cast_policy_explorer", "css")
    runs_on = ("cast_policy", "MiniAutocast")

    def __init__(self, table: str = "cpu", policies: dict[str, str] | None = None) -> None:
        super().__init__()
        self._state = {
            "table": one_of(table, tuple(casting.TABLES)),
            "op": "qkv",
            "again": False,
            "own": _checked(policies or {}),
        }
        self.refresh()
        self.observe(self._follow, names="_state")

    def _set(self, **change: object) -> None:
        self._state = {**self._state, **change}

    @property
    def table(self) -> str:
        """Whose table decides: "cpu", "cuda", "none" or "own"."""
        return self._state["table"]

    @table.setter
    def table(self, table: str) -> None:
        self._set(table=one_of(table, tuple(casting.TABLES)))

    @property
    def policies(self) -> dict[str, str]:
        """What the own table has otherwise than the CPU's: a policy by name of an op."""
        return dict(self._state["own"])

    @policies.setter
    def policies(self, policies: dict[str, str]) -> None:
        self._set(own=_checked(policies))

    @property
    def op(self) -> str:
        """The chosen op."""
        return self._state["op"]

    @op.setter
    def op(self, op: str) -> None:
        self._set(op=one_of(op, casting.KEYS))

    @property
    def again(self) -> bool:
        """Whether the second forward pass of the block is shown."""
        return self._state["again"]

    @again.setter
    def again(self, again: bool) -> None:
        self._set(again=bool(again))

    @property
    def rows(self) -> list[dict]:
        """The ops that are shown, as `casting.trace` describes them."""
        return self._panels[0]["passes"][self.table][self.again]

    @property
    def casts(self) -> dict[str, int]:
        """How many casts of "activations" and of "weights" the pass makes, and how many "kept" ones it uses."""
        return casting.counts(self.rows)

    def refresh(self) -> None:
        """Run the passes with the code that is in use now, and with the reader's own table."""
        own = self.policies
        found = casting.runs(own)
        self._panels = [
            {
                "passes": found.passes,
                "sources": found.sources,
                "tables": [list(each) for each in casting.TABLES.items()],
                "policies": list(POLICIES),
                "own": own,
            }
        ]

    def _follow(self, change: dict) -> None:
        """Another table of the reader's own, from the page or from Python: run it."""
        if self._state["own"] != self._panels[0]["own"]:
            self.refresh()

    def plot(self) -> Figure:
        """The same as a static picture, with the policies of the other device beside it. Returns a Figure."""
        other = "cpu" if self.table in ("cuda", "own") else "cuda"
        passes, lines = self._panels[0]["passes"], [each["line"] for each in self._panels[0]["sources"]]
        return cast_policy_picture.draw(self.table, self.rows, other, passes[other][0], lines)

    def __repr__(self) -> str:
        rows, casts = self.rows, self.casts
        lines = "; ".join(each["line"] for each in self._panels[0]["sources"])
        stream = " and ".join(casting.stream(rows)) or "not reached"
        end = f"{rows[-1]['op']} gives {rows[-1]['out']}" if rows[-1]["out"] else f"{rows[-1]['op']} refuses its dtypes"
        return (
            f"CastPolicyExplorer: {casting.TABLES[self.table]}, {len(rows)} ops: {casts['activations']} casts of "
            f"activations, {casts['weights']} of weights, {casts['kept']} kept ones used; residual stream {stream}; "
            f"{end}  [{lines}]"
        )


def _checked(policies: dict[str, str]) -> dict[str, str]:
    return {one_of(op, casting.NAMED): one_of(policy, POLICIES) for op, policy in policies.items()}
