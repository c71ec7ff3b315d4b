"""The forms of products that spare tensors, against the formulas that they stand for."""

import pytest
import torch
from examples import batches, make_problem, network, sgd
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import bilevel
from bilevel.structure import by_rows, linear, slopes
from bilevel.structure.slopes import PIECE, Grown, Held, Parts, Shifts, Slopes, distinct, row_products

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 0), (7, 3), (3 * PIECE // 100, 100), (2, PIECE + 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_of_rows_in_pieces(shape, dtype):
    left, right = draw(*shape).to(dtype), draw(*shape, seed=1).to(dtype)
    expected = torch.einsum("rc,rc->r", left.double(), right.double())
    tolerance = 1e-9 if dtype == F64 else 1e-2 * max(1, shape[1]) ** 0.5
    torch.testing.assert_close(row_products(left, right).double(), expected, rtol=1e-2 * (dtype != F64), atol=tolerance)


@given(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 4), st.data())
def test_factors_and_their_slopes_are_those_of_the_product(hyper, counts, examples, data):
    shift = draw(examples, hyper)
    factor = draw(hyper, sum(counts), seed=1).requires_grad_()
    used = data.draw(st.sets(st.sampled_from(range(len(counts))), min_size=1))
    slope_only = data.draw(st.booleans())

    def total(parts):
        return sum((index + 1) * (1 + parts[index]).pow(3).sum() for index in used)

    product = shift @ factor
    expected = (product - product.detach() if slope_only else product).split(counts, dim=-1)
    actual = Parts.apply(shift, factor, counts, slope_only, None, 1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for parts in (actual, expected):
        (gradient,) = torch.autograd.grad(total(parts), factor, create_graph=True)
        second = torch.autograd.grad(gradient.square().sum(), factor)
        if parts is actual:
            first = gradient, second
    torch.testing.assert_close(first, (gradient, second), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("missing", ["", "scale", "offset", "change", "scale offset", "scale offset change"])
@pytest.mark.parametrize("sizes", [(3, 4), (3, 2, 4)])
def test_slopes_alone_have_the_first_and_second_derivatives_of_the_formula(sizes, missing):
    per_unit = (sizes[0], *[1] * (len(sizes) - 2), sizes[-1])
    shapes = {"product": sizes, "scale": sizes[-1:], "offset": sizes[-1:], "factor": per_unit, "change": per_unit}
    parts = {
        name: torch.zeros(shape, dtype=F64) if name in ("factor", "change") else draw(*shape, seed=seed)
        for seed, (name, shape) in enumerate(shapes.items())
        if name not in missing.split()
    }
    leaves = [leaf.requires_grad_() for leaf in parts.values()]
    results = []
    for fast in (True, False):
        if fast:
            y = Slopes.apply(*(parts.get(name) for name in shapes))
        else:
            y = parts["product"] * (parts.get("scale", 1) + parts["factor"])
            y = y + parts.get("offset", 0) + parts.get("change", 0)
        first = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(part.pow(2).sum() + part.sum() for part in first), leaves)
        results.append((y, first, second))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def checked(function, leaves, expected):
    """Values by a formula, first and second derivatives by finite differences."""
    torch.testing.assert_close(function(*leaves), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(lambda *parts: function(*parts).pow(2), leaves)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("sizes", [(3, 4), (3, 2, 4)])
def test_the_tangent_of_a_layer_that_grows(sizes, together):
    tangent, value, weight = draw(*sizes).requires_grad_(), draw(*sizes, seed=1), draw(5, 4, seed=2)
    per_unit = (3, *[1] * (len(sizes) - 2), 5)
    factor, change = draw(*per_unit, seed=3).requires_grad_(), draw(*per_unit, seed=4).requires_grad_()
    through, product = tangent @ weight.T, value @ weight.T

    def layer(t, f, c):
        return Grown.apply(t, value, weight, f, c, together)[0]

    checked(layer, (tangent, factor, change), through + factor * product + change)
    checked(lambda t, f: layer(t, f, None), (tangent, factor), through + factor * product)
    checked(lambda f, c: layer(None, f, c), (factor, change), factor * product + change)
    checked(lambda f: layer(None, f, None), (factor,), factor * product)
    response, second = Grown.apply(tangent, value, weight, factor, None, together)
    torch.testing.assert_close(second, product, rtol=1e-14, atol=1e-14)
    assert response.requires_grad and not second.requires_grad


@pytest.mark.parametrize("missing", ["", "tangent", "scale", "factor", "change", "tangent scale", "scale factor"])
def test_the_tangent_of_a_scale_and_a_shift(missing):
    shapes = {"tangent": (3, 2, 4), "scale": (4,), "value": (3, 2, 4), "factor": (3, 1, 4), "change": (3, 1, 4)}
    parts = {name: draw(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    parts = {name: part for name, part in parts.items() if name not in missing.split()}
    learned = [name for name in ("tangent", "factor", "change") if name in parts]
    expected = parts.get("tangent", torch.zeros(3, 2, 4, dtype=F64)) * parts.get("scale", 1)
    expected = expected + parts.get("factor", 0) * parts["value"] + parts.get("change", 0)

    def function(*leaves):
        given = parts | dict(zip(learned, leaves, strict=True))
        return Shifts.apply(*(given.get(name) for name in shapes))

    leaves = tuple(parts[name].clone().requires_grad_() for name in learned)
    before = [leaf.detach().clone() for leaf in leaves]
    checked(function, leaves, expected)
    assert all(map(torch.equal, leaves, before))  # nothing is added in place


@pytest.mark.parametrize("method", [bilevel.DeltaSTN(), bilevel.CenteredSTN(), bilevel.DeltaSTN(antithetic=True)])
def test_a_step_is_the_same_in_both_forms(monkeypatch, method):
    found, calls = [], []
    for kind in (Slopes, Grown):
        apply = kind.apply
        monkeypatch.setattr(kind, "apply", lambda *args, apply=apply, kind=kind: calls.append(kind) or apply(*args))
    for large in (0, 2**30):
        monkeypatch.setattr(linear, "LARGE", large)
        monkeypatch.setattr(linear, "SEVERAL", 1)
        torch.manual_seed(0)
        problem = make_problem(network(nn.Tanh(), nn.Linear(4, 4)).double(), hyper={"decay": bilevel.positive(0.1)})
        solver = bilevel.Solver(problem, method=method, inner_optimizer=sgd, seed=0)
        for x, y in batches():
            solver.inner_step((x.double(), y.double()))
        found.append((solver.params, [param.detach().clone() for param in solver.response.parameters()]))
        always = set() if isinstance(method, bilevel.CenteredSTN) else {Grown}
        assert set(calls) == (always if large or method.antithetic else always | {Slopes})
        calls.clear()
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert solver.response.theta.by_rows[0].factor.abs().max() > 1e-6


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("method", [bilevel.DeltaSTN(), bilevel.CenteredSTN()])
def test_the_two_passes_of_a_step_make_one_gradient_of_the_response(monkeypatch, method, at_once):
    """Whether the perturbed pass waits for the other or not; and where it comes too late to be waited for."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 700), nn.Tanh(), nn.Linear(700, 3)).double()
    found, products = [], []
    for few in (0, by_rows.FEW):
        monkeypatch.setattr(by_rows, "FEW", few)
        problem = many_decays(40, net)
        response = method.bind(problem)
        factor = response.theta.gate.factor
        factor.data = 0.1 * draw(*factor.shape)
        batch, leaves = (draw(64, 3), draw(64, 3, seed=1)), [factor, *response.inner.weights]
        torch.manual_seed(1)
        with FlopCounterMode(display=False) as counter:
            terms = response.inner_loss(problem.initial_hyper(), batch)
            terms = [list(terms)] if at_once else ([term] for term in terms)
            total = [torch.zeros_like(leaf) for leaf in leaves]
            for some in terms:
                value = sum(term.value for term in some)
                parts = torch.autograd.grad(value, leaves, allow_unused=True)
                total = [a if b is None else a + b for a, b in zip(total, parts, strict=True)]
        found.append(total)
        products.append(counter.get_total_flops() // (2 * 64 * factor.numel()))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)
    assert found[0][0].abs().max() > 1e-3
    assert products[0] - products[1] == (0 if at_once else 1)


@given(st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_factors_of_copies_are_those_of_all_rows(examples, copies, slope_only):
    """Also where the last copy is cut off."""
    shift = draw(distinct(examples, copies), 3).repeat(copies, 1)[:examples]
    factor = draw(3, 5, seed=1).requires_grad_()
    found = []
    for number in (1, copies):
        parts = Parts.apply(shift, factor, [2, 3], slope_only, None, number)
        value = sum((index + 1) * (1 + part).pow(3).sum() for index, part in enumerate(parts))
        found.append((parts, torch.autograd.grad(value, factor)))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)


def test_examples_share_perturbations_of_many_hyperparameters():
    """Up to four of them, as long as eight different ones are left; and each is drawn from the same distribution."""
    problem = many_decays(200)
    response = bilevel.DeltaSTN(scale=0.3).bind(problem)
    seen = []
    response.perturbed = lambda noise, held: (
        seen.append((noise, held.copies)) or type(response).perturbed(response, noise, held)
    )
    for examples, copies in ((64, 4), (30, 3), (17, 2), (15, 1)):
        list(response.inner_loss(problem.initial_hyper(), (draw(examples, 3), draw(examples, 3))))
        noise, found = seen.pop()
        assert found == copies and noise.shape == (examples, 200)
        rows = distinct(examples, copies)
        assert torch.equal(noise, noise[:rows].repeat(copies, 1)[:examples])
        assert len(noise.unique(dim=0)) == rows and abs(float(noise.std()) - 0.3) < 0.02
    few = bilevel.DeltaSTN().bind(many_decays(49))
    assert few._copies(64) == 1 and bilevel.DeltaSTN(control=False).bind(problem)._copies(64) == 1
    assert bilevel.DeltaSTN(perturb="batch").bind(problem)._copies(None) == 1


def test_a_step_with_copies_has_the_gradients_of_a_step_without(monkeypatch):
    """The same perturbations, taken for different ones."""
    found = []
    for kept in (True, False):
        problem = many_decays(200)
        response = bilevel.DeltaSTN().bind(problem)
        factor = response.theta.gate.factor
        factor.data = 0.1 * draw(*factor.shape)
        if not kept:
            monkeypatch.setattr(Held, "__init__", lambda self, copies, make=Held.__init__: make(self))
        torch.manual_seed(1)
        total = torch.zeros_like(factor)
        for term in response.inner_loss(problem.initial_hyper(), (draw(30, 3), draw(30, 3, seed=1))):
            (part,) = torch.autograd.grad(term.value, factor, allow_unused=True)
            total = total if part is None else total + part
        found.append(total)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert found[0].abs().max() > 1e-4


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 6))
def test_a_product_in_pieces_is_the_product(rows, hyper, units):
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(slopes, "LARGE", 7)
        left, right = draw(rows, hyper), draw(rows, units, seed=1)
        torch.testing.assert_close(slopes._product(left, right), left.T @ right, rtol=1e-12, atol=1e-12)


def many_decays(size, net=None):
    """As many weight decays, of a small network."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double() if net is None else net
    return bilevel.Problem(
        net,
        inner_loss=lambda model, hyper, batch: (
            (model(batch[0]) - batch[1]).pow(2).mean(1) + hyper["decay"].mean(1) * bilevel.l2(model.params)
        ),
        outer_loss=lambda model, hyper, batch: (model(batch[0]) - batch[1]).pow(2).mean(),
        hyper={"decay": bilevel.positive(torch.full((size,), 0.1, dtype=F64))},
    )
