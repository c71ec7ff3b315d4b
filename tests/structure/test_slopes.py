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
from bilevel.structure.slopes import PIECE, Both, Held, Parts, Slopes, distinct, row_products

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


@pytest.mark.parametrize("with_change", [False, True])
@pytest.mark.parametrize("sizes", [(3, 4), (3, 2, 4)])
def test_slopes_alone_have_the_first_and_second_derivatives_of_the_formula(sizes, with_change):
    value, product = draw(*sizes), draw(*sizes, seed=1)
    per_unit = (sizes[0], *[1] * (len(sizes) - 2), sizes[-1])
    factor, change = torch.zeros(per_unit, dtype=F64), torch.zeros(per_unit, dtype=F64) if with_change else None
    leaves = [leaf.requires_grad_() for leaf in (value, product, factor, change) if leaf is not None]
    results = []
    for fast in (True, False):
        if fast:
            y = Slopes.apply(value, product, factor, change)
        else:
            y = value + factor * product + (0 if change is None else change)
        first = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True, allow_unused=True)
        slopes = [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(leaves, first, strict=True)]
        penalty = sum(part.pow(2).sum() + part.sum() for part in slopes)
        second = torch.autograd.grad(penalty, leaves, allow_unused=True)
        results.append((y, slopes, second))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_two_products_in_one_have_the_values_and_slopes_of_two():
    tangent, value, weight = draw(3, 4).requires_grad_(), draw(3, 4, seed=1), draw(5, 4, seed=2)
    first, second = Both.apply(tangent, value, weight)
    assert first.requires_grad and not second.requires_grad
    torch.testing.assert_close((first, second), (tangent @ weight.T, value @ weight.T), rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda t: Both.apply(t, value, weight)[0], tangent)
    assert torch.autograd.gradgradcheck(lambda t: Both.apply(t, value, weight)[0].pow(2), tangent)


@pytest.mark.parametrize("method", [bilevel.DeltaSTN(), bilevel.CenteredSTN(), bilevel.DeltaSTN(antithetic=True)])
def test_a_step_is_the_same_in_both_forms(monkeypatch, method):
    found, calls = [], []
    for kind in (Slopes, Both):
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
        expected = (
            {Slopes} if isinstance(method, bilevel.CenteredSTN) else {Both} if method.antithetic else {Slopes, Both}
        )
        assert set(calls) == (expected if large == 0 else set())
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
