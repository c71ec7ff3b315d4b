"""One style for all figures: colours, panels, marks, and the figure of a run."""

import itertools

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb

import bilevel
from bilevel import History, plotting
from bilevel.plotting.palette import FAMILIES, OTHERS

# Machado, Oliveira and Fernandes (2009), for linear RGB, at full severity.
EYES = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
USUAL = ["stn", "centered_stn", "delta_stn", "fixed", "random search", "tpe"]


def lab(color, eye):
    """CIELAB coordinates of a colour as an eye sees it."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(EYES[eye]) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    x, y, z = np.cbrt(xyz / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def closest(names, eye):
    return min(
        np.linalg.norm(lab(plotting.color(one), eye) - lab(plotting.color(other), eye))
        for one, other in itertools.combinations(names, 2)
    )


class TestColours:
    """A colour for every method."""

    def test_every_method_and_baseline_has_its_own(self):
        names = [*bilevel.METHODS, "fixed", "random search", "tpe"]
        known = {name for _, family in FAMILIES.values() for name in family}
        assert {name.replace(" ", "_") for name in names} <= known
        assert len({plotting.color(name) for name in known}) == len(known)

    @pytest.mark.parametrize("eye", EYES)
    def test_every_eye_tells_them_apart(self, eye):
        """A distance of 2.3 is just noticeable. Families also differ in their dashes."""
        assert closest(USUAL, eye) > 15
        for _, family in FAMILIES.values():
            assert closest(family, eye) > 12

    def test_spelling_does_not_matter(self):
        assert plotting.color("Random Search") == plotting.color("random_search") == plotting.color("random-search")

    def test_other_names_have_one_that_stays(self):
        assert plotting.color("mine") == plotting.color("mine") in OTHERS
        names = ["delta_stn", *(f"method {index}" for index in range(7))]
        found = plotting.colors(names)
        assert list(found) == names and len(set(found.values())) == 8
        assert found["delta_stn"] == plotting.color("delta_stn")
        assert len(plotting.colors(f"method {index}" for index in range(20))) == 20

    def test_lines_have_the_dashes_of_their_family(self):
        dashes = {
            name: plotting.line(name)["linestyle"] for name in ("stn", "implicit_cg", "unrolled", "fixed", "mine")
        }
        assert dashes == {"stn": "-", "implicit_cg": "--", "unrolled": "-.", "fixed": ":", "mine": "-"}

    @pytest.mark.parametrize("make", [lambda count: plotting.shades("#0072B2", count), plotting.spectrum])
    def test_shades_go_one_way_in_lightness(self, make):
        for count in (2, 3, 16):
            lightness = np.diff([lab(one, "normal")[0] for one in make(count)])
            assert (lightness > 0).all() or (lightness < 0).all()
        assert len(make(1)) == 1


class TestPanels:
    """Empty figures."""

    @pytest.mark.parametrize(("count", "rows", "columns"), [(1, 1, 1), (4, 1, 4), (5, 2, 3), (8, 2, 4), (9, 3, 3)])
    def test_rows_have_at_most_four_and_about_the_same_length(self, count, rows, columns):
        figure, axes = plotting.panels(count)
        assert len(axes) == len(figure.axes) == count
        assert axes[0].get_subplotspec().get_geometry()[:2] == (rows, columns)

    def test_the_settings_of_the_user_stay(self):
        before = dict(mpl.rcParams)
        with plotting.style():
            plotting.figure(1, 1)
        assert dict(mpl.rcParams) == before

    def test_style_is_a_decorator_too(self):
        @plotting.style()
        def drawn():
            return mpl.rcParams["axes.grid"]

        assert [drawn(), drawn(), mpl.rcParams["axes.grid"]] == [True, True, False]

    def test_the_lowest_panel_of_each_column_is_labelled(self):
        _, axes = plotting.panels(5)
        plotting.label_rounds(axes)
        assert [axis.get_xlabel() for axis in axes] == ["", "", "round", "round", "round"]

    @pytest.mark.parametrize(("low", "high"), [(0.1, 0.1), (0.1, 0.12), (0.1, 0.5), (1e-6, 1e-3), (1e-9, 1e6)])
    def test_a_logarithmic_axis_has_a_few_readable_numbers(self, low, high):
        figure, ((axis,),) = plotting.figure(1, 1)
        axis.plot([1, 2], [low, high])
        plotting.log_axis(axis)
        figure.canvas.draw()
        bottom, top = axis.get_ylim()
        shown = [float(label.get_text()) for label in axis.get_yticklabels() if label.get_text()]
        inside = [value for value in shown if bottom <= value <= top]
        assert axis.get_yscale() == "log" and top / bottom >= 3 * (1 - 1e-9)
        assert 2 <= len(inside) <= 8 and len(set(inside)) == len(inside)


def run(rounds=30, warm=5, **hyper):
    """A made-up history."""
    history = History()
    for index in range(1, rounds + 1):
        row = {"round": index, "inner_loss": 10.0 / index}
        for name, entry in hyper.items():
            row |= {column: float(value) for column, value in bilevel.hyper.Space.columns({name: entry.init}).items()}
        if index > warm:
            row |= {f"signal.{name}": 0.5 for name in list(row)[2:]} | {"outer_loss": 9.0 / index}
        if index % 10 == 0:
            row["validation_loss"] = 9.5 / index
        history.append(row)
    return history


HYPER = {
    "decay": bilevel.positive([1e-3, 1e-4]),
    "rate": bilevel.interval(0.2, 0.7, 0.5),
    "holes": bilevel.integer(0, 4, 2),
    "shift": bilevel.real(0.0),
    "many": bilevel.real(torch.arange(20.0)),
}


@pytest.fixture(scope="module")
def axes():
    figure = plotting.schedules(run(**HYPER), HYPER, best=20)
    return {axis.get_title(loc="left"): axis for axis in figure.axes}


class TestSchedules:
    """The figure of a run."""

    def test_it_has_a_panel_for_everything(self, axes):
        assert list(axes) == ["loss", *HYPER, "signal to noise of the hypergradient"]

    def test_axes_fit_the_kind_of_hyperparameter(self, axes):
        assert {name: axis.get_yscale() for name, axis in axes.items() if name in HYPER} == {
            "decay": "log",
            "rate": "linear",
            "holes": "linear",
            "shift": "linear",
            "many": "linear",
        }
        assert axes["loss"].get_yscale() == "log"
        assert axes["rate"].get_ylim() == pytest.approx((0.19, 0.71))
        assert axes["holes"].get_ylim() == pytest.approx((-0.3, 4.3))
        assert axes["holes"].lines[0].get_drawstyle() == "steps-post"
        assert axes["rate"].lines[0].get_drawstyle() == "default"

    def test_every_panel_marks_the_best_round_and_shades_the_warm_up(self, axes):
        for axis in axes.values():
            (best,) = [line for line in axis.lines if line.get_label() == "best round"]
            assert list(best.get_xdata()) == [20, 20]
            (warm,) = [patch for patch in axis.patches if patch.get_label() == "warm-up"]
            assert (warm.get_x(), warm.get_width()) == (0, 5)

    def test_entries_share_a_panel_with_shades_and_a_legend(self, axes):
        first, second, _ = axes["decay"].lines
        assert first.get_color() != second.get_color()
        assert [text.get_text() for text in axes["decay"].get_legend().get_texts()] == ["[0]", "[1]"]
        assert axes["rate"].get_legend() is None

    def test_of_many_entries_it_draws_the_mean_in_their_range(self, axes):
        mean, _ = axes["many"].lines
        np.testing.assert_array_equal(mean.get_ydata(), np.full(30, 9.5))
        (band,) = axes["many"].collections
        assert (band.get_paths()[0].get_extents().y0, band.get_paths()[0].get_extents().y1) == (0, 19)

    def test_the_signal_has_the_colours_of_the_hyperparameters_and_the_band_of_noise(self, axes):
        axis = axes["signal to noise of the hypergradient"]
        assert [text.get_text() for text in axis.get_legend().get_texts()] == list(HYPER)
        assert to_hex(axis.get_legend().get_lines()[1].get_color()) == to_hex(axes["rate"].lines[0].get_color())
        band = axis.patches[0]
        assert (band.get_y(), band.get_height()) == (-2, 4)
        assert axis.get_ylim()[0] <= -3 and axis.get_ylim()[1] >= 3

    def test_it_draws_what_there_is(self, tmp_path):
        """No outer step, no validation pass, one row; the mark and the shade are left out."""
        history = run(rounds=1, warm=1, rate=HYPER["rate"])
        figure = plotting.schedules(history, {"rate": HYPER["rate"]}, tmp_path / "one.png")
        assert [axis.get_title(loc="left") for axis in figure.axes] == ["loss", "rate"]
        assert not any(axis.patches for axis in figure.axes)
        assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


class TestManyHyperparameters:
    def test_they_share_panels_by_prefix_and_kind(self, tmp_path):
        """50 of them: a few panels, a few names in each legend, and lines for all."""
        hyper = {f"weight_decay.{i}": bilevel.positive(1e-3) for i in range(38)}
        hyper |= {f"dropout.{i}": bilevel.interval(0, 1, init=0.1) for i in range(10)}
        hyper |= {"dropout.count": bilevel.integer(0, 4, init=1), "label_smoothing": bilevel.interval(0, 1, init=0.1)}
        history = History()
        for index in range(1, 4):
            row = {name: float(entry.init) for name, entry in hyper.items()}
            history.append({"round": index, "inner_loss": 1.0, **row, **{f"signal.{n}": 1.0 for n in hyper}})
        figure = bilevel.plotting.schedules(history, hyper, tmp_path / "many.png")
        titles = [axis.get_title(loc="left") for axis in figure.axes]
        assert titles[:4] == ["loss", "weight_decay", "dropout", "dropout.count"]
        assert titles[4] == "label_smoothing"
        decay = figure.axes[1]
        assert len([line for line in decay.lines if len(line.get_xdata()) == 3]) == 38
        assert [text.get_text() for text in decay.get_legend().get_texts()] == ["0", "19", "37"]
        assert [text.get_text() for text in figure.axes[-1].get_legend().get_texts()] == titles[1:5]
        assert len(bilevel.plotting.schedules(history, dict(list(hyper.items())[:12])).axes) == 14
