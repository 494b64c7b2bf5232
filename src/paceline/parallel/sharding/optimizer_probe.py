"""Tries an optimizer: may it update parts of parameters, or whole parameters on different ranks, or neither?

It is *elementwise* if it may update parts: a matrix is updated by one optimizer, and its two unequal parts, flattened,
by one each, as the ranks do it. Afterwards the numbers, the options of the groups and the shapes of the states must
agree. Otherwise it may still update each parameter by itself: two matrices are updated by one optimizer together, and
by one each, and again everything must agree. The gradients are made to reveal updates
that depend on more than one element: some have elements of very different size (norms and clipping), some are nearly
orthogonal to every row of the parameter (AdamP's projection), the others have a common direction (D-Adaptation). The
matrix is large enough for optimizers that treat parameters by size (8-bit Adam, from 4096 elements on); a switch at a
larger size shows in the shapes of the states, see `misfit`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from paceline.errors import UsageError

__all__ = ["OptimizerProbe", "check_options", "group_options", "probe_optimizer", "takes_arguments"]

_STEPS = 8
_SHAPE = (64, 66)
_OTHER_SHAPE = (48, 40)
_FIRST_PART = 1000
"""Elements of the first part; it ends inside a row."""

_LR = 1.0
"""Large enough for every update to be visible beside the parameter, whatever rate a schedule begins with."""

_TOLERANCE = 1e-5
"""Relative difference of sums that were rounded differently."""

_NEARLY_ORTHOGONAL = 0.005
"""Cosine between a gradient and the rows of a parameter, as large as AdamP takes for 0."""

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of entries of the whole parameter, beside tensors; other objects may hold what is per element."""


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group holds besides its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


@dataclass(frozen=True)
class OptimizerProbe:
    """What trying an optimizer has shown.

    Attributes:
        refusal: why ranks can't update different parameters, or parts of them; "" if they can.
        whole: it needs whole parameters; False: it is elementwise.
        failed: a step with a whole parameter raised; it may need arguments.
        elementwise: names of the state's entries that have one value per element.
        changes_groups: a step changes what its groups hold.
        whole_shapes: shapes of its other tensors, which belong to the whole parameter (``step``), by name.
    """

    refusal: str = ""
    whole: bool = False
    failed: bool = False
    elementwise: frozenset[str] = frozenset()
    changes_groups: bool = False
    whole_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __or__(self, other: OptimizerProbe) -> OptimizerProbe:
        """Return what is true for parameters of either of two kinds."""
        return OptimizerProbe(
            self.refusal or other.refusal,
            self.whole or other.whole,
            self.failed or other.failed,
            self.elementwise | other.elementwise,
            self.changes_groups or other.changes_groups,
            self.whole_shapes | other.whole_shapes,
        )

    def misfit(self, state: Mapping[str, Any], numel: int) -> str:
        """Return how the state of a part with `numel` elements differs from the trial's; "" if it does not."""
        for key, value in state.items():
            expected: list[tuple[int, ...]] = [
                (),
                (numel,),
            ]  # due to options that a loaded state brought along
            if key in self.elementwise:
                expected = [(numel,)]
            elif key in self.whole_shapes:
                expected = [self.whole_shapes[key]]
            if isinstance(value, Tensor) and tuple(value.shape) not in expected:
                fitting = " or ".join(str(list(shape)) for shape in expected)
                return f"for {numel} elements, {key!r} has shape {list(value.shape)} instead of {fitting}"
        return ""


def check_options(optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's defaults with the options, once it accepts them.

    Raises:
        UsageError: it rejects them.
    """
    try:
        return dict(optimizer([torch.nn.Parameter(torch.zeros(2, 2))], **options).defaults)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{optimizer.__name__} rejects its options: {error}") from error


def takes_arguments(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Return whether the optimizer's ``step`` takes more than a closure."""
    return bool(set(inspect.signature(optimizer.step).parameters) - {"self", "closure"})


class _Trial:
    """Parameters, as a rule one, with an optimizer of their own."""

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        group: Mapping[str, Any],
        *starts: Tensor,
    ) -> None:
        self.params = [torch.nn.Parameter(start.clone()) for start in starts]
        self.param = self.params[0]
        self.optimizer = optimizer(self.params, **options)
        self.group.update(copy.deepcopy(group_options(group)))
        rate = self.group.get("lr")
        if isinstance(rate, Tensor):
            self.group["lr"] = torch.full_like(rate, _LR)
        elif isinstance(rate, int | float):
            self.group["lr"] = _LR
        self.group_before = repr(group_options(self.group))

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state[self.param]

    def step(self, grad: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Update with `grad`, flattened or not, and return the parameters, flattened."""
        sizes = [param.numel() for param in self.params]
        for param, own in zip(self.params, grad.flatten().split(sizes), strict=True):
            param.grad = own.reshape(param.shape).clone()
        self.optimizer.step(**copy.deepcopy(dict(arguments)))
        return torch.cat([param.detach().flatten() for param in self.params])


def probe_optimizer(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    device: torch.device,
    arguments: Mapping[str, Any],
) -> OptimizerProbe:
    """Try `optimizer` on a whole parameter and on parts of it, then on two parameters together and on each by itself.

    Args:
        optimizer: the class.
        options: its arguments.
        group: options of the parameters' group, which override them.
        device: of the parameters.
        arguments: of its ``step``.
    """
    with unset_fake_temporarily():  # numbers are compared, also where the program's tensors have no memory
        found = _try_parts(optimizer, options, group, device, arguments)
        if not found.refusal or found.failed:
            return found
        together = _try_two(optimizer, options, group, device, arguments)
    if together.refusal and together.refusal != found.refusal:
        return OptimizerProbe(f"{found.refusal}; {together.refusal}")
    return together


def _try_parts(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    device: torch.device,
    arguments: Mapping[str, Any],
) -> OptimizerProbe:
    """Try `optimizer` on a whole parameter and on parts of it."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator).to(device)
    sizes = [_FIRST_PART, start.numel() - _FIRST_PART]
    grads, updated = [], []
    try:
        whole = _Trial(optimizer, options, group, start)
        for number in range(_STEPS):
            grads.append(_revealing_grad(number, whole.param.detach(), generator))
            updated.append(whole.step(grads[-1], arguments))
    except Exception as error:  # noqa: BLE001 - whatever it raises, it can't be used
        return OptimizerProbe(f"a trial on {device.type} raised {_describe(error)}", failed=True)
    try:
        parts = [_Trial(optimizer, options, group, part) for part in start.flatten().split(sizes)]
        for grad, expected in zip(grads, updated, strict=True):
            of_parts = grad.flatten().split(sizes)
            found = torch.cat([part.step(own, arguments) for part, own in zip(parts, of_parts, strict=True)])
            if not torch.allclose(found, expected, rtol=0.0, atol=_TOLERANCE * expected.abs().max().item()):
                return OptimizerProbe("it is not elementwise")
    except Exception as error:  # noqa: BLE001 - as above
        return OptimizerProbe(f"it is not elementwise: with a part, a trial raised {_describe(error)}")
    if not all(_same_numbers(group_options(whole.group), group_options(part.group)) for part in parts):
        return OptimizerProbe("it is not elementwise: its groups hold numbers that depend on all elements")
    return _compare_states(whole, parts)


def _try_two(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    device: torch.device,
    arguments: Mapping[str, Any],
) -> OptimizerProbe:
    """Try `optimizer` on two parameters together, and on each by itself."""
    generator = torch.Generator().manual_seed(1)
    starts = [torch.randn(shape, generator=generator).to(device) for shape in (_SHAPE, _OTHER_SHAPE)]
    try:
        both = _Trial(optimizer, options, group, *starts)
        single = [_Trial(optimizer, options, group, start) for start in starts]
        for number in range(_STEPS):
            grads = [_revealing_grad(number, param.detach(), generator) for param in both.params]
            grads[1] *= 100.0  # what is added up over both would show in the smaller one
            expected = both.step(torch.cat([grad.flatten() for grad in grads]), arguments)
            found = torch.cat([one.step(grad, arguments) for one, grad in zip(single, grads, strict=True)])
            if not torch.allclose(found, expected, rtol=0.0, atol=_TOLERANCE * expected.abs().max().item()):
                return OptimizerProbe("the update of a parameter depends on others")
    except Exception as error:  # noqa: BLE001 - as above
        return OptimizerProbe(f"a trial with two parameters raised {_describe(error)}")
    if not all(_same_numbers(group_options(both.group), group_options(one.group)) for one in single):
        return OptimizerProbe("its groups hold numbers that depend on all parameters")
    for key, value in both.state.items():
        if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in pytree.tree_leaves(value)):
            return OptimizerProbe(f"its state holds {key!r}, a {type(value).__name__}")
    changes_groups = both.group_before != repr(group_options(both.group))
    elementwise = frozenset(
        key
        for key, value in both.state.items()
        if isinstance(value, Tensor) and value.shape == both.param.shape
    )
    return OptimizerProbe(whole=True, elementwise=elementwise, changes_groups=changes_groups)


def _revealing_grad(step: int, param: Tensor, generator: torch.Generator) -> Tensor:
    """Return the gradient of a trial's step; see the module's docstring."""
    grad = torch.randn(param.shape, generator=generator).to(param.device)
    if step % 4 == 1:
        return grad * 10 ** (6 * torch.rand(param.shape, generator=generator) - 3).to(param.device)
    if step % 4 == 2:
        rows = param / param.norm(dim=1, keepdim=True)
        along = (grad * rows).sum(1, keepdim=True)
        return grad + rows * (_NEARLY_ORTHOGONAL * grad.norm(dim=1, keepdim=True) - along)
    return grad + 1.0


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _same_numbers(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two groups, or states without what is per element, are equal up to rounding."""
    return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())


def _alike(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=_TOLERANCE, atol=0.0)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=_TOLERANCE)
    return type(one) is type(other)


def _compare_states(whole: _Trial, parts: list[_Trial]) -> OptimizerProbe:
    """Sort the entries of a state into those per element and those of the whole parameter."""
    elementwise = {
        key
        for key, value in whole.state.items()
        if isinstance(value, Tensor) and value.shape == whole.param.shape
    }
    for trial in [whole, *parts]:
        for key, value in trial.state.items():
            leaves = pytree.tree_leaves(value)
            if not isinstance(value, Tensor) and not all(isinstance(leaf, _PLAIN) for leaf in leaves):
                return OptimizerProbe(f"its state holds {key!r}, a {type(value).__name__}")
            if key in elementwise and value.shape != trial.param.shape:
                return OptimizerProbe(f"{key!r} of its state has the parameter's shape only sometimes")
    rest, *others = (
        {key: value for key, value in trial.state.items() if key not in elementwise}
        for trial in [whole, *parts]
    )
    for other in others:
        for key in rest.keys() | other.keys():
            if not (key in rest and key in other and _alike(rest[key], other[key])):
                return OptimizerProbe(f"{key!r} of its state depends on all elements")
    shapes = {key: tuple(value.shape) for key, value in rest.items() if isinstance(value, Tensor)}
    changes_groups = whole.group_before != repr(group_options(whole.group))
    return OptimizerProbe(
        elementwise=frozenset(elementwise), changes_groups=changes_groups, whole_shapes=shapes
    )
