r"""What a method is: settings, bound to a problem, become a differentiable best response.

The value of a best response at :math:`\lambda` is the current weights; its derivative is the method's approximation of
:math:`\partial r / \partial \lambda`. The hypergradient is then always the gradient of
``outer_loss(response(hyper), hyper)`` (``eq:valid-loss-decompose``), whatever the method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim import Optimizer
from typing_extensions import override

from bilevel.hyper import Scale
from bilevel.problem import Loss, Model, Problem, Variables
from bilevel.structure.dense import check_memory


class Method(ABC):
    """Settings of a method: a frozen dataclass that can be printed and compared, and holds no state.

    Example:
        >>> import bilevel
        >>> bilevel.METHODS["unrolled"] == bilevel.Unrolled(steps=20)
        True
        >>> isinstance(bilevel.DeltaSTN(entropy=1e-3), Method)
        True
    """

    @property
    def unrolled_steps(self) -> int:
        """How many inner steps an outer step makes itself; as in the response that it binds."""
        return 0

    @abstractmethod
    def bind(self, problem: Problem) -> BestResponse:
        """Create the best response that these settings describe.

        Args:
            problem: What it responds to.

        Returns:
            A new module; its weights start at those of the problem.
        """


class Steps(NamedTuple):
    """Inner steps that a response made itself.

    Attributes:
        losses: The inner loss before each step.
        norms: The norm of its gradient before clipping.
        aux: What the inner loss returned beside its value at the last step.
    """

    losses: Tensor
    norms: Tensor
    aux: Any


class Doubt(NamedTuple):
    """Whether a derivative is right, as long as the host has not waited for the device to find out.

    Attributes:
        numbers: What decides, on the device, shape ``(k,)``.
        settle: Takes these numbers; raises if the derivative is wrong.
    """

    numbers: Tensor
    settle: Callable[[list[float]], None]


class BestResponse(nn.Module, ABC):
    r"""A differentiable best response, :math:`\lambda \mapsto r(\lambda)`.

    Holds everything that is learned at the inner level: ``inner``, the weights and buffers; and whatever parameters the
    method adds, which get an optimizer of their own. ``hyper`` is always the unconstrained vector.

    Attributes:
        problem: What it responds to.
        inner: Weights and buffers, started at those of the problem.
        scale: The perturbation scale, or None for a method that does not perturb.
        report: What the method says about its last hypergradient, as scalars by name.
        unrolled_steps: How many inner steps :meth:`forward` makes. Each takes a batch of its own, so ``train_batch``
            is then a list of as many. Zero for methods that leave all inner steps to the solver.
        restarts: Whether these steps forget what was trained before.
        steps: The steps that :meth:`forward` made last.
        doubts: A list, during an outer step, to which the method adds what it would otherwise read from the device
            itself: the solver reads everything at once. None means that a method settles its doubts alone.
        reported: Which of the terms of :meth:`inner_loss` is the loss to report.
        antithetic_outer: Whether a perturbed outer loss is averaged over the perturbation and its negative.
        pure: Whether the solver may compile the steps around its methods. They may then read only its parameters and
            buffers, the problem and their arguments, and change only its buffers. :meth:`forward` may not read its
            training batch.
        can_compile: Whether the method can compile its own costly parts.
        compiles: Whether it should do so; set by the solver before :meth:`connect`.
        whole: Whether the derivative of an outer loss may be compiled as one graph. It may then read only what ``pure``
            allows and what :meth:`reads` returns, and change nothing but what :meth:`left` returns.
        moves_weights: Whether the method differentiates the update of the weights, and not only the loss. Others cannot
            tune decoupled weight decay, and refuse it.
        advice: What to add to an error of PyTorch about a derivative that it lacks, in a term of :meth:`inner_loss`.

    Example:
        >>> import bilevel
        >>> problem = bilevel.Problem(
        ...     {"w": torch.ones(2)},
        ...     inner_loss=lambda model, hyper, batch: (model.params["w"] - hyper["target"]).square().sum(),
        ...     outer_loss=lambda model, hyper, batch: model.params["w"].sum(),
        ...     hyper={"target": bilevel.real(1.0)},
        ... )
        >>> response = bilevel.Implicit(bilevel.Exact()).bind(problem)
        >>> response.jacobian(problem.initial_hyper())
        tensor([[1.],
                [1.]])
    """

    report: dict[str, Tensor]
    unrolled_steps: int = 0
    whole: bool = False
    restarts: bool = False
    steps: Steps | None = None
    doubts: list[Doubt] | None = None
    reported: int = 0
    antithetic_outer: bool = False
    pure: bool = False
    can_compile: bool = False
    compiles: bool = False
    moves_weights: bool = False
    advice: str = ""

    def __init__(self, problem: Problem) -> None:
        """Copy the weights and buffers of the problem.

        Raises:
            ValueError: If weight decay is decoupled, and the method cannot tune it.
        """
        super().__init__()
        if problem.decays and not self.moves_weights:
            raise ValueError(
                f"{type(self).__name__} cannot tune hyper[{problem.decays.names[0]!r}]: decoupled weight decay, that "
                "of AdamW, is no term of inner_loss but part of the update, which of all methods only Unrolled "
                "differentiates. Pass method='unrolled'; or tune the penalty, WeightDecay(net) without "
                "decoupled=True, and give the optimizer weight_decay=0."
            )
        self.problem = problem
        self.inner = Variables(problem)
        self.scale: Scale | None = None
        self.report = {}

    @property
    def carries(self) -> bool:
        """Whether :meth:`commit` changes anything, so that the whole state is kept until an outer step is judged."""
        return type(self).commit is not BestResponse.commit

    @abstractmethod
    def inner_loss(self, hyper: Tensor, batch: Any) -> Iterator[Loss]:
        """The terms whose sum the parameters of this module minimise.

        A generator: each term is differentiated before the next one is computed, so that one graph is alive at a time.
        The first term is the one to report, unless ``reported`` says otherwise.

        Args:
            hyper: The current hyperparameters, shape ``(h,)``.
            batch: For the inner loss.

        Yields:
            One loss per term.
        """

    @abstractmethod
    @override
    def forward(self, hyper: Tensor, train_batch: Any = None, center: Tensor | None = None) -> Model:
        r"""The model at ``hyper``, differentiable in it.

        Args:
            hyper: Shape ``(h,)``.
            train_batch: For methods whose derivative needs the inner loss; a list of ``unrolled_steps`` batches if
                that is not zero.
            center: The point :math:`\lambda_0` that the current weights belong to; ``hyper`` itself by default.

        Returns:
            A model whose ``params`` are :math:`r(\lambda)`.
        """

    def learns(self, step: int, optimizer: Optimizer | None) -> bool:
        """Whether what the method adds to the weights learns at an inner step, or the weights alone.

        Args:
            step: Its number, counted from 0.
            optimizer: Of what the method adds, if it adds anything.

        Returns:
            The answer, the same in all processes.
        """
        return True

    def weights_loss(self, hyper: Tensor, batch: Any) -> Iterator[Loss]:
        """The terms of :meth:`inner_loss` that the weights minimise, for steps in which nothing else learns.

        Args:
            hyper: As there.
            batch: As there.

        Yields:
            One loss per term; that at ``reported`` is the one to report.
        """
        yield from self.inner_loss(hyper, batch)

    def scaled(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients of what the method adds to the weights, in the units in which its optimizer takes steps.

        Args:
            gradients: Of the sum of :meth:`inner_loss`; None where it does not depend on a parameter.

        Returns:
            As many.
        """
        return gradients

    def check(self, hyper: Tensor, batch: Any) -> None:
        """Refuse, before work starts, an inner loss that this method would get wrong.

        The solver calls it with the first batch of each kind. It changes nothing and draws no random numbers.

        Args:
            hyper: The current hyperparameters, shape ``(h,)``.
            batch: For the inner loss.
        """

    def check_outer(self, hyper: Tensor, batch: Any) -> None:
        """The same for the outer loss.

        Args:
            hyper: The current hyperparameters, shape ``(h,)``.
            batch: For the outer loss.
        """

    def outer_perturbation(self, batch: Any) -> Tensor | None:
        """What to add to the hyperparameters in the outer loss, for methods that perturb it.

        Args:
            batch: Of the outer loss.

        Returns:
            Shape ``(h,)``, or ``(B, h)`` with one for each example; None leaves them as they are.
        """
        return None

    def connect(self, optimizer: Optimizer, clip: float | None) -> None:
        """Called once by the solver, for methods that make steps of the optimizer themselves.

        Args:
            optimizer: Of the weights.
            clip: Largest norm of the inner gradient, or None.
        """

    def divide(self, like: Tensor) -> None:
        """Called once if each process keeps a part of the parameters, for methods with buffers of the same size.

        Args:
            like: A weight of which each process has a part.
        """

    def commit(self) -> None:
        """Called after every successful outer step, for methods that carry something on to the next one."""

    def reads(self) -> Any:
        """What a derivative reads beside parameters, buffers and arguments, for a method that is ``whole``.

        Returns:
            Nested tensors and plain values.
        """
        return None

    def trace(self, reads: Any) -> AbstractContextManager[None]:
        """While such a graph is traced, :meth:`forward` and its derivative use ``reads`` and judge nothing.

        Args:
            reads: As :meth:`reads` returned it.

        Returns:
            A context manager.
        """
        return nullcontext()

    def left(self) -> Any:
        """What the derivative that was traced last has left behind.

        Returns:
            Nested tensors and plain values.
        """
        return None

    def accept(self, left: Any, hyper: Tensor, train_batch: Any) -> None:
        """Go on from what a compiled derivative has left behind, as if it had been made by :meth:`forward`.

        Args:
            left: As :meth:`left` returned it.
            hyper: Shape ``(h,)``.
            train_batch: As in :meth:`forward`.
        """

    def runs_compiled(self) -> bool:
        """Whether the costly parts that the method compiles itself could be compiled so far.

        Returns:
            The answer.
        """
        return False

    def jvp(self, hyper: Tensor, tangent: Tensor, train_batch: Any = None) -> dict[str, Tensor]:
        r"""The change of the weights along a direction, :math:`\frac{\partial r}{\partial \lambda} v`.

        Args:
            hyper: Shape ``(h,)``.
            tangent: The direction v, shape ``(h,)``.
            train_batch: As in :meth:`forward`.

        Returns:
            One tensor per parameter, of its shape.
        """
        with torch.no_grad(), forward_ad.dual_level():
            dual = forward_ad.make_dual(hyper.detach(), tangent)
            params = self(dual, train_batch, hyper.detach()).params
            tangents = {name: forward_ad.unpack_dual(value).tangent for name, value in params.items()}
            return {name: torch.zeros_like(params[name]) if t is None else t for name, t in tangents.items()}

    def vjp(self, hyper: Tensor, cotangent: Mapping[str, Tensor], train_batch: Any = None) -> Tensor:
        r"""The transposed action, :math:`(\frac{\partial r}{\partial \lambda})^\top u`.

        Args:
            hyper: Shape ``(h,)``.
            cotangent: The weights u, by name.
            train_batch: As in :meth:`forward`.

        Returns:
            A tensor of shape ``(h,)``.
        """
        leaf = hyper.detach().requires_grad_()
        params = self(leaf, train_batch).params
        outputs = [value for value in params.values() if value.requires_grad]
        cotangents = [cotangent[name] for name, value in params.items() if value.requires_grad]
        if not outputs:
            return torch.zeros_like(leaf)
        (gradient,) = torch.autograd.grad(outputs, leaf, cotangents, allow_unused=True)
        return torch.zeros_like(leaf) if gradient is None else gradient

    def jacobian(self, hyper: Tensor, train_batch: Any = None, *, max_gigabytes: float = 4.0) -> Tensor:
        r"""The dense best-response Jacobian :math:`\frac{\partial r}{\partial \lambda}`, for small problems.

        Args:
            hyper: Shape ``(h,)``.
            train_batch: As in :meth:`forward`.
            max_gigabytes: Refuse to build a larger matrix.

        Returns:
            A matrix of shape ``(m, h)``: the parameters flattened in order.
        """
        check_memory(self.problem.params, hyper.numel(), max_gigabytes)
        columns = [self.jvp(hyper, direction, train_batch) for direction in torch.eye(hyper.numel()).to(hyper)]
        return torch.stack([torch.cat([part.flatten() for part in column.values()]) for column in columns], dim=1)
