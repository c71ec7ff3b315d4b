"""The networks of the image experiments: sizes, where each rate goes, and that every hypernetwork method runs them."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, jvp

import bilevel
from applications.models import MLP, VGG16, AlexNet, ResNet18, SimpleCNN

TINY = {
    "mlp": (partial(MLP, width=16), (1, 28, 28), 3),
    "simple_cnn": (partial(SimpleCNN, channels=(3, 4)), (1, 28, 28), 4),
    "alexnet": (partial(AlexNet, width=1 / 32), (3, 32, 32), 8),
    "vgg16": (partial(VGG16, width=1 / 16), (3, 32, 32), 16),
    "resnet18": (partial(ResNet18, width=1 / 16), (3, 32, 32), 9),
}
METHODS = [bilevel.STN, bilevel.CenteredSTN, bilevel.DeltaSTN]


@pytest.fixture(params=TINY)
def tiny(request):
    make, shape, count = TINY[request.param]
    torch.manual_seed(0)
    return make().double(), torch.rand(6, *shape, dtype=torch.float64), count


def convolution(inputs, outputs, size):
    return inputs * outputs * size**2 + outputs


def linear(inputs, outputs):
    return (inputs + 1) * outputs


def block(inputs, outputs):
    """No biases; two numbers per channel for each batch norm; a shortcut where the size changes."""
    shortcut = inputs * outputs + 2 * outputs if inputs != outputs else 0
    return 9 * inputs * outputs + 2 * outputs + 9 * outputs**2 + 2 * outputs + shortcut


COUNTS = {
    MLP: [linear(784, 1200), 2 * linear(1200, 1200), linear(1200, 10)],
    SimpleCNN: [convolution(1, 16, 5), convolution(16, 32, 5), linear(1568, 1568), linear(1568, 10)],
    AlexNet: [
        *(convolution(*sizes, 3) for sizes in ((3, 64), (64, 192), (192, 384), (384, 256), (256, 256))),
        *(linear(*sizes) for sizes in ((256 * 2 * 2, 4096), (4096, 4096), (4096, 10))),
    ],
    VGG16: [
        *(convolution(*sizes, 3) for sizes in ((3, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 512))),
        2 * convolution(256, 256, 3),
        5 * convolution(512, 512, 3),
        2 * (2 * 64 + 2 * 128 + 3 * 256 + 6 * 512),
        2 * linear(512, 512),
        linear(512, 10),
    ],
    ResNet18: [
        9 * 3 * 64 + 2 * 64,
        *(block(*sizes) for sizes in ((64, 64), (64, 64), (64, 128), (128, 128))),
        *(block(*sizes) for sizes in ((128, 256), (256, 256), (256, 512), (512, 512))),
        linear(512, 10),
    ],
}
TOTALS = {MLP: 3_836_410, SimpleCNN: 2_489_130, AlexNet: 23_272_266, VGG16: 15_253_578, ResNet18: 11_173_962}


@pytest.mark.parametrize("make", COUNTS)
def test_full_size(make):
    """By layer, and the sums; those of the last three are the usual ones of these networks for CIFAR-10."""
    with torch.device("meta"):
        net = make()
    count = sum(weight.numel() for weight in net.parameters())
    assert count == sum(COUNTS[make]) == TOTALS[make]


def normal(x, weight, bias):
    centred = x - x.mean((0, 2, 3), keepdim=True)
    scaled = centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
    return scaled * weight[:, None, None] + bias[:, None, None]


def by_plan(plan, weights, x):
    """Layers in a row: convolutions (c; C with stride 2; b with a batch norm), p a pool, d dense, o the output."""
    for layer in plan.split():
        weight, bias = next(weights), next(weights)
        if layer in "do":
            x = x.flatten(1) @ weight.T + bias
        else:
            x = F.conv2d(x, weight, bias, stride=2 if "C" in layer else 1, padding=len(weight[0, 0]) // 2)
            x = normal(x, next(weights), next(weights)) if "b" in layer else x
        x = x if layer == "o" else x.clamp_min(0)
        if "p" in layer:
            x = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5))
    return x


def residual(weights, x):
    def layer(x, stride):
        weight = next(weights)
        x = F.conv2d(x, weight, stride=stride, padding=len(weight[0, 0]) // 2)
        return normal(x, next(weights), next(weights))

    x = layer(x, 1).clamp_min(0)
    for stride in (1, 1, 2, 1, 2, 1, 2, 1):
        y = layer(layer(x, stride).clamp_min(0), 1)
        x = (y + (x if stride == 1 else layer(x, 2))).clamp_min(0)
    return x.mean((2, 3)) @ next(weights).T + next(weights)


REFERENCES = {
    MLP: partial(by_plan, "d d d o"),
    SimpleCNN: partial(by_plan, "cp cp d o"),
    AlexNet: partial(by_plan, "Cp cp c c cp d d o"),
    VGG16: partial(by_plan, "b bp b bp b b bp b b bp b b bp d d o"),
    ResNet18: residual,
}


def test_predictions_are_those_of_the_layers_written_out(tiny):
    net, x, count = tiny
    expected = REFERENCES[type(net)](iter(list(net.parameters())), x)
    torch.testing.assert_close(net(x, torch.zeros(count)), expected, rtol=0, atol=1e-10)


def test_every_rate_is_that_of_its_layer_and_example(tiny):
    """A rate of one leaves nothing of one example before one stage; other stages and examples are spared."""
    net, x, count = tiny
    assert len(net.stages) == count
    inputs = {}
    for index, stage in enumerate(net.stages):
        stage.register_forward_pre_hook(lambda _, args, index=index: inputs.update({index: args[0]}))
    for dropped in range(count):
        rates = torch.zeros(6, count, dtype=torch.float64)
        rates[1, dropped] = 1.0
        net(x, rates)
        for index in range(dropped + 1):
            alive = inputs[index].flatten(1).ne(0).any(1)
            assert alive.tolist() == [True, index != dropped, True, True, True, True]


def test_shared_rates_are_those_of_every_example(tiny):
    net, x, count = tiny
    rates = torch.linspace(0.1, 0.8, count, dtype=torch.float64)
    outputs = []
    for value in (rates, rates.expand(6, count)):
        torch.manual_seed(1)
        outputs.append(net(x, value))
    assert outputs[0].shape == (6, 10)
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], net(x, rates))
    net.eval()
    assert torch.equal(net(x, rates), net(x, torch.zeros(count)))


def test_wrong_numbers_of_rates_are_refused(tiny):
    net, x, count = tiny
    for shape in ((count + 1,), (6, count - 1), (), (2, 6, count)):
        with pytest.raises(ValueError, match=rf"rates must have shape \({count},\) or \(6, {count}\)"):
            net(x, torch.zeros(shape))


@pytest.mark.parametrize("training", [False, True])
def test_forward_mode_is_right_through_every_layer(tiny, training):
    """Against central differences, in a random direction of all weights; pooling and norms are in between."""
    net, x, count = tiny
    net.train(training)
    for module in net.modules():
        if training and isinstance(module, torch.nn.BatchNorm2d):  # func refuses to update running statistics
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    weights = {name: value.detach() for name, value in net.named_parameters()}
    direction = {name: torch.randn_like(value) for name, value in weights.items()}

    def predict(values):
        return functional_call(net, values, (x, torch.zeros(count)))

    def at(step):
        return predict({name: value + step * direction[name] for name, value in weights.items()})

    expected = (at(1e-7) - at(-1e-7)) / 2e-7
    torch.testing.assert_close(jvp(predict, (weights,), (direction,))[1], expected, rtol=1e-4, atol=1e-4)


def train_loss(model, hyper, batch):
    x, y = batch
    strengths = {name: value for name, value in hyper.items() if name != "dropout"}
    return F.cross_entropy(model(bilevel.augment.apply(x, strengths), hyper["dropout"]), y, reduction="none")


def valid_loss(model, hyper, batch):
    x, y = batch
    return F.cross_entropy(model(x, hyper["dropout"]), y, reduction="none")


def make_solver(net, method, hyper):
    return bilevel.Solver(
        bilevel.Problem(net, inner_loss=train_loss, outer_loss=valid_loss, hyper=hyper),
        method=method(structure="rowwise", perturb="example", entropy=1e-3),
        inner_optimizer=partial(torch.optim.SGD, lr=0.05),
        outer_optimizer=partial(torch.optim.RMSprop, lr=0.01),
        seed=0,
    )


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_methods_take_steps(tiny, method):
    """All weights and the response to all rates learn; the hypergradient reaches all rates."""
    net, x, count = tiny
    solver = make_solver(net, method, {"dropout": bilevel.interval(0.0, 0.95, init=[0.05] * count)})
    # A batch norm removes what a bias before it adds.
    idle = [f"stages.{index}.0.bias" for index in range(13)] if isinstance(net, VGG16) else []
    batch = x, torch.arange(6)
    before = {name: value.clone() for name, value in solver.params.items()}
    assert torch.isfinite(torch.as_tensor(solver.inner_step(batch)))
    for name, value in solver.params.items():
        assert value.isfinite().all()
        assert name in idle or not torch.equal(value, before[name]), name
    start = solver.hyper["dropout"].clone()
    step = solver.outer_step(batch, batch)
    assert step.hypergradient.isfinite().all()
    assert (step.hypergradient != 0).all()
    assert (solver.hyper["dropout"] != start).all()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
@pytest.mark.parametrize(("name", "total"), [("alexnet", 18), ("vgg16", 26), ("resnet18", 19)])
def test_dropout_and_augmentation_are_tuned_together(name, total, method):
    """As many hyperparameters as in the paper, one strength per example, and a hypergradient for each."""
    make, shape, count = TINY[name]
    torch.manual_seed(0)
    hyper = {
        "dropout": bilevel.interval(0.0, 0.95, init=[0.05] * count),
        "holes": bilevel.integer(0, 4, init=1),
        "length": bilevel.integer(0, 24, init=4),
        **{key: bilevel.interval(0.0, 0.5, init=0.05) for key in ("hue", "translation", "scale")},
        **{key: bilevel.interval(0.0, 1.0, init=0.05) for key in ("brightness", "contrast", "saturation")},
        **{key: bilevel.interval(0.0, 45.0, init=0.05) for key in ("rotation", "shear")},
    }
    solver = make_solver(make(), method, hyper)
    batch = torch.rand(5, *shape), torch.arange(5)
    solver.inner_step(batch)
    hypergradient = solver.outer_step(batch, batch).hypergradient
    assert hypergradient.shape == (total,)
    assert hypergradient.isfinite().all()
    assert (hypergradient != 0).all()
