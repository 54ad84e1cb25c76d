"""The pictures: a colour for each format that can be read and told apart, and what each picture must show."""

import colorsys
import itertools

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from lowprec_lab import plots
from lowprec_lab.formats import BF16, E2M1, E4M3, E5M2, E8M0, FORMATS, FP16, FP32, Format
from lowprec_lab.graders import oracle

OWN = Format("mine", 3, 4, bias=5)


def channels(color: str) -> tuple[float, float, float]:
    return tuple(int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))


def linear(color: str) -> np.ndarray:
    encoded = np.array(channels(color))
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def luminance(color: str) -> float:
    return float(linear(color) @ (0.2126, 0.7152, 0.0722))


def seen_as(vision: np.ndarray, color: str) -> np.ndarray:
    light = np.clip(vision @ linear(color), 0, 1)
    return np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)


def texts(figure) -> str:
    return " | ".join(text.get_text() for axes in figure.axes for text in axes.texts)


def labels(figure) -> str:
    return " | ".join(
        text.get_text() for axes in figure.axes for text in (*axes.get_xticklabels(), *axes.get_yticklabels())
    )


def test_every_registered_format_has_a_colour_and_a_short_name():
    assert set(plots.FORMAT_COLORS) == set(FORMATS) == set(plots.SHORT_NAMES)
    assert plots.color_of(OWN) not in plots.FORMAT_COLORS.values()
    assert plots.short_name(OWN) == "mine"


@pytest.mark.parametrize("name", FORMATS)
def test_text_in_a_formats_colour_can_be_read_on_white(name):
    assert 1.05 / (luminance(plots.FORMAT_COLORS[name]) + 0.05) >= 4.0


# What red-green blindness leaves of a colour (Machado, Oliveira and Fernandes 2009, severity 1), on linear RGB.
DEUTERANOPIA = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
PROTANOPIA = np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])


@pytest.mark.parametrize("vision", [np.eye(3), DEUTERANOPIA, PROTANOPIA], ids=["all", "deuteranopia", "protanopia"])
def test_the_formats_that_are_compared_most_stay_apart(vision):
    main = [plots.FORMAT_COLORS[fmt.name] for fmt in (BF16, FP16, E4M3, E5M2)]
    for one, other in itertools.combinations(main, 2):
        assert np.linalg.norm(seen_as(vision, one) - seen_as(vision, other)) > 0.25
    assert len({round(colorsys.rgb_to_hsv(*channels(color))[0], 2) for color in main}) == 4


def test_figures_are_let_go_of_by_pyplot():
    before = plt.get_fignums()
    plots.spacing([E4M3])
    assert plt.get_fignums() == before


def test_the_style_ends_with_its_block():
    before = plt.rcParams["axes.titleweight"]
    with plots.style():
        assert plt.rcParams["axes.titleweight"] == "bold"
    assert plt.rcParams["axes.titleweight"] == before


def test_number_line_draws_every_value():
    figure = plots.number_line([E4M3, E5M2, BF16, FP16])
    wide = figure.axes[0]
    strokes = [len(lines.get_segments()) for lines in wide.collections if hasattr(lines, "get_segments")]
    codes = np.arange(256)
    assert strokes[3] == len(np.unique(_finite(E4M3)))  # rows are drawn from the bottom up: E4M3 is the last
    assert codes.size > strokes[3] == 253
    assert strokes[2] == 247
    assert "E4M3" in labels(figure)
    assert "3.39e+38" in texts(figure)
    assert all(axes.get_xlabel() for axes in figure.axes)


def _finite(fmt: Format) -> np.ndarray:
    values = oracle.decode(oracle.landmark_codes(fmt), fmt).numpy()
    return values[np.isfinite(values)]


def test_number_line_takes_your_own_values():
    figure = plots.number_line([E2M1], {"float4_e2m1fn": np.array([0.0, 1.0, -1.0, np.nan, np.inf])})
    assert len(figure.axes[0].collections[0].get_segments()) == 3


def test_range_and_precision_names_every_format_and_its_reach():
    figure = plots.range_and_precision(list(FORMATS.values()))
    for name in plots.SHORT_NAMES.values():
        assert name in texts(figure)
    assert "E4M3  18 binades" in texts(figure)
    assert "FP32  277 binades" in texts(figure)
    limits = {"float8_e8m0fnu": (None, 1.0, 4.0)}
    assert "E8M0  3 binades" in texts(plots.range_and_precision([E8M0], limits))


def test_spacing_is_a_staircase_that_ends_at_the_largest_value():
    figure = plots.spacing([E4M3, BF16, FP32])
    x, steps = figure.axes[0].get_lines()[0].get_data()
    assert x.max() <= 448
    assert x.min() >= 2**-9
    assert set(np.log2(steps)) == set(range(-9, 6))
    assert "BF16" in texts(figure)
    own = plots.spacing([E4M3], np.array([1.0, 2.0]), {"float8_e4m3fn": np.array([0.125, 0.25])})
    assert own.axes[0].get_lines()[0].get_ydata().tolist() == [0.125, 0.25]


def test_every_picture_becomes_a_png():
    for figure in (plots.number_line([E2M1]), plots.range_and_precision([E4M3]), plots.spacing([E4M3, OWN])):
        assert plots.png(figure).startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_notebook_shows_a_picture_once():
    source = "from lowprec_lab import plots\nfrom lowprec_lab.formats import E4M3\nplots.spacing([E4M3])"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    pictures = [out for out in notebook.cells[0].outputs if "image/png" in out.get("data", {})]
    assert len(pictures) == 1
