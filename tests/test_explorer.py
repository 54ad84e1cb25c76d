"""BitExplorer: exact in Python and in the browser, reachable by mouse and keyboard, readable in light and dark."""

import base64
import functools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from lowprec_lab.bench import explorer as explorer_bench
from lowprec_lab.explorers import BitExplorer, nearest
from lowprec_lab.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    TF32,
    Format,
)
from lowprec_lab.graders import oracle
from lowprec_lab.tables import ORACLE_LINE, table_of

OWN_FORMAT = Format("e3m4, bias 5", 3, 4, bias=5)
SMALL_FORMATS = [fmt for fmt in (*FORMATS.values(), OWN_FORMAT) if fmt.width <= 8]


@functools.cache
def value_of(code: int, fmt: Format) -> float:
    signed = code - 2**32 if code >= 2**31 else code
    return oracle.decode(torch.tensor([signed], dtype=torch.int32), fmt).item()


@functools.cache
def finite_values(fmt: Format) -> dict[int, Fraction]:
    codes = torch.arange(2**fmt.width, dtype=torch.int32)
    values = zip(codes.tolist(), oracle.decode(codes, fmt).tolist(), strict=True)
    return {code: Fraction(value) for code, value in values if math.isfinite(value)}


def round_by_definition(real: Fraction, fmt: Format, mode: str) -> int:
    """The nearest finite code by looking at every one of them, ties as the mode says; no overflow."""
    exact = finite_values(fmt)
    codes = [code for code in exact if real != 0 or code == 0]
    allowed = {
        "up": lambda v: v >= real,
        "down": lambda v: v <= real,
        "toward_zero": lambda v: abs(v) <= abs(real) and v * real >= 0,
    }.get(mode, lambda v: True)
    candidates = [code for code in codes if allowed(exact[code])]
    distance = min(abs(exact[code] - real) for code in candidates)
    nearest_ones = [code for code in candidates if abs(exact[code] - real) == distance]
    magnitude = nearest.sign_bit(fmt) - 1 if fmt.signed else -1
    if mode == "nearest_away":
        return max(nearest_ones, key=lambda code: (abs(exact[code]), has_sign_of(code, real, fmt)))
    if not fmt.mantissa_bits and all(exact[code] for code in nearest_ones):
        return max(nearest_ones, key=lambda code: (abs(exact[code]), has_sign_of(code, real, fmt)))
    return min(nearest_ones, key=lambda code: (code & magnitude & 1, not has_sign_of(code, real, fmt)))


def has_sign_of(code: int, real: Fraction, fmt: Format) -> bool:
    return (real < 0) == (fmt.signed and code >= nearest.sign_bit(fmt))


def inside(fmt: Format, seed: int = 20) -> list[Fraction]:
    """Every value below the largest, every midpoint, points beside it, and points within; of both signs."""
    values = sorted(set(finite_values(fmt).values()))
    chance = random.Random(seed)
    reals = []
    for low, high in zip(values, values[1:], strict=False):
        middle = (low + high) / 2
        beside = (high - low) / 10**9
        within = low + (high - low) * Fraction(chance.randrange(1, 1000), 1000)
        reals += [low, middle - beside, middle, middle + beside, within]
    return reals


# --- rounding, in Python ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", nearest.MODES)
@pytest.mark.parametrize("fmt", [E4M3, E5M2FNUZ, E2M3, E8M0, OWN_FORMAT], ids=str)
def test_rounds_as_the_definition_says(fmt, mode):
    reals = [real for real in inside(fmt) if fmt is not E8M0 or Fraction(1, 2**9) < real < 2**9]
    reals = random.Random(3).sample(reals, min(len(reals), 120))
    assert len(reals) > 50
    known = {code: value_of(code, fmt) for code in range(2**fmt.width)}
    for real in reals:
        code, problem = nearest.nearest_code(real, fmt, known.get, mode, "to_special" if fmt != E2M3 else "saturate")
        assert (code, problem) == (round_by_definition(real, fmt, mode), ""), (real, mode)


EDGES = [
    # (text, format, mode, overflow, the code's value; "nan" for NaN)
    ("464", E4M3, "nearest_even", "to_special", 448.0),
    ("464.0000000000000000000000001", E4M3, "nearest_even", "to_special", math.nan),
    ("464", E4M3, "nearest_away", "to_special", math.nan),
    ("1e6", E4M3, "nearest_even", "saturate", 448.0),
    ("1e6", E4M3, "toward_zero", "to_special", 448.0),
    ("1e6", E4M3, "down", "to_special", 448.0),
    ("449", E4M3, "up", "to_special", math.nan),
    ("-449", E4M3, "up", "to_special", -448.0),
    ("inf", E4M3, "nearest_even", "saturate", 448.0),
    ("-inf", E4M3, "toward_zero", "to_special", math.nan),
    ("nan", E4M3, "up", "saturate", math.nan),
    ("61440", E5M2, "nearest_even", "to_special", math.inf),
    ("61440", E5M2, "nearest_even", "saturate", 57344.0),
    ("61439.999999999999999999", E5M2, "nearest_even", "to_special", 57344.0),
    ("-1e9", E5M2, "down", "to_special", -math.inf),
    ("-0", E4M3, "nearest_even", "saturate", -0.0),
    ("-0", E4M3FNUZ, "nearest_even", "saturate", 0.0),
    ("-2^-30", E4M3, "nearest_even", "saturate", -0.0),
    ("-2^-30", E4M3FNUZ, "nearest_even", "saturate", 0.0),
    ("248", E4M3FNUZ, "nearest_even", "to_special", math.nan),
    ("2^-10", E4M3, "nearest_even", "saturate", 0.0),
    ("2^-10", E4M3, "nearest_away", "saturate", 2.0**-9),
    ("1.0625", E4M3, "nearest_even", "saturate", 1.0),
    ("1.0625000000000000000000000000000001", E4M3, "nearest_even", "saturate", 1.125),
    ("1.0625", E4M3, "nearest_away", "saturate", 1.125),
    ("1.8131605", E4M3, "nearest_even", "saturate", 1.875),
    ("4.25", E4M3, "nearest_even", "saturate", 4.0),
    ("0.000538887", E4M3, "nearest_even", "saturate", 0.0),
    ("9.0", E5M2, "nearest_even", "saturate", 8.0),
    ("65536", FP16, "nearest_even", "to_special", math.inf),
    ("65519.999", FP16, "nearest_even", "to_special", 65504.0),
    ("65520", FP16, "nearest_even", "to_special", math.inf),
    ("3", E8M0, "nearest_even", "saturate", 4.0),  # no mantissa bit to be even: the larger one
    ("1.5", E8M0, "nearest_even", "saturate", 2.0),
    ("0", E8M0, "up", "saturate", 2.0**-127),
    ("-1", E8M0, "nearest_even", "saturate", math.nan),
    ("1/3", BF16, "nearest_even", "saturate", 0.333984375),
    ("2^-150", FP32, "nearest_even", "saturate", 0.0),
    ("2^-150", FP32, "up", "saturate", 2.0**-149),
    ("3*2^-150", FP32, "nearest_even", "saturate", 2.0**-148),
    ("0.1", FP32, "nearest_even", "saturate", float(np.float32(0.1))),
    ("1e39", FP32, "nearest_even", "to_special", math.inf),
    ("-1.00048828125", TF32, "nearest_even", "saturate", -1.0),
    ("-1.00048828125", TF32, "down", "saturate", -1.0009765625),
    ("5", E2M1, "nearest_even", "saturate", 4.0),
    ("0.25", E2M1, "nearest_even", "saturate", 0.0),
    ("7", E2M1, "down", "to_special", 6.0),
    ("28", E3M2, "nearest_even", "to_special", 28.0),
]


def same(value: float, expected: float) -> bool:
    if math.isnan(expected):
        return math.isnan(value)
    return value == expected and math.copysign(1, value) == math.copysign(1, expected)


@pytest.mark.parametrize(("text", "fmt", "mode", "overflow", "expected"), EDGES)
def test_edges(text, fmt, mode, overflow, expected):
    real = nearest.read_real(text)
    code, problem = nearest.nearest_code(real, fmt, lambda code: value_of(code, fmt), mode, overflow)
    assert problem == ""
    assert same(value_of(code, fmt), expected)


def test_a_format_without_special_values_says_that_it_can_only_saturate():
    explorer = BitExplorer(E2M1, 100.0, overflow="to_special")
    assert explorer.codes == {"float4_e2m1fn": 7}
    assert "can only saturate" in explorer._state["problems"][0]
    assert "no NaN" in BitExplorer(E2M1, math.nan)._state["problems"][0]


@pytest.mark.parametrize("text", ["", "abc", "1/0", "2^", "1e", "--1", "0x10", "1/2/3"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(ValueError, match="is not a number"):
        nearest.read_real(text)


# --- the widget, in Python --------------------------------------------------------------------------------------------


def test_formats_by_name_constant_object_and_list():
    assert BitExplorer().codes == {"float8_e4m3fn": 0x1D}
    assert BitExplorer("E5M2", 1.0).codes == {"float8_e5m2": 0x3C}
    assert list(BitExplorer([E4M3, "bfloat16", OWN_FORMAT]).codes) == ["float8_e4m3fn", "bfloat16", "e3m4, bias 5"]
    with pytest.raises(ValueError, match="1 to 3 formats"):
        BitExplorer([E4M3] * 4)
    with pytest.raises(ValueError, match="no format is called"):
        BitExplorer("float9")
    with pytest.raises(ValueError, match="'nearest' is not one of"):
        BitExplorer(mode="nearest")


def test_value_mode_and_policy_can_be_set():
    explorer = BitExplorer(E4M3, 1.0625)
    assert explorer.codes == {"float8_e4m3fn": 0x38}
    explorer.mode = "nearest_away"
    assert explorer.codes == {"float8_e4m3fn": 0x39}
    explorer.value = 1e6
    assert (explorer.value, explorer.codes) == (1e6, {"float8_e4m3fn": 0x7E})
    explorer.overflow = "to_special"
    assert explorer.codes == {"float8_e4m3fn": 0x7F}


def test_the_static_picture_and_the_text_go_with_the_widget():
    explorer = BitExplorer(["E4M3", "FP32"])
    data, _ = explorer._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "float8_e4m3fn  0x1D = 0 0011 101 = 0.1015625" in data["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in data
    shown = " ".join(text.get_text() for axes in explorer.plot().axes for text in axes.texts)
    assert "0.1015625" in shown
    assert "exponent" in shown


@pytest.mark.parametrize("value", [0.0, -0.0, math.nan, math.inf, 1e-45, 3.4e38, -448.0])
def test_every_kind_of_value_has_a_picture(value):
    for fmt in (E4M3, E5M2FNUZ, E8M0, FP32, E2M1, OWN_FORMAT):
        assert len(BitExplorer(fmt, value).plot().axes) == 2


@pytest.fixture
def decode_in_use(answer_in_use):
    return functools.partial(answer_in_use, "decode")


def test_the_learners_decode_is_taken_up_when_it_is_filled(decode_in_use):
    explorer = BitExplorer(E4M3)
    decode_in_use(lambda codes, fmt: 2 * oracle.decode(codes, fmt))
    panel = explorer._panels[0]
    assert panel["origin"] == "yours"
    assert "your decode" in panel["line"]
    assert "differs from the definition for 252 of 256 codes" in panel["note"]
    assert np.frombuffer(panel["values"])[0x1D] == 0.203125


def test_a_right_decode_of_the_learner_has_no_note(decode_in_use):
    decode_in_use(lambda codes, fmt: oracle.decode(codes, fmt))
    table = table_of(BF16)
    assert (table.origin, table.note) == ("yours", "")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda codes, fmt: 1 / 0, "raised ZeroDivisionError"),
        (lambda codes, fmt: None, "returned NoneType, not a tensor"),
        (lambda codes, fmt: torch.zeros(3), "returned the shape (3,)"),
        (lambda codes, fmt: codes, "returned torch.int32"),
        (lambda codes, fmt: torch.full(codes.shape, math.nan), "no finite values"),
    ],
)
def test_a_decode_that_cannot_be_drawn_gives_way_to_the_oracle(decode_in_use, wrong, reason):
    decode_in_use(wrong)
    table = table_of(E4M3)
    assert (table.origin, table.line) == ("oracle", ORACLE_LINE)
    assert table.note.startswith("your decode ")
    assert reason in table.note
    assert table.values[0x1D] == 0.1015625


# --- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def show(show_until):
    return show_until(".lplab-bit")


def codes_in(page) -> list[int]:
    return page.evaluate("window.model.get('_state').codes")


def headline(page) -> str:
    return page.locator(".lplab-value").first.inner_text()


@pytest.mark.browser
def test_a_click_flips_a_bit(show):
    page = show(BitExplorer("E4M3"))
    button = page.get_by_role("button", name="exponent bit 2, worth 4")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert codes_in(page) == [0x3D]
    assert button.get_attribute("aria-pressed") == "true"
    assert headline(page) == "1.625"
    assert page.locator(".lplab-input").input_value() == "1.625"
    page.get_by_role("button", name="sign bit, 1 means negative").click()
    assert headline(page) == "−1.625"
    assert page.evaluate("window.model.saves") == 2


@pytest.mark.browser
def test_arrow_keys_move_and_space_flips(show):
    page = show(BitExplorer("E4M3"))
    page.locator(".lplab-bit").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    assert codes_in(page) == [0x3D]
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.ariaLabel") == "mantissa bit 0, worth 1/8"
    page.keyboard.press("Enter")
    assert codes_in(page) == [0x3C]
    assert page.locator('.lplab-bit[tabindex="0"]').count() == 1
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"


@pytest.mark.browser
def test_the_table_chooses_a_code_by_mouse_and_keyboard(show):
    page = show(BitExplorer("E4M3"))
    cells = page.locator("[role=gridcell]")
    assert cells.count() == 256
    cells.nth(0x7F).click()
    assert codes_in(page) == [0x7F]
    assert headline(page) == "NaN"
    assert page.locator("[aria-selected=true]").count() == 1
    cells.nth(0x7F).focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert codes_in(page) == [0x6E]
    names = cells.evaluate_all("cells => cells.map(cell => cell.ariaLabel)")
    assert names[0x01] == "0x01: 0.001953125, subnormal"
    assert names[0x80] == "0x80: −0, zero"


@pytest.mark.browser
def test_neighbours_are_steps(show):
    page = show(BitExplorer("E4M3", 0.0))
    page.locator(".lplab-step").first.click()
    assert codes_in(page) == [0x81]
    for _ in range(2):
        page.locator(".lplab-step").last.click()
    assert codes_in(page) == [0x01]


@pytest.mark.browser
def test_the_browser_rounds_every_edge_as_the_contract_says(show):
    page = show(BitExplorer("E4M3"))
    for text, fmt, mode, overflow, expected in EDGES:
        explorer = BitExplorer(fmt)
        code, problem, value = page.evaluate(_ROUND_ONE, [explorer._panels[0] | _NO_TABLE, text, mode, overflow])
        assert problem == ""
        assert same(float(value), expected), (text, fmt.name, mode, overflow, value)
        assert same(value_of(code, fmt), expected)


_NO_TABLE = {"values": None, "classes": None}
_ROUND_ONE = """([panel, text, mode, overflow]) => {
  const { Values, parseReal, roundReal } = window.widgetModule;
  const table = new Values(panel);
  const { code, problem } = roundReal(parseReal(text), table, mode, overflow);
  const value = table.value(code);
  return [code, problem, Object.is(value, -0) ? "-0" : String(value).replace("Infinity", "inf")];
}"""


@pytest.mark.browser
@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=str)
def test_the_browser_decodes_and_classifies_every_code(show, fmt):
    page = show(BitExplorer(fmt))
    panel = BitExplorer(fmt)._panels[0] | _NO_TABLE
    decoded = page.evaluate(
        """panel => Array.from({ length: 2 ** panel.width }, (_, code) => {
          const { splitFields, decodeFields, classifyFields } = window.widgetModule;
          const fields = splitFields(panel, code);
          const value = decodeFields(panel, fields);
          const text = Object.is(value, -0) ? "-0" : String(value).replace("Infinity", "inf");
          return [text, classifyFields(panel, fields)];
        })""",
        panel,
    )
    codes = torch.arange(2**fmt.width, dtype=torch.int32)
    assert [kind for _, kind in decoded] == oracle.classify(codes, fmt).tolist()
    assert all(
        same(float(text), value) for (text, _), value in zip(decoded, oracle.decode(codes, fmt).tolist(), strict=True)
    )


@pytest.mark.browser
@pytest.mark.parametrize("fmt", [E4M3, E5M2FNUZ, E8M0, TF32, FP32, OWN_FORMAT], ids=str)
def test_browser_and_kernel_round_alike(show, fmt):
    chance = random.Random(7)
    top = nearest.largest_finite_code(fmt)
    texts = ["0", "-0", "inf", "-inf", "nan", "1/3", "-2/7", "1e-60", "1e60", "-1e60"]
    for _ in range(60):
        code = chance.choice([chance.randrange(top), chance.randrange(min(top, 12)), top - 1 - chance.randrange(3)])
        low, high = (Fraction(value_of(each, fmt)) for each in (code, code + 1))
        middle = (low + high) / 2
        beside = chance.choice([0, 0, Fraction(1, 10**12), -Fraction(1, 10**12)]) * (high - low)
        real = chance.choice([1, -1]) * (middle + beside)
        texts.append(f"{real.numerator}/{real.denominator}")
    page = show(BitExplorer(fmt))
    for mode in nearest.MODES:
        for overflow in nearest.OVERFLOWS:
            found = page.evaluate(
                f"([panel, texts, mode, overflow]) => texts.map(text => ({_ROUND_ONE})([panel, text, mode, overflow]))",
                [BitExplorer(fmt)._panels[0] | _NO_TABLE, texts, mode, overflow],
            )
            for text, (code, problem, _) in zip(texts, found, strict=True):
                real = nearest.read_real(text)
                expected = nearest.nearest_code(real, fmt, lambda c: value_of(c, fmt), mode, overflow)
                assert (code, problem) == expected, (text, mode, overflow)


@pytest.mark.browser
def test_a_typed_decimal_is_rounded_and_its_error_shown(show):
    page = show(BitExplorer("E4M3"))
    number = page.get_by_label("Real number")
    error = page.locator('[data-fact="error"]')
    number.fill("464")
    assert headline(page) == "448"
    assert error.inner_text().startswith("−16")
    number.fill("0.3")
    assert headline(page) == "0.3125"
    assert "+0.0125" in error.inner_text()
    assert "0.4 ulp" in error.inner_text()
    page.get_by_label("Rounding").select_option("toward_zero")
    assert headline(page) == "0.28125"
    number.fill("1e9")
    page.get_by_label("Rounding").select_option("nearest_even")
    page.get_by_label("Overflow").select_option("to_special")
    assert headline(page) == "NaN"
    number.fill("0.3x")
    assert number.get_attribute("aria-invalid") == "true"
    assert "not a number" in page.locator(".lplab-hint").inner_text()
    assert number.input_value() == "0.3x"
    number.fill("0.5")
    assert number.get_attribute("aria-invalid") == "false"


@pytest.mark.browser
def test_three_formats_show_the_same_real_number(show):
    page = show(BitExplorer(["E4M3", "E5M2", "BF16"]))
    assert codes_in(page) == [0x1D, 0x2E, 0x3DCD]
    assert page.locator(".lplab-panel").count() == 3
    third = page.locator(".lplab-panel").nth(2)
    third.get_by_role("button", name="mantissa bit 0, worth 1/128").click()
    assert codes_in(page)[2] == 0x3DCC
    assert page.locator(".lplab-input").input_value() == "0.099609375"
    assert codes_in(page)[:2] == [0x1D, 0x2E]


@pytest.mark.browser
def test_wide_formats_have_all_their_digits(show):
    page = show(BitExplorer("FP32", 1e-45))
    assert page.locator(".lplab-bit").count() == 32
    page.get_by_text("all digits").click()
    digits = page.locator(".lplab-digits").inner_text()
    assert Fraction(digits) == Fraction(1, 2**149)
    page.get_by_role("button", name="sign bit, 1 means negative").click()
    assert codes_in(page) == [0x80000001]


@pytest.mark.browser
def test_a_wrong_decode_is_drawn_and_called_wrong(show, decode_in_use):
    decode_in_use(lambda codes, fmt: 2 * oracle.decode(codes, fmt))
    page = show(BitExplorer("E4M3", 0.203125))
    assert codes_in(page) == [0x1D]
    assert headline(page) == "0.203125"
    assert "your decode" in page.locator(".lplab-badge").inner_text()
    assert "The bits say 0.1015625; this decode gives 0.203125." in page.locator('[data-fact="formula"]').inner_text()


@pytest.mark.browser
def test_a_new_table_from_the_kernel_redraws(show, decode_in_use):
    page = show(BitExplorer("E4M3"))
    page.evaluate(
        """() => {
          const [panel] = window.model.get("_panels");
          const values = new Float64Array(256).map((_, code) => code % 128);
          window.model.set("_panels", [{ ...panel, values: new DataView(values.buffer), line: "your decode" }]);
        }"""
    )
    assert headline(page) == "29"
    assert page.locator(".lplab-badge").inner_text() == "your decode"


THEMES = {"light": "#ffffff", "dark": "#111111"}
ACCESSIBLE = {
    "one": lambda: BitExplorer("E4M3"),
    "three": lambda: BitExplorer(["E5M2", "E8M0", "BF16"], 1e-5),
    "wide": lambda: BitExplorer("FP32", 1e-45),
    "special": lambda: BitExplorer(["E5M2", "E2M1"], math.inf, overflow="to_special"),
}


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("case", ACCESSIBLE)
def test_axe_finds_no_violation(show, case, theme):
    from browser import axe_violations

    page = show(ACCESSIBLE[case](), THEMES[theme])
    page.wait_for_function("theme => document.querySelector('.lplab').dataset.theme === theme", arg=theme)
    for summary in page.locator("summary").all():
        if summary.is_visible() and not summary.evaluate("node => node.parentElement.open"):
            summary.click()
    assert axe_violations(page, ".lplab") == []


@pytest.mark.browser
def test_axe_would_find_a_violation(show):
    from browser import axe_violations

    page = show(BitExplorer("E4M3"))
    page.evaluate("document.querySelector('.lplab-bit').removeAttribute('aria-label')")
    page.evaluate("document.querySelector('.lplab-bit').replaceChildren()")
    assert any("button-name" in violation for violation in axe_violations(page, ".lplab"))


@pytest.mark.browser
def test_no_cell_of_the_table_is_cut_off(show):
    for fmt in (E4M3, E5M2, E8M0):
        page = show(BitExplorer(fmt), width=900)
        cut = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth).map(cell => cell.textContent)"
        assert page.locator("[role=gridcell]").evaluate_all(cut) == []


@pytest.mark.browser
@pytest.mark.parametrize("case", explorer_bench.CASES)
def test_from_click_to_paint_in_under_50_ms(browser, case):
    measured = explorer_bench.measure(browser, case)
    assert measured["clicks"] >= 30
    assert 0 < measured["median_ms"] < 50
