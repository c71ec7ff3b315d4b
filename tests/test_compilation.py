"""Tracing a computation, cutting its graph in two, and what happens when that fails."""

import copy
import random
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from bilevel.compilation import MAX_KINDS, Later, OfModule, Staged
from bilevel.compilation.products import LARGE, ONEDNN, choose_products
from bilevel.compilation.staged import _close

X = torch.linspace(-1, 1, 6, dtype=torch.float64)
V = torch.linspace(2, 3, 6, dtype=torch.float64)


def staged(stage, backend=lambda graph, inputs: graph):
    return Staged(stage, "the test", backend=backend)


def hessian(x, *rest):
    """The value of a function, and the product of its Hessian with a vector."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        value = (leaf.exp() * leaf).sum()
        (slope,) = torch.autograd.grad(value, leaf, create_graph=True)

    def product(vectors):
        return [*torch.autograd.grad(slope, leaf, vectors, retain_graph=True)]

    return {"value": value.detach(), "name": "x"}, [Later(product, [x])]


def expected_product(x, v):
    return (x + 2) * x.exp() * v


def check_fallback(stage, *inputs, words, calls=3):
    """One warning, then the results of the stage itself."""
    compiled = staged(stage)
    with pytest.warns(UserWarning, match="could not compile the test, which run uncompiled") as caught:
        found = [compiled(*inputs) for _ in range(calls)]
    assert len(caught) == 1
    assert words in str(caught[0].message)
    assert not compiled.working
    return found


def test_value_and_late_part_are_those_of_the_stage():
    compiled = staged(hessian)
    for x in (X, 2 * X):
        outputs, (product,) = compiled(x)
        assert outputs["name"] == "x"
        torch.testing.assert_close(outputs["value"], (x.exp() * x).sum(), rtol=1e-14, atol=0)
        for v in (V, -V):
            torch.testing.assert_close(product([v]), [expected_product(x, v)], rtol=1e-14, atol=0)
    assert len(compiled.compiled) == 1


def test_late_graph_holds_only_what_depends_on_the_late_input():
    """The exponential is early and the same for every vector: the late graph only multiplies."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    staged(hessian, keep)(X)
    early, late = ([str(node.target) for node in graph.graph.nodes if node.op == "call_function"] for graph in graphs)
    assert "aten.exp.default" in early
    assert "aten.mul.Tensor" in late
    assert "aten.exp.default" not in late


def test_zero_may_be_given_as_none():
    def stage(x):
        return x, [Later(lambda ab: [x if ab[1] is None else x * ab[0] + ab[1], None], [x, x])]

    _, (rest,) = staged(stage)(X)
    torch.testing.assert_close(rest([V, None]), [X * V, None])


def test_another_shape_dtype_stride_or_plain_value_is_another_graph():
    def stage(x, power):
        return x**power, []

    compiled = staged(stage)
    wide = torch.randn(6, 2, dtype=torch.float64)
    for x, power in ((X, 2), (X, 3), (X[:3], 2), (X.float(), 2), (wide[:, 0], 2), (X, 2.0), (X, True)):
        torch.testing.assert_close(compiled(x, power)[0], x**power)
    assert len(compiled.compiled) == 7
    assert compiled.working


def test_too_many_kinds_run_uncompiled_with_one_warning():
    compiled = staged(hessian)
    with pytest.warns(UserWarning, match=f"for {MAX_KINDS} kinds of inputs") as caught:
        for size in range(1, MAX_KINDS + 4):
            x = torch.linspace(0, 1, size, dtype=torch.float64)
            _, (product,) = compiled(x)
            torch.testing.assert_close(product([x]), [expected_product(x, x)])
    assert len(caught) == 1
    assert len(compiled.compiled) == MAX_KINDS
    assert compiled.working  # those that are compiled stay so


def test_random_numbers_are_drawn_once_and_are_the_uncompiled_ones():
    def stage(x):
        mask = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
        noise = torch.rand_like(x)
        return mask + noise, [Later(lambda v: [mask * noise * v[0]], [x])]

    compiled = staged(stage)
    for seed in range(3):
        torch.manual_seed(seed)
        plain, (plain_rest,) = stage(X)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        ours, (rest,) = compiled(X)
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(plain, ours)
        assert torch.equal(plain_rest([V])[0], rest([V])[0])
        assert torch.equal(rest([V])[0], rest([V])[0])


@pytest.mark.parametrize("size", [(), (1,), (6,)])
def test_tensors_that_are_no_inputs_are_read_at_every_call(size):
    constant = torch.ones(size, dtype=torch.float64)
    compiled = staged(lambda x: (x * constant.exp(), [Later(lambda v: [v[0] * constant], [x])]))
    for value in (1.0, 2.0):
        constant.fill_(value)
        early, (rest,) = compiled(X)
        torch.testing.assert_close(early, X * torch.tensor(value).double().exp())
        torch.testing.assert_close(rest([V]), [V * value])
    assert len(compiled.compiled) == 1


def test_mutations_of_its_own_tensors_are_allowed():
    def stage(x):
        y = x.clone()
        y[0] = 3.0
        late = x.clone()
        return y.mul_(2), [Later(lambda v: [late.clone().add_(v[0]), late * v[0]], [x])]

    early, (rest,) = staged(stage)(X)
    torch.testing.assert_close(early[0], torch.tensor(6.0).double())
    torch.testing.assert_close(rest([V]), [X + V, X * V])
    torch.testing.assert_close(X[0], torch.tensor(-1.0).double())


def test_results_share_no_memory_with_inputs():
    """A compiler may return an input, or a part of it, where the stage would have made a new tensor."""
    held = X.clone()
    compiled = staged(lambda x: ((x.detach(), x[1:], held.detach()), []))
    x = X.clone()
    for _ in range(2):
        for result in compiled(x)[0]:
            result.add_(1)
    assert torch.equal(x, X)
    assert torch.equal(held, X)


def test_what_comes_after_a_failure_is_not_tried():
    def undecided(x):
        return (x if x.sum().item() > 0 else -x), []

    first = staged(undecided)
    second = Staged(undecided, "the rest", backend=lambda graph, inputs: graph, after=first)
    with pytest.warns(UserWarning, match="could not compile the test") as caught:
        found = [first(V)[0], second(V)[0], second(-V)[0]]
    assert len(caught) == 1
    torch.testing.assert_close(found, [V] * 3, rtol=0, atol=0)


@pytest.mark.parametrize("can", [True, False])
def test_a_function_of_a_module_reads_and_writes_the_module_as_it_is_now(can):
    """Parameters and buffers are inputs, compiled or not; new values of buffers reach the module."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)).double()
    twin = copy.deepcopy(net)

    def gradient(params, x):
        value = net(x).exp().sum()
        return value.detach(), torch.autograd.grad(value, params), bool(can or value.item())

    compiled = OfModule(net, [net[1].weight], "the test", gradient, backend=lambda graph, inputs: graph)
    with nullcontext() if can else pytest.warns(UserWarning, match="could not compile the test"):
        for step in range(3):
            x = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            value, (slope,), _ = compiled(x)
            expected = twin(x).exp().sum()
            torch.testing.assert_close(value, expected.detach(), rtol=1e-13, atol=0)
            torch.testing.assert_close(slope, torch.autograd.grad(expected, twin[1].weight)[0], rtol=1e-12, atol=0)
            torch.testing.assert_close(dict(net.named_buffers()), dict(twin.named_buffers()), rtol=1e-13, atol=0)
            with torch.no_grad():
                for module in (net, twin):
                    module[0].weight.mul_(0.5)
    assert compiled.staged.working == can


def test_a_decision_on_values_runs_uncompiled():
    def stage(x):
        return (x.exp() if bool(x.sum() > 0) else x), [Later(lambda v: [x * v[0]], [x])]

    for outputs, (rest,) in check_fallback(stage, V, words="data-dependent"):
        assert torch.equal(outputs, V.exp())
        assert torch.equal(rest([X])[0], X * V)


def test_a_backend_that_fails_runs_uncompiled():
    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler\nand more")

    compiled = staged(hessian, broken)
    with pytest.warns(UserWarning, match=r"\(RuntimeError: no C\+\+ compiler\)\. Needed are a C\+\+ compiler"):
        _, (product,) = compiled(X)
    torch.testing.assert_close(product([V]), [expected_product(X, V)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(X)


def test_a_backend_that_is_wrong_is_found_out():
    def wrong(graph, inputs):
        return lambda *args: [1.001 * output for output in graph(*args)]

    with pytest.warns(UserWarning, match="differ from the uncompiled ones"):
        _, (product,) = staged(hessian, wrong)(X)
    torch.testing.assert_close(product([V]), [expected_product(X, V)])


@pytest.mark.parametrize(
    "draw", [random.random, np.random.default_rng(0).normal, iter(range(1, 100)).__next__], ids=["random", "numpy", "n"]
)
def test_python_values_that_change_are_found_out(draw):
    check_fallback(lambda x: (x * draw(), []), X, words="Python values that change")


@dataclass
class Box:
    content: Tensor


@pytest.mark.parametrize("value", [Box(X), np.ones(2), object()], ids=["dataclass", "numpy", "object"])
def test_objects_in_which_tensors_may_hide_are_refused(value):
    check_fallback(lambda x, other: (x, []), X, value, words=f"found a {type(value).__name__}")
    check_fallback(lambda x: ((x, value), []), X, words=f"found a {type(value).__name__}")


def test_changing_an_input_in_place_runs_uncompiled():
    found = check_fallback(lambda x: (x.add_(1) * 1, []), X.clone(), words="in place", calls=1)
    assert found[0][0][0] != -1


def test_changing_another_tensor_in_place_runs_uncompiled():
    count = torch.zeros((), dtype=torch.float64)
    check_fallback(lambda x: (count.add_(x.sum().abs() + 1) * x, []), X, words="")


def test_the_error_of_the_stage_itself_comes_through():
    def stage(x):
        raise KeyError("yours")

    compiled = staged(stage)
    with warnings.catch_warnings(), pytest.raises(KeyError, match="yours"):
        warnings.simplefilter("error")
        compiled(X)


def test_autocast_is_part_of_the_kind():
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    compiled = staged(lambda a, b: (a @ b, [Later(lambda v: [v[0] @ b], [a])]))
    dtypes = []
    for on in (False, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            early, (rest,) = compiled(a, b)
            dtypes.append((early.dtype, rest([a])[0].dtype))
    plain, half = (torch.float32,) * 2, (torch.bfloat16,) * 2
    assert dtypes == [plain, half, plain]
    assert compiled.working


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), True),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0]), False),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), True),
        (torch.tensor([7]), torch.tensor([3]), False),
        (torch.tensor([1.0, 2.1]), torch.tensor([1.0, 2.0]), False),
    ],
)
def test_the_first_results_are_compared_with_the_uncompiled_ones(found, expected, same):
    assert _close([found], [expected]) is same


def test_rounding_that_grows_is_no_difference():
    """Of whole iterations, where it is expected; an error that rounding does not explain is one."""

    def chaotic(x):
        for _ in range(12):
            x = 4 * x * (1 - x)  # doubles an error, again and again
        return x, []

    def rounded(graph, inputs):
        return lambda x: graph(x * (1 + torch.finfo(x.dtype).eps))

    x = torch.linspace(0.1, 0.9, 7)
    assert Staged(chaotic, "the test", backend=rounded, limit=10**3).attempt(x) is not None
    assert Staged(chaotic, "the test", backend=rounded).attempt(x) is None
    for limit in (None, 10**3):
        wrong = Staged(lambda x: (x.exp(), []), "t", backend=lambda g, _: lambda x: [1.01 * g(x)[0]], limit=limit)
        assert wrong.attempt(x) is None
        assert "differ" in wrong.reason


def products(x, w, b, v):
    """Each kind of product: of transposes, of what was transposed before, with a shift, with a vector, and small."""
    h = torch.addmm(b, x, w.t()).tanh()
    return h, h.t() @ x, h.detach() @ w, x.t() @ h, x.t() @ h[:, ::2], x @ v, w[:, :2].t() @ w[:, :2]


@pytest.mark.skipif(not ONEDNN, reason="no oneDNN")
@pytest.mark.parametrize(("dtype", "moved"), [(torch.float32, 5), (torch.float64, 0)])
def test_large_products_are_chosen_without_a_change_of_their_values(dtype, moved):
    generator = torch.Generator().manual_seed(0)
    x, w, b, v = (
        torch.randn(*shape, generator=generator).double() for shape in ((128, 130), (160, 130), (160,), (130,))
    )
    assert 128 * 130 * 80 > LARGE
    inputs = [tensor.to(dtype) for tensor in (x, w, b, v)]
    graph = make_fx(products)(*inputs)
    choose_products(graph)
    targets = [str(node.target) for node in graph.graph.nodes]
    assert targets.count("mkldnn._linear_pointwise.default") == moved
    assert "aten.mv.default" not in targets
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    for found, expected in zip(graph(*inputs), products(x, w, b, v), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=100 * tolerance)
