"""Options of PyTorch's FSDP2 that `full-shard` passes through, checked before anything is sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from paceline.errors import UsageError, unknown
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.strategy import Sync

__all__ = ["FSDPOptions", "check_gathers"]


@dataclass(frozen=True)
class FSDPOptions:
    """Options of ``fully_shard``.

    Attributes:
        reshard_after_forward: whether units free their gathered parameters after forward and gather them again in
            backward; a number: keep them sharded over groups of that many ranks; None: torch's default, all but the
            root.
        offload_policy: where shards and their optimizer state are; ``CPUOffloadPolicy()``: in the memory of the host.
        forward_prefetch: number of units to gather ahead in forward; 0: none.
        backward_prefetch: number of units to gather ahead in backward; 0: as torch decides, which is one.
        output_dtype: dtype of the model's outputs; None: as computed.
        cast_forward_inputs: cast inputs of units to the dtype in which they are gathered.
    """

    reshard_after_forward: bool | int | None = None
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, comm: Comm) -> FSDPOptions:
        """Return the options of a program.

        Args:
            options: by name; None: torch's defaults.
            comm: the ranks.

        Raises:
            UsageError: there is no option of a name, or a value is not valid; names it and the nearest valid one.
        """
        given, names = dict(options or {}), [each.name for each in fields(cls)]
        for name in given:
            if name not in names:
                raise unknown("fsdp_options key", name, names)
        made = cls(**given)
        made._check(comm)
        return made

    def _check(self, comm: Comm) -> None:
        for name in ("forward_prefetch", "backward_prefetch"):
            number = getattr(self, name)
            if type(number) is not int or number < 0:
                raise _refusal(name, number, "pass a number of units, 0 or more")
        if type(self.cast_forward_inputs) is not bool:
            raise _refusal("cast_forward_inputs", self.cast_forward_inputs, "pass True or False")
        if not isinstance(self.offload_policy, OffloadPolicy):
            policies = "torch.distributed.fsdp.CPUOffloadPolicy() or OffloadPolicy()"
            raise _refusal("offload_policy", self.offload_policy, f"pass {policies}")
        pinned = isinstance(self.offload_policy, CPUOffloadPolicy) and self.offload_policy.pin_memory
        if pinned and not torch.accelerator.is_available():
            remedy = "without an accelerator pass CPUOffloadPolicy(pin_memory=False)"
            raise _refusal("offload_policy", self.offload_policy, remedy)
        dtype = self.output_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise _refusal(
                "output_dtype", dtype, "pass a floating-point dtype such as torch.float32, or None"
            )
        self._check_reshard(comm)

    def _check_reshard(self, comm: Comm) -> None:
        """Raise for groups of ranks that torch can't make: it makes them on all ranks of the world."""
        ranks = self.reshard_after_forward
        if ranks is None or isinstance(ranks, bool) or (type(ranks) is int and comm.size == 1):
            return
        sizes = [size for size in range(2, comm.shards) if comm.shards % size == 0]
        if type(ranks) is not int or ranks not in [1, *sizes, comm.shards]:
            valid = ["True", "False", *map(str, sizes)]
            raise _refusal(
                "reshard_after_forward",
                ranks,
                f"with {comm.shards} shards pass {', '.join(valid[:-1])} or {valid[-1]}",
            )
        if ranks in sizes and comm.group is not None and comm.size < dist.get_world_size():
            raise _refusal(
                "reshard_after_forward",
                ranks,
                "pass True or False: torch makes groups of that many ranks only if all ranks of the world train",
            )

    def policy(
        self, gather_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
    ) -> MixedPrecisionPolicy:
        """Return torch's policy of dtypes."""
        return MixedPrecisionPolicy(
            param_dtype=gather_dtype,
            reduce_dtype=reduce_dtype,
            output_dtype=self.output_dtype,
            cast_forward_inputs=self.cast_forward_inputs,
        )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``fully_shard``, without the policy of dtypes."""
        return {
            "reshard_after_forward": self.reshard_after_forward,
            "offload_policy": self.offload_policy,
        }

    def set_prefetch(self, root: FSDPModule, units: Sequence[FSDPModule]) -> None:
        """Set which units are gathered ahead of each; `units` in the order in which forward runs them."""
        _look_ahead([root, *units], self.forward_prefetch, FSDPModule.set_modules_to_forward_prefetch)
        backward = [root, *reversed(units)]
        _look_ahead(backward, self.backward_prefetch, FSDPModule.set_modules_to_backward_prefetch)


def _look_ahead(
    modules: Sequence[FSDPModule], count: int, set_next: Callable[[FSDPModule, list[FSDPModule]], None]
) -> None:
    for place, module in enumerate(modules if count else []):
        set_next(module, list(modules[place + 1 : place + 1 + count]))


def _refusal(name: str, value: object, remedy: str) -> UsageError:
    return UsageError(f"fsdp_options: {name}={value!r}", remedy=remedy)


def check_gathers(
    plan: Sync, sync: object, gather_dtype: torch.dtype | None, fsdp_options: Mapping[str, Any] | None
) -> None:
    """Raise for options of full-shard with another strategy."""
    if plan.shard == "parameters":
        return
    if gather_dtype is not None:
        raise UsageError(
            f"gather_dtype={gather_dtype} with {sync!r}, which gathers no parameters",
            remedy='use sync="full-shard", or autocast',
        )
    if fsdp_options is not None:
        raise UsageError(
            f"fsdp_options={dict(fsdp_options)!r} with {sync!r}, which does not use FSDP2",
            remedy='use sync="full-shard", or leave them out',
        )
