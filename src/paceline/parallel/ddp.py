"""`DistributedDataParallel`: torch's class, with its whole surface, over Paceline's engine.

torch's own class is the base, so ``isinstance`` checks of libraries hold, and everything that is not the reduction of
gradients (buffers, moving inputs to devices, delayed parameters, pickling, the join context) is torch's code. Its C++
reducer is replaced by the engine (`paceline.parallel.engine`), which closes every backward with a round status and
guards ``optimizer.step()``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import distributed as torch_ddp

from paceline._core.step_state import step_state
from paceline._core.units import MIB
from paceline.errors import UsageError
from paceline.parallel.ddp_reducer import DDPLogger, DDPReducer
from paceline.parallel.engine import unsynchronised_step_guard
from paceline.parallel.engine.launch_queue import SyncTimings
from paceline.parallel.engine.model_checks import model_signature
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.strategy import Sync
from paceline.testing import fault_injection
from paceline.world.control_collectives import verify_same

__all__ = ["DistributedDataParallel", "install", "uninstall"]

_log = logging.getLogger("paceline.parallel")

_TORCH_CLASS = torch_ddp.DistributedDataParallel

_BF16_HOOKS = ("bf16_compress_hook", "bf16_compress_wrapper_hook")
"""Hooks that torch refuses on CPUs, where gloo and "paceline" reduce bfloat16."""

_WITHOUT_EFFECT = {
    "find_unused_parameters": "parameters without a gradient are found without a search of the graph",
    "static_graph": "the order of gradients and re-entrant backwards are learnt anyway",
    "skip_all_reduce_unused_params": "unused parameters are reduced with their bucket",
    "bucket_cap_mb_list": "buckets grow to one size, bucket_cap_mb",
    "batched_grad_copy": "gradients are computed in their bucket and never copied",
    "check_reduction": "every backward is checked",
}
_logged: set[str] = set()


class DistributedDataParallel(_TORCH_CLASS):
    """torch's DistributedDataParallel, whose gradients Paceline's engine reduces.

    A program changes its import line alone::

        from paceline import DistributedDataParallel as DDP

    What differs from torch's class:

    - ``optimizer.step()`` can't use gradients of one rank: they are synchronised first, or the step raises.
    - A backward that raises on one rank raises `BackwardFailed` on the others instead of hanging them.
    - Ranks whose models or options differ are named when the model is wrapped.
    - Every backward is synchronised, also a second one after the same forward.
    - Gradients are always views into buckets, as with ``gradient_as_bucket_view=True``; but those that the program
      holds after ``zero_grad()`` are not overwritten.
    - Parameters without a gradient and re-entrant backwards need no option. Without ``find_unused_parameters=True`` or
      ``static_graph=True`` an unused parameter is still an error of the next forward, as in torch, on all ranks.

    Args:
        module: the model, on its device.
        device_ids: the GPU of the model, as a list; None: the model's. Without any accelerator it is ignored.
        output_device: as in torch: has no effect with one device.
        dim: as in torch.
        broadcast_buffers: copy rank 0's buffers to all ranks when the model is wrapped and before every forward; None:
            yes. torch 2.13 deprecates it in favour of `forward_sync_buffers`.
        init_sync: verify that all ranks hold the same model and copy rank 0's parameters and buffers.
        process_group: the ranks; None: all.
        bucket_cap_mb: bucket size in MiB; None: 25. Several buckets grow to that: 1 MiB, then twice as much each.
        find_unused_parameters: parameters may stay without a gradient.
        check_reduction: has no effect, as in torch.
        gradient_as_bucket_view: always so.
        static_graph: the same parameters get gradients in every step, possibly not all.
        delay_all_reduce_named_params: (name, parameter) pairs that are all-reduced together, once the gradient of
            `param_to_hook_all_reduce` is ready.
        param_to_hook_all_reduce: see there.
        mixed_precision: refused: it is private to torch. Use autocast, or `paceline.DataParallel` with `reduce_dtype`.
        device_mesh: a one-dimensional mesh instead of `process_group`.
        skip_all_reduce_unused_params: accepted; unused parameters are reduced with their bucket.
        bucket_cap_mb_list: accepted; buckets grow to one size.
        batched_grad_copy: accepted; gradients are never copied.
        forward_sync_buffers: copy rank 0's buffers before every forward; None: yes.

    Raises:
        UsageError: `mixed_precision` is given.
        MismatchError: ranks hold different models or options; names the first difference and the ranks.
        RuntimeError: no parameter requires a gradient, parameters' shapes differ between ranks, or there is no process
            group.
        ValueError: arguments contradict each other.

    Source: ``torch.nn.parallel.DistributedDataParallel``, torch 2.13.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> model = DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> model(torch.ones(8, 4)).sum().backward()
        >>> dist.destroy_process_group()
    """

    reducer: DDPReducer
    logger: Any

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        if mixed_precision is not None:
            raise UsageError(
                f"DistributedDataParallel(mixed_precision={mixed_precision!r})",
                remedy="use torch.autocast, or paceline.DataParallel with reduce_dtype=",
            )
        if not torch.accelerator.is_available() and (device_ids or output_device is not None):
            _log_once("device_ids", f"device_ids={device_ids} has no effect: this machine has no accelerator")
            device_ids = output_device = None
        given = {
            "device_ids": device_ids,
            "output_device": output_device,
            "dim": dim or None,
            "broadcast_buffers": broadcast_buffers,
            "init_sync": None if init_sync else False,
            "process_group": process_group,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters or None,
            "check_reduction": check_reduction or None,
            "gradient_as_bucket_view": gradient_as_bucket_view or None,
            "static_graph": static_graph or None,
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "device_mesh": device_mesh,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params or None,
            "bucket_cap_mb_list": bucket_cap_mb_list,
            "batched_grad_copy": batched_grad_copy or None,
            "forward_sync_buffers": forward_sync_buffers,
        }
        passed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        for name in passed.keys() & _WITHOUT_EFFECT.keys():
            _log_once(name, f"{name}={passed[name]!r} has no effect here: {_WITHOUT_EFFECT[name]}")
        self._verifies = self._starts_equal = init_sync
        # Options at their defaults are left out: older versions of torch don't know all of them.
        super().__init__(module, **passed)

    # ------------------------------------------------------------------ the engine

    def _ddp_init_helper(
        self,
        parameters: list[torch.nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Build the engine where torch builds its reducer."""
        fault_injection.arm_from_environment()
        # compiled autograd would reduce gradients by itself, a second time
        self._use_python_reducer = False
        self._passing_sync_batchnorm_handle(self.module)
        comm = Comm(self.process_group)
        plan = Sync(bucket_mib=self.bucket_bytes_cap / MIB)
        if self._verifies:
            verify_same(
                model_signature(self.module, f"DistributedDataParallel, {plan}", self.parameters_to_ignore),
                "the model",
                comm.group,
                remedy="build the same model, in the same order and with the same options, on every rank",
            )
            self._verifies = False
        name_of = {id(param): name for name, param in self.module.named_parameters()}
        named = [(name_of[id(param)], param) for param in parameters]
        dense = [pair for pair, sparse in zip(named, expect_sparse_gradient, strict=True) if not sparse]
        sparse = [pair for pair, sparse in zip(named, expect_sparse_gradient, strict=True) if sparse]
        frozen = [
            (name, param)
            for name, param in self.module.named_parameters()
            if not param.requires_grad and name not in self.parameters_to_ignore
        ]
        self.engine = Reducer(dense, comm, plan, None, frozen, self.module, sparse)
        self.engine.follows_torch = True
        self.engine.ignore(self.parameters_to_ignore)
        if not self._starts_equal:
            self.engine.replica_check_every = 0
        unsynchronised_step_guard.register_engine(self.engine)
        self.reducer = DDPReducer(
            self.engine,
            named,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=static_graph or self.static_graph,
        )
        self.logger = DDPLogger(self.reducer, self.engine, parameters)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            {
                "find_unused_parameters": int(self.find_unused_parameters),
                "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
                "static_graph": int(static_graph),
            },
        )

    @property
    def comm(self) -> Comm:
        """The ranks."""
        return self.engine.comm

    @property
    def plan(self) -> Sync:
        """How gradients are synchronised."""
        return self.engine.plan

    @property
    def timings(self) -> SyncTimings:
        """The cost of the latest synchronised backward and the step after it, on this rank."""
        return self.engine.timings

    # ------------------------------------------------------------------ forward

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self._delay_all_reduce_all_params:
            self._begin_forward()
        return super()._pre_forward(*inputs, **kwargs)

    @torch.compiler.disable()
    def _begin_forward(self) -> None:
        if self.engine.retired:  # another wrapper of the module synchronises its gradients
            return
        self.engine.recover()
        step_state.begin_phase(self.engine.step, "forward")
        if fault_injection.armed:
            fault_injection.begin_step(self.engine.step)
        self.engine.before_forward((), {})

    def _post_forward(self, output: Any) -> Any:
        if self._delay_all_reduce_all_params:
            return super()._post_forward(output)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self._end_forward(output)
        self._clear_grad_buffer()
        return output

    @torch.compiler.disable()
    def _end_forward(self, output: Any) -> None:
        """Detect on the outputs when backward begins; as in torch, the latest forward decides if it synchronises."""
        step_state.enter_phase("outside")
        self.reducer.forward_done()
        learns = torch.is_grad_enabled()
        self.require_forward_param_sync = learns and self.require_backward_grad_sync
        if not learns:
            return
        if self.engine.retired:
            return
        self.engine.sync_enabled = self.require_backward_grad_sync
        for tensor in torch_ddp._find_tensors(output):
            if tensor.grad_fn is not None:  # a hook on a leaf would stay
                tensor.register_hook(self._backward_reached)

    def _backward_reached(self, _grad: torch.Tensor) -> None:
        self.engine.backward_reached(None)
        self.reducer.backward_reached()

    def _delayed_all_reduce_hook(self, grad: torch.Tensor) -> torch.Tensor:
        """Reduce the delayed gradients by the end of this backward; torch does not wait for them on CPUs."""
        buffer = self._delay_grad_buffer
        assert buffer is not None, "there are delayed parameters"
        buffer.div_(dist.get_world_size(self.process_group))
        work = dist.all_reduce(buffer, group=self.process_group, async_op=True)

        def wait() -> None:
            if work is not None:
                work.wait()

        torch.autograd.Variable._execution_engine.queue_callback(wait)
        return grad

    # ------------------------------------------------------------------ communication hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce every bucket by ``hook(state, bucket)`` instead of an all-reduce, once per bucket and backward.

        The hooks of ``torch.distributed.algorithms.ddp_comm_hooks`` work, as does any other for torch's class. In a
        world of one rank it is not called.

        Args:
            state: passed to the hook.
            hook: returns a future of the mean over ranks; `bucket` has the methods of ``torch.distributed.GradBucket``.

        Raises:
            TypeError: `hook` is not callable.
            ValueError: its annotations are wrong.
            SyncError: a hook is registered already.
        """
        self._check_comm_hook(hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self.engine.register_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        if getattr(hook, "__name__", "") not in _BF16_HOOKS:
            super()._check_comm_hook(hook)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        half = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        self.logger._set_comm_hook_name(str(comm_hook_type))
        hook = default_hooks.fp16_compress_hook if half else default_hooks.allreduce_hook
        self.engine.register_comm_hook(self.process_group, hook)

    # ------------------------------------------------------------------ joining, pickling, other groups

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Take part in the other ranks' round without a batch."""
        self.engine.run_joined_round()

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        super()._sync_final_model(is_last_joiner)
        if not is_last_joiner:
            self.engine.drop()

    def _match_unused_params_allreduce(self) -> None:
        """Do nothing: the round status reports which parameters were used."""

    def __getstate__(self) -> Any:
        attributes: Any = super().__getstate__()
        del attributes["engine"]
        return attributes

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._register_comm_hooks_again()

    def _register_comm_hooks_again(self) -> None:
        for hook, state in self._comm_hooks:
            self.engine.register_comm_hook(state, hook)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Reduce over another group from now on; its members call this."""
        if not dist.distributed_c10d._rank_not_in_group(new_process_group):
            self.process_group = new_process_group
            self.engine.remove_hooks()
            parameters, sparse = self._build_params_for_reducer()
            self._ddp_init_helper(parameters, sparse, {}, self.static_graph)
            self._register_comm_hooks_again()


def _log_once(key: str, message: str) -> None:
    if key not in _logged:
        _logged.add(key)
        _log.info(message)


def install() -> None:
    """Put `DistributedDataParallel` in the place of torch's class, for programs that can't be edited.

    ``torch.nn.parallel.DistributedDataParallel`` and the name in its module are replaced; call this before the
    program's own imports. A name that another module has imported before remains torch's.
    """
    for owner in (torch.nn.parallel, torch_ddp):
        owner.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]


def uninstall() -> None:
    """Undo `install`."""
    for owner in (torch.nn.parallel, torch_ddp):
        owner.DistributedDataParallel = _TORCH_CLASS  # type: ignore[misc]
