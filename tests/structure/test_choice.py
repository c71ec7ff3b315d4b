"""Which weight responds how, and what cannot be chosen."""

import pytest
import torch
from problems import Tanh, network_problem
from torch import nn

import bilevel
from bilevel import STN, CenteredSTN, DeltaSTN
from bilevel.structure import Theta, choose
from bilevel.structure.dense import Dense

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
THREE = [STN, CenteredSTN, DeltaSTN]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize(
    ("structure", "expected"),
    [
        ("dense", ["dense"] * 4),
        ("rowwise", ["rowwise"] * 4),
        ({"*": "none"}, ["none"] * 4),
        ({"*.bias": "none"}, ["gate", "none", "gate", "none"]),
        ({"0.bias": "dense", "*.bias": "none"}, ["gate", "dense", "gate", "none"]),
        ({"2.*": "dense", "*.bias": "none"}, ["gate", "none", "dense", "dense"]),
        ({}, ["gate"] * 4),
        ("gate", ["gate"] * 4),
    ],
)
def test_the_first_pattern_that_fits_counts(structure, expected):
    assert choose(structure, NAMES) == dict(zip(NAMES, expected, strict=True))


@pytest.mark.parametrize("method", THREE)
@pytest.mark.parametrize(
    ("structure", "error", "match"),
    [
        ("rowise", ValueError, "'rowise' for '.' is unknown.*did you mean 'rowwise'"),
        ({"0.*": "full"}, ValueError, "'full' for '0.\\*' is unknown"),
        ({"0.wieght": "none"}, ValueError, "'0.wieght' fits no weight.*did you mean '0.weight'"),
        ({"head.*": "none"}, ValueError, "'head.\\*' fits no weight"),
        (3, TypeError, "a name or a mapping"),
        ("none", ValueError, "no weight responds"),
        ({"*.weight": "none", "*.bias": "none"}, ValueError, "no weight responds"),
    ],
)
def test_a_choice_that_cannot_be_meant_is_refused(method, structure, error, match):
    with pytest.raises(error, match=match):
        method(structure=structure).bind(network_problem(network()))


@pytest.mark.parametrize("method", THREE)
def test_each_weight_responds_as_chosen(method):
    """Zero rows where there is no response, and one scale for each row of the template where it goes by rows."""
    problem = network_problem(network())
    structure = {"0.weight": "dense", "0.bias": "none", "2.*": "rowwise"}
    response, hyper = method(structure=structure).bind(problem), problem.initial_hyper()
    generator = torch.Generator().manual_seed(1)
    for part in response.theta.parameters():
        part.data.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64))
    sizes = [weight.numel() for weight in problem.params.values()]
    parts = dict(zip(problem.params, response.jacobian(hyper).split(sizes), strict=True))
    assert not parts["0.bias"].any()
    assert torch.equal(parts["0.weight"], response.theta.dense.slopes[0].detach().flatten(1).T)
    for name, factor, template in zip(
        ["2.weight", "2.bias"], response.theta.rowwise.factors, response.theta.rowwise.templates, strict=True
    ):
        expected = torch.einsum("rh,rk->rkh", factor, template.reshape(len(template), -1)).flatten(0, 1)
        torch.testing.assert_close(parts[name], expected.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", THREE)
@pytest.mark.parametrize("structure", ["dense", {"2.*": "dense"}])
def test_a_dense_response_for_each_example_is_refused(method, structure):
    with pytest.raises(ValueError, match=r"'[02].weight' has structure 'dense'.*'rowwise', or perturb='batch'"):
        method(structure=structure, perturb="example").bind(network_problem(network()))


@pytest.mark.parametrize("method", THREE)
def test_examples_without_a_network_are_refused(method):
    def loss(model, hyper, batch):
        return (model.params["w"] * hyper["a"]).sum()

    problem = bilevel.Problem({"w": torch.zeros(2)}, inner_loss=loss, outer_loss=loss, hyper={"a": bilevel.real(0.0)})
    with pytest.raises(ValueError, match=r"needs a network, but inner is a mapping.*perturb='batch'"):
        method(structure="rowwise", perturb="example").bind(problem)
    method(structure="rowwise").bind(problem)


@pytest.mark.parametrize("method", THREE)
def test_other_names_of_perturb_are_refused(method):
    with pytest.raises(ValueError, match="perturb must be 'example', 'batch' or None, got 'examples'"):
        method(perturb="examples")


@pytest.mark.parametrize("method", THREE)
def test_a_response_by_rows_fits_where_a_dense_one_does_not(method):
    """n + r h numbers rather than n h."""
    problem = network_problem(Tanh(3, 4, 2))
    numbers = 20 + 6 * 3
    with pytest.raises(MemoryError):
        method(structure="dense", max_gigabytes=8e-9 * numbers).bind(problem)
    response = method(structure="rowwise", max_gigabytes=8e-9 * numbers).bind(problem)
    assert sum(part.numel() for part in response.theta.parameters()) == numbers
    with pytest.raises(MemoryError):
        method(structure="rowwise", max_gigabytes=8e-9 * (numbers - 1)).bind(problem)
    with pytest.raises(MemoryError):
        method(structure={"V": "dense"}, max_gigabytes=1e-7).bind(problem)


@pytest.mark.parametrize("method", THREE)
def test_networks_respond_by_rows_and_per_example_unless_told_otherwise(method):
    net = Tanh(3, 4, 2)
    of_network = network_problem(net)
    loss = {name: lambda model, hyper, batch: bilevel.l2(model.params) for name in ("inner_loss", "outer_loss")}
    of_mapping = bilevel.Problem(dict(net.named_parameters()), **loss, hyper={"x": bilevel.real(0.0)})
    batch = torch.zeros(5, 3)
    for settings, problem, structure, shape in [
        ({}, of_network, Theta, 2),
        ({"perturb": "batch"}, of_network, Theta, 1),
        ({"structure": "dense"}, of_network, Dense, 1),
        ({"structure": {"W": "dense"}}, of_network, Theta, 1),
        ({"structure": {"W": "none"}}, of_network, Theta, 2),
        ({}, of_mapping, Dense, 1),
        ({"structure": "rowwise"}, of_mapping, Theta, 1),
    ]:
        response = method(**settings).bind(problem)
        assert isinstance(response.theta, structure), settings
        assert response.perturbation(batch).ndim == shape, settings
        assert response.perturbation(None).ndim == 1  # nothing to count
