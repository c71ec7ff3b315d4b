"""The signal of the hypergradients, and the warnings about runs that cannot tune or did not."""

import math
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from examples import assert_same, make_problem, solve

import bilevel
from bilevel.loop.advice import JUDGED, noise_level, reach
from bilevel.loop.signal import FIRST, Signal


def hypergradients(steps, seed=0, mean=0.0):
    generator = torch.Generator().manual_seed(seed)
    return mean + torch.randn(steps, 3, generator=generator, dtype=torch.float64)


def gathered(values):
    signal = Signal(values[0])
    for value in values:
        signal.add(value)
    return signal


@pytest.mark.parametrize("steps", [1, 2, 10, 57, 400])
def test_lately_is_a_weighted_mean_over_its_standard_error(steps):
    """With the weights written out, instead of running averages."""
    g = hypergradients(steps).numpy()
    weights = 0.95 ** np.arange(steps)[::-1]
    weights /= weights.sum()
    expected = weights @ g / np.sqrt(weights @ g**2 * (weights**2).sum())
    np.testing.assert_allclose(gathered(torch.from_numpy(g)).lately().numpy(), expected, rtol=1e-10, atol=0)


def test_the_largest_is_the_running_maximum_of_the_sum_from_the_tenth_step_on():
    g = hypergradients(200, seed=1)
    g[:5] += 40  # a large sum before the tenth step, which later noise hides
    sums = g.cumsum(0).abs() / g.square().cumsum(0).sqrt()
    torch.testing.assert_close(gathered(g).largest(), sums[FIRST - 1 :].max(0).values, rtol=1e-12, atol=0)
    assert (sums[: FIRST - 1].max(0).values < 2.3).all()  # sqrt(5): five steps cannot have more signal
    assert gathered(g[: FIRST - 1]).largest().isnan().all()


def test_signal_that_settles_is_remembered():
    settled = torch.cat([torch.ones(30, 3, dtype=torch.float64), hypergradients(2000) * 10])
    assert (gathered(settled).largest() >= 30**0.5).all()


def test_hypergradients_alike_give_the_largest_values_and_zeros_give_zero():
    signal = gathered(torch.tensor([[-2.0, 0.0, 1e-3]] * 2000, dtype=torch.float64))
    torch.testing.assert_close(signal.lately(), 39**0.5 * torch.tensor([-1.0, 0, 1], dtype=torch.float64))
    torch.testing.assert_close(signal.largest(), 2000**0.5 * torch.tensor([1.0, 0, 1], dtype=torch.float64))


def test_noise_is_about_standard_normal():
    signal, seen = Signal(torch.zeros(500, dtype=torch.float64)), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        signal.add(torch.randn(500, generator=generator, dtype=torch.float64))
        seen.append(signal.lately())
    late = torch.stack(seen[100:])
    assert abs(late.mean()) < 0.02 and abs(late.std() - 1) < 0.05


def test_it_goes_on_from_its_state():
    """The large step is before the stop, and still known after it."""
    g = hypergradients(60)
    g[3] *= 100
    rest = Signal(g[0])
    rest.load_state_dict(gathered(g[:30]).state_dict(), lambda state: state)
    for value in g[30:]:
        rest.add(value)
    assert_same(rest.state_dict(), gathered(g).state_dict())
    assert rest.in_few_steps().all() and not gathered(g[10:]).in_few_steps().any()


def test_half_precision_is_summed_in_single():
    signal = gathered(torch.full((3000, 1), 1e-4, dtype=torch.float16))
    assert signal.largest().dtype == torch.float32
    assert float(signal.largest()) == pytest.approx(3000**0.5, rel=1e-3)


def test_the_solution_has_the_signal_of_all_outer_steps_after_the_warm_up():
    taken = []
    hyper = {"decay": bilevel.positive(0.01), "rates": bilevel.interval(0, 1, [[0.25, 0.5]])}
    solution = solve(
        make_problem(hyper=hyper),
        steps=20,
        warmup=4,
        callbacks=[lambda event: taken.append(event.outer and event.outer.hypergradient)],
    )
    expected = gathered([value for value in taken if value is not None]).largest()
    assert solution.signal["decay"].shape == () and solution.signal["rates"].shape == (1, 2)
    torch.testing.assert_close(torch.cat([v.flatten() for v in solution.signal.values()]), expected, rtol=0, atol=0)
    assert all(value.isnan().all() for value in solve(steps=FIRST - 1).signal.values())


RATE = 0.01


def walked(make, steps, size=3.7):
    """How far an optimizer goes along a constant gradient: the truth that ``reach`` bounds."""
    parameter = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = make([parameter])
    for _ in range(steps):
        parameter.grad = torch.full_like(parameter, -size)
        optimizer.step()
    return float(parameter.detach())


@pytest.mark.parametrize("steps", [1, 10, 200])
@pytest.mark.parametrize(
    ("make", "closed_form"),
    [
        (partial(torch.optim.Adam, lr=RATE), lambda t: 1.0),
        (partial(torch.optim.AdamW, lr=RATE, weight_decay=0, betas=(0.5, 0.9)), lambda t: 1.0),
        (partial(torch.optim.Adamax, lr=RATE), lambda t: 1.0),
        (partial(torch.optim.RMSprop, lr=RATE), lambda t: 1 / math.sqrt(1 - 0.99**t)),
        (partial(torch.optim.RMSprop, lr=RATE, alpha=0.9), lambda t: 1 / math.sqrt(1 - 0.9**t)),
        (partial(torch.optim.Adagrad, lr=RATE), lambda t: 1 / math.sqrt(t)),
        (partial(torch.optim.NAdam, lr=RATE), None),
        (partial(torch.optim.RMSprop, lr=RATE, momentum=0.5), None),
        (partial(torch.optim.Adagrad, lr=RATE, lr_decay=0.1), None),
    ],
)
def test_how_far_an_optimizer_goes(make, closed_form, steps):
    found = reach(make([torch.zeros(())]), steps)
    assert found == pytest.approx(walked(make, steps), rel=1e-6)
    if closed_form is not None:
        assert found == pytest.approx(RATE * sum(closed_form(t) for t in range(1, steps + 1)), rel=1e-6)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
def test_in_a_long_run_it_is_an_upper_bound(make):
    make = partial(make, lr=1e-4)
    assert reach(make([torch.zeros(())]), 2000) >= walked(make, 2000) * (1 - 1e-6)


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=1e-9),
        partial(torch.optim.RAdam, lr=1e-9),  # its first steps grow with the gradient
        partial(torch.optim.AdamW, lr=1e-9),  # decays
        partial(torch.optim.RMSprop, lr=1e-9, centered=True),
    ],
)
def test_no_bound_no_warning(make):
    assert reach(make([torch.zeros(())]), 100) is None
    solve(steps=20, outer_optimizer=make)


def adam(rate):
    return partial(torch.optim.Adam, lr=rate)


class TestBeforeARun:
    """What cannot work is said before the first round."""

    def test_how_far_the_first_hyperparameter_can_move_and_what_would_do(self):
        hyper = {"rates": bilevel.interval(0, 1, [0.5, 0.1]), "decay": bilevel.positive(0.01)}
        message = (
            r"20 outer steps of Adam with learning rate 0\.01 move λ by at most 0\.2, so that rates\[0\] stays between "
            r"0\.45 and 0\.55 \(0\.5 at the start\)\. Make more rounds \(larger steps\), or give outer_optimizer a "
            r"learning rate of at least 0\.05\."
        )
        with pytest.warns(bilevel.TuningWarning, match=message) as caught:
            solve(make_problem(hyper=hyper), steps=25, warmup=5, outer_optimizer=adam(0.01))
        (ours,) = (warning for warning in caught if warning.category is bilevel.TuningWarning)
        assert ours.filename.endswith("examples.py")  # the line that called solve
        solve(make_problem(hyper=hyper), steps=25, warmup=5, outer_optimizer=adam(0.05))

    def test_epochs_are_rounds_by_the_length_of_train(self):
        with pytest.warns(bilevel.TuningWarning, match=r"40 outer steps.*larger epochs, or smaller inner_steps"):
            solve(epochs=10, warmup=0, inner_steps=2, outer_steps=2, outer_optimizer=adam(0.01))
        solve(epochs=10, warmup=0, inner_steps=2, outer_steps=2, outer_optimizer=adam(0.025))

    def test_a_warm_up_that_takes_all_rounds(self):
        with pytest.warns(bilevel.TuningWarning, match=r"warmup=4 leaves no round.*the run has 3.*\(steps\)"):
            solve(steps=3, warmup=4)
        solve(steps=3, warmup=sys.maxsize)

    @pytest.mark.parametrize(
        "changes",
        [
            {"outer_optimizer": adam(0.0)},
            {"outer_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=10)},
            {"steps": 9},
        ],
        ids=["a rate of zero", "a scheduler", "a tiny run"],
    )
    def test_nothing_is_said_of_what_is_meant_or_unknown(self, changes):
        solve(**({"steps": 20, "outer_optimizer": adam(1e-4)} | changes))

    def test_nothing_is_said_of_a_run_that_goes_on(self, tmp_path):
        settings = {"outer_optimizer": adam(0.01), "checkpoint": tmp_path / "run.pt", "evaluate_every": 1}
        with pytest.warns(bilevel.TuningWarning):
            solve(steps=12, **settings)
        solve(steps=14, **settings)


def tracking(noise, entries=1, steps=200, **changes):
    """w follows λ, and the outer loss pulls both to 3, or to random places around the start."""
    generator = torch.Generator().manual_seed(0)
    targets = [torch.randn(entries, generator=generator, dtype=torch.float64) for _ in range(1000)]
    problem = bilevel.Problem(
        {"w": torch.zeros(entries, dtype=torch.float64)},
        inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]).square().sum(),
        outer_loss=lambda model, hyper, batch: (
            (model.params["w"] * (batch if noise else 1) - (not noise) * 3).sum() ** (1 if noise else 2)
        ),
        hyper={"target": bilevel.real(torch.zeros(entries))},
    )
    settings = {
        "method": "implicit_exact",
        "outer_optimizer": partial(torch.optim.SGD, lr=0.01),
        "evaluate_every": 999,
        "inner_optimizer": partial(torch.optim.SGD, lr=0.25),
    }
    return bilevel.solve(problem, None, targets, steps=steps, progress=False, **(settings | changes))


class TestAfterARun:
    """Hyperparameters that only noise moved."""

    @pytest.mark.parametrize("entries", [1, 8, 100])
    def test_pure_noise_is_named(self, entries):
        with pytest.warns(bilevel.TuningWarning, match=r"hypergradient of target was noise: over 180 outer") as caught:
            solution = tracking(noise=True, entries=entries)
        assert len(caught) == 1
        assert solution.signal["target"].max() < noise_level(entries)
        assert entries < 100 or solution.signal["target"].max() > 2.5  # one of many is larger by chance

    @pytest.mark.parametrize(("rate", "enough"), [(0.02, True), (0.2, False)])
    def test_signal_is_not(self, rate, enough):
        """λ reaches its optimum, slowly or in so few steps that their sum is not much larger than one of them."""
        solution = tracking(noise=False, outer_optimizer=partial(torch.optim.SGD, lr=rate))
        assert float(solution.hyper["target"]) == pytest.approx(3, abs=1e-2)
        assert (float(solution.signal["target"]) > noise_level(1)) == enough

    @pytest.mark.parametrize(
        "changes",
        [
            {"steps": JUDGED - 1},
            {"outer_optimizer": partial(torch.optim.SGD, lr=0.0)},
            {"callbacks": [lambda event: (_ for _ in ()).throw(KeyboardInterrupt) if event.index == 150 else None]},
        ],
        ids=["short", "at rest", "interrupted"],
    )
    def test_nothing_is_said_of(self, changes):
        tracking(noise=True, **changes)

    def test_a_finished_run_that_is_read_again_is_not_judged_again(self, tmp_path):
        with pytest.warns(bilevel.TuningWarning, match="noise"):
            tracking(noise=True, checkpoint=tmp_path / "run.pt")
        tracking(noise=True, checkpoint=tmp_path / "run.pt")


def test_pure_noise_stays_below_the_level_in_most_runs():
    """The shares that the level promises: of 4000 runs, 90 % after 200 steps and 85 % after 1000."""
    generator = torch.Generator().manual_seed(0)
    signal = Signal(torch.zeros(4000, dtype=torch.float64))
    shares = {}
    for step in range(1, 1001):
        signal.add(torch.randn(4000, generator=generator, dtype=torch.float64))
        shares[step] = float((signal.largest() < noise_level(1)).double().mean())
    assert shares[50] == pytest.approx(0.95, abs=0.02)
    assert shares[200] == pytest.approx(0.90, abs=0.02)
    assert shares[1000] == pytest.approx(0.85, abs=0.02)


def test_the_warning_can_be_silenced_by_its_class():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bilevel.TuningWarning)
        solve(steps=3, warmup=4)
