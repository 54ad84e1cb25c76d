"""CastPolicyExplorer: the dtypes of torch's own autocast, driven by the learner's code, mouse and keys, accessible."""

import base64

import pytest
import torch
from misconceptions import WRONG, label
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec_lab import CastPolicyExplorer
from lowprec_lab.autocast import POLICIES, op_name, small_gpt
from lowprec_lab.bench.other_answers import other_answers
from lowprec_lab.explorers import casting
from lowprec_lab.graders import autocast_oracle as exact

# --- what torch itself does -------------------------------------------------------------------------------------------


class Results(TorchFunctionMode):
    """What comes out of each function of torch that is called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if op_name(function) in casting.NAMED:
            self.seen.append((op_name(function), result.dtype))
        return result


class Kernels(TorchDispatchMode):
    """The ops for which a kernel is chosen, with the dtype of the first argument and of the first result."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) else result
        name = op.overloadpacket.__name__
        if isinstance(first, torch.Tensor) and args and isinstance(args[0], torch.Tensor):
            self.seen.append((name, args[0].dtype, first.dtype))
        return result


def on_device(model, device):
    """The model with fresh parameters there. Without a GPU they cannot have gradients, nor be moved there."""
    made = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                fresh = torch.nn.Parameter(torch.empty(weight.shape, device=device), requires_grad=device == "cpu")
                made.setdefault(weight, fresh)
                module._parameters[name] = made[weight]
    return model


def torchs_own(device, passes):
    """What torch's own autocast does: results of functions, and kernels, a list of each for every pass."""
    found = []
    with FakeTensorMode():
        model = on_device(small_gpt(fused=False), device)
        tokens = torch.zeros(2, 8, dtype=torch.int64, device=device)
        was = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, torch.bfloat16)
        torch.autocast_increment_nesting()
        try:
            for _ in range(passes):
                with Results() as results, Kernels() as kernels:
                    model(tokens, tokens)
                found.append((results.seen, kernels.seen))
        finally:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
            torch.set_autocast_enabled(device, was[0])
            torch.set_autocast_dtype(device, was[1])
    return found


DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}
# The loss is looked at through its kernels: as a function it is one on every device.
LOSS = {"cross_entropy_loss", "log_softmax", "nll_loss"}


@pytest.mark.parametrize(("device", "passes"), [("cpu", 2), ("cuda", 1)])
def test_every_dtype_is_that_of_torchs_own_autocast(device, passes):
    shown = casting.runs({}).passes[device]
    for again, (results, kernels) in enumerate(torchs_own(device, passes)):
        rows = shown[again]
        mine = [(row["op"], DTYPES[row["out"]]) for row in rows if row["op"] not in LOSS]
        assert mine == [each for each in results if each[0] not in LOSS]
        assert DTYPES[rows[-1]["out"]] == results[-1][1]
        copies = [(before, after) for name, before, after in kernels if name == "_to_copy" and before != after]
        casts = [arg for row in rows for arg in row["args"] if arg["how"] == "cast"]
        assert sorted(map(str, copies)) == sorted(str((DTYPES[arg["was"]], DTYPES[arg["is"]])) for arg in casts)
        for kernel, op in (("_softmax", "softmax"), ("native_layer_norm", "layer_norm"), ("gelu", "gelu")):
            reached = [DTYPES[row["args"][0]["is"]] for row in rows if row["op"] == op]
            assert [before for name, before, _ in kernels if name == kernel] == reached


def test_the_cast_cache_saves_the_weights_of_the_second_pass():
    explorer = CastPolicyExplorer()
    assert explorer.casts == {"activations": 4, "weights": 5, "kept": 0}
    explorer.again = True
    assert explorer.casts == {"activations": 4, "weights": 0, "kept": 5}
    explorer.table = "none"
    assert explorer.casts == {"activations": 0, "weights": 0, "kept": 0}


def test_a_pass_that_cannot_go_on_ends_where_torch_refuses():
    explorer = CastPolicyExplorer("own", {"softmax": "fp32", "matmul": "as is"})
    last = explorer.rows[-1]
    assert (last["key"], last["out"]) == ("mixed", None)
    assert [arg["is"] for arg in last["args"]] == ["FP32", "BF16"]
    assert "the pass ends: RuntimeError" in last["why"]
    assert "matmul refuses its dtypes" in repr(explorer)
    explorer.policies = {"softmax": "fp32"}
    assert explorer.rows[-1]["out"] == "FP32"


@pytest.mark.parametrize("op", ["add", "embedding"])
def test_the_residual_stream_becomes_short_with_one_change(op):
    assert casting.stream(CastPolicyExplorer().rows) == ["FP32"]
    assert casting.stream(CastPolicyExplorer("own", {op: "lower precision"}).rows) == ["BF16"]


def test_only_those_two_changes_do_it():
    changes = [(op, policy) for op in casting.NAMED for policy in POLICIES]
    short = {op for op, policy in changes if casting.stream(casting.runs({op: policy}).passes["own"][0]) != ["FP32"]}
    assert short == {"add", "embedding"}


def test_settings_can_be_read_and_set():
    explorer = CastPolicyExplorer("cuda")
    assert (explorer.table, explorer.op, explorer.again, explorer.policies) == ("cuda", "qkv", False, {})
    explorer.op, explorer.table = "loss", "own"
    explorer.policies = {"gelu": "fp32"}
    assert next(row for row in explorer.rows if row["op"] == "gelu")["out"] == "FP32"
    assert explorer.policies == {"gelu": "fp32"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("gpu",), "'gpu' is not one of"),
        (("own", {"sofmax": "fp32"}), "'sofmax' is not one of"),
        (("own", {"softmax": "FP32"}), "'FP32' is not one of"),
    ],
)
def test_what_is_not_on_offer_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        CastPolicyExplorer(*arguments)
    with pytest.raises(ValueError, match="'tail' is not one of"):
        CastPolicyExplorer().op = "tail"


@pytest.mark.parametrize("table", casting.TABLES)
def test_where_no_widget_can_live_there_is_a_picture(table):
    data, _ = CastPolicyExplorer(table, {"softmax": "fp32", "matmul": "as is"})._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["text/plain"].startswith(f"CastPolicyExplorer: {casting.TABLES[table]}, ")
    assert "application/vnd.jupyter.widget-view+json" in data


# --- whose code it runs on --------------------------------------------------------------------------------------------


def test_an_explorer_that_was_refused_is_told_nothing(answer_in_use):
    """The last error of a notebook keeps it alive."""
    with pytest.raises(ValueError, match="'mps' is not one of") as kept:
        CastPolicyExplorer("mps")
    answer_in_use("cast_policy", exact.cast_policy)
    assert kept.traceback


def sources(explorer):
    return explorer._panels[0]["sources"]


def test_the_learners_answers_are_taken_up_when_they_are_filled(answer_in_use):
    explorer = CastPolicyExplorer()
    answer_in_use("cast_policy", lambda op, device_type: "fp32" if op == "gelu" else exact.cast_policy(op, device_type))
    assert sources(explorer)[0]["origin"] == "yours"
    assert sources(explorer)[0]["note"] == "differs from torch's table for gelu (cpu), gelu (cuda)"
    assert next(row for row in explorer.rows if row["op"] == "gelu")["out"] == "FP32"
    assert sources(explorer)[1]["note"] == ""
    answer_in_use("cast_policy", exact.cast_policy)
    assert sources(explorer)[0]["note"] == ""
    answer_in_use("MiniAutocast", lambda policy: exact.Caster(policy, cached="nothing"))
    assert sources(explorer)[1]["origin"] == "yours"
    assert "differs from the definition for 15 of" in sources(explorer)[1]["note"]
    explorer.again = True
    assert explorer.casts == {"activations": 4, "weights": 5, "kept": 0}
    assert "is kept" not in next(row for row in explorer.rows if row["key"] == "qkv")["why"]


class NeverEnds(TorchFunctionMode):
    """Casts nothing, and stays switched on."""

    def __init__(self, policy):
        super().__init__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error):
        pass


class ReturnsNothing(NeverEnds):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "wrong", "reason"),
    [
        ("cast_policy", lambda op, device_type: 1 / 0, "your cast_policy raised ZeroDivisionError"),
        ("cast_policy", lambda op, device_type: "bf16", "your cast_policy returned 'bf16' for embedding"),
        ("MiniAutocast", lambda policy: None, "your MiniAutocast raised TypeError"),
        ("MiniAutocast", ReturnsNothing, "your MiniAutocast raised "),
    ],
)
def test_an_answer_that_cannot_be_shown_gives_way_to_the_oracle(answer_in_use, name, wrong, reason):
    answer_in_use(name, wrong)
    explorer = CastPolicyExplorer()
    source = sources(explorer)[name == "MiniAutocast"]
    assert source["line"] == "exact oracle"
    assert source["note"].startswith(reason)
    assert explorer.casts == {"activations": 4, "weights": 5, "kept": 0}


def test_a_block_that_does_not_end_is_ended(answer_in_use):
    answer_in_use("MiniAutocast", NeverEnds)
    depth = torch._C._len_torch_function_stack()
    explorer = CastPolicyExplorer()
    assert torch._C._len_torch_function_stack() == depth
    assert explorer.casts["weights"] == 0
    assert "differs from the definition" in sources(explorer)[1]["note"]


class CastsEverything(NeverEnds):
    """Whole numbers, too: the very first op refuses them."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        args = [arg.bfloat16() if isinstance(arg, torch.Tensor) else arg for arg in args]
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error):
        return TorchFunctionMode.__exit__(self, *error)


def test_a_pass_may_end_with_its_first_op(answer_in_use):
    answer_in_use("MiniAutocast", CastsEverything)
    explorer = CastPolicyExplorer()
    assert [row["out"] for row in explorer.rows] == [None]
    assert "residual stream not reached; embedding refuses its dtypes" in repr(explorer)
    assert explorer.plot().axes


ANSWERS = [wrong for wrong in WRONG if wrong.exercise in CastPolicyExplorer.runs_on]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ANSWERS, ids=label)
def test_no_known_misconception_takes_it_down(answer_in_use, wrong):
    depth = torch._C._len_torch_function_stack()
    explorer = CastPolicyExplorer("cuda")
    answer_in_use(wrong.exercise, wrong.function)
    assert sources(explorer)[wrong.exercise == "MiniAutocast"]["origin"] in ("yours", "oracle")
    assert len(explorer.rows) > 4
    assert explorer.plot().axes
    assert torch._C._len_torch_function_stack() == depth
    assert not torch.is_autocast_enabled("cpu")


OTHERS = [other for other in other_answers() if other.exercise in CastPolicyExplorer.runs_on]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.label)
def test_other_right_answers_show_the_same(answer_in_use, other):
    right = [CastPolicyExplorer(table).rows for table in casting.TABLES]
    answer_in_use(other.exercise, other.function())
    assert [CastPolicyExplorer(table).rows for table in casting.TABLES] == right
    assert sources(CastPolicyExplorer())[other.exercise == "MiniAutocast"]["note"] == ""


# --- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def show(show_until):
    return show_until(".lpcast-row[aria-selected=true]")


def state(page) -> dict:
    return page.evaluate("window.model.get('_state')")


def why(page) -> str:
    return page.locator(".lpcast-why").inner_text()


def counted(page) -> list[str]:
    return page.locator(".lpcast-counts dd").all_inner_texts()


@pytest.mark.browser
def test_a_click_on_an_op_says_why(show):
    explorer = CastPolicyExplorer()
    page = show(explorer)
    for row in explorer.rows:
        page.locator(f"[data-key={row['key']}]").click()
        assert state(page)["op"] == row["key"]
        assert why(page) == row["why"]
        assert page.locator("[aria-selected=true]").count() == 1
        assert page.locator(".lpcast-table tbody tr").count() == 3
    assert page.evaluate("window.model.saves") == len(explorer.rows)


@pytest.mark.browser
@pytest.mark.parametrize("table", casting.TABLES)
def test_the_browser_shows_what_python_says(show, table):
    explorer = CastPolicyExplorer(table, {"softmax": "fp32", "matmul": "as is"})
    page = show(explorer)
    for again in (False, True):
        page.get_by_label("Forward pass", exact=True).select_option(str(again).lower())
        explorer.again = again
        ops = page.locator("[role=option] .lpcast-op").all_inner_texts()
        assert ops == [row["op"] for row in explorer.rows]
        outs = page.locator("[role=option] > :last-child").all_inner_texts()
        assert outs == [row["out"] or "refused" for row in explorer.rows]
        expected = [explorer.casts[name] for name in ("activations", "weights", "kept")]
        assert counted(page) == [*map(str, expected), "FP32"]
        assert page.locator(".lpcast-kept").count() == expected[2]


@pytest.mark.browser
def test_all_is_reached_by_keys(show):
    page = show(CastPolicyExplorer())
    page.get_by_label("Table", exact=True).focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.key") == "qkv"
    page.keyboard.press("ArrowDown")
    assert state(page)["op"] == "scores"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowUp")
    assert state(page)["op"] == "tokens"
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == (
        "cross_entropy_loss, in one op. fp32. logits BF16, cast to FP32; targets int64. FP32 comes out."
    )
    assert page.locator('[role=option][tabindex="0"]').count() == 1
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.browser
def test_the_loss_is_found_again_where_it_is_two_ops(show):
    page = show(CastPolicyExplorer())
    page.locator("[data-key=loss]").click()
    page.get_by_label("Table", exact=True).select_option("cuda")
    assert page.locator("[aria-selected=true]").get_attribute("data-key") == "log_softmax"
    assert "its parts" not in page.locator(".lpcast-table").inner_text()
    page.get_by_label("Table", exact=True).select_option("cpu")
    assert page.locator("[aria-selected=true]").get_attribute("data-key") == "loss"
    assert "its parts one by one" in page.locator(".lpcast-table").inner_text()


@pytest.mark.browser
def test_a_table_of_ones_own_waits_for_the_kernel(show):
    page = show(CastPolicyExplorer("own"))
    page.locator("[data-key=softmax]").click()
    policy = page.get_by_label("Policy of softmax in your table", exact=True)
    policy.focus()
    policy.select_option("fp32")
    assert state(page)["own"] == {"softmax": "fp32"}
    assert page.locator(".lpcast").get_attribute("aria-busy") == "true"
    assert page.evaluate("document.activeElement.value") == "fp32"
    reply = CastPolicyExplorer("own", {"softmax": "fp32"})
    page.evaluate("panels => window.model.set('_panels', panels)", reply._panels)
    assert page.locator(".lpcast").get_attribute("aria-busy") == "false"
    assert page.locator("[data-key=softmax] > :last-child").inner_text() == "FP32"
    assert page.evaluate("document.activeElement.value") == "fp32"
    page.get_by_role("button", name="Take back softmax: fp32").click()
    assert state(page)["own"] == {}
    assert page.evaluate("document.activeElement.value") == "as is"


@pytest.mark.browser
def test_a_pass_that_ends_at_once_is_shown(show, answer_in_use):
    answer_in_use("MiniAutocast", CastsEverything)
    page = show(CastPolicyExplorer())
    assert counted(page) == ["1", "1", "0", "not reached"]
    assert "The residual stream, the outer line, is not reached." in page.locator(".lpcast-caption").inner_text()


THEMES = {"light": "#ffffff", "dark": "#111111"}
ACCESSIBLE = {
    "the CPU's": lambda: CastPolicyExplorer(),
    "CUDA's, again": lambda: _at(CastPolicyExplorer("cuda"), "softmax", True),
    "refused": lambda: _at(CastPolicyExplorer("own", {"softmax": "fp32", "matmul": "as is"}), "mixed", False),
    "none": lambda: _at(CastPolicyExplorer("none"), "attention_add", False),
}


def _at(explorer, op, again):
    explorer.op, explorer.again = op, again
    return explorer


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [1000, 700, 420])
@pytest.mark.parametrize("case", ACCESSIBLE)
def test_axe_finds_no_violation(show, case, theme, width):
    from browser import axe_violations

    page = show(ACCESSIBLE[case](), THEMES[theme], width=width)
    page.wait_for_function("theme => document.querySelector('.lplab').dataset.theme === theme", arg=theme)
    assert axe_violations(page, ".lplab") == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
def test_it_lets_go_of_everything(show):
    page = show(CastPolicyExplorer())
    page.evaluate("window.unmount()")
    assert page.evaluate("Object.values(window.model.listeners).every((list) => list.length === 0)")
