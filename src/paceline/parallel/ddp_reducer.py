"""Stand-ins for the C++ ``Reducer`` and ``Logger`` behind torch's DistributedDataParallel, over our engine.

torch's class, and programs that look behind it, call methods of ``ddp.reducer`` and ``ddp.logger``. Here these read the
engine's state, or do nothing where the engine has nothing to do (buckets are rebuilt, and gradients arrive, without
being called for).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline.cost_model.bucket_assignment import plan_buckets
from paceline.errors import SyncError
from paceline.parallel.comm_hook import GradBucket
from paceline.parallel.engine.launch_queue import RoundMoments
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.engine.round_status import Status
from paceline.parallel.gradient_collectives import Comm

__all__ = ["DDPLogger", "DDPReducer"]

_FIRST_SAMPLED = 10
"""So many iterations have their times logged, and then one in `DDPReducer.sample_rate`, as in torch."""

_SAMPLE_RATE = 100


class DDPReducer:
    """The methods of torch's ``Reducer`` that its DistributedDataParallel calls.

    Args:
        engine: reduces the gradients.
        parameters: the trainable parameters with their names, in torch's order.
        find_unused_parameters: parameters may stay without a gradient.
        static_graph: the same.

    Attributes:
        iterations: forwards that a synchronised backward follows.
        sample_rate: see `_FIRST_SAMPLED`.
        log_error: records the text of an error.
    """

    def __init__(
        self,
        engine: Reducer,
        parameters: list[tuple[str, torch.nn.Parameter]],
        *,
        find_unused_parameters: bool,
        static_graph: bool,
    ) -> None:
        self._engine, self._parameters = engine, parameters
        self._may_stay_unused = find_unused_parameters or static_graph
        engine.usage_varies |= find_unused_parameters
        self.iterations = 0
        self.sample_rate = _SAMPLE_RATE
        self.log_error: Callable[[str], None] = lambda text: None
        self._graph_changed = False
        self._flags: tuple[float, ...] | None = None
        self._rebuilt = False
        self._joining: dist.Work | None = None
        self._futures: list[torch.futures.Future[Any]] = []

    # ------------------------------------------------------------------ forward

    def prepare_for_forward(self) -> None:
        """Begin an iteration.

        Raises:
            SyncError: a parameter got no gradient in the previous one, and `find_unused_parameters` is not set.
        """
        self.iterations += 1
        self._ddp_graph_static()
        summary = self._engine.summary
        if summary is None or self._may_stay_unused or Status.JOINED in summary.status:
            return
        # As in torch, a backward that used no parameter at all is no mistake: a GAN's through a frozen discriminator.
        flags = summary.flags
        if flags and int(min(flags) + 0.25) < self._engine.comm.size and int(max(flags) + 0.25) > 0:
            raise self._refuse(self._unused_error())

    def _refuse(self, error: SyncError) -> SyncError:
        self.log_error(str(error))
        return error

    def _unused_error(self) -> SyncError:
        rank = self._engine.comm.rank
        place = {id(param): at for at, (_, param) in enumerate(self._parameters)}
        unused = sorted(place[id(slot.param)] for slot in self._engine.slots if not slot.fired)
        found = f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, unused))}"
        if dist.get_debug_level() != dist.DebugLevel.OFF:
            names = ", ".join(self._parameters[at][0] for at in reversed(unused))
            found += f"\nParameters which did not receive grad for rank {rank}: {names}"
        else:
            found += (
                "\nIn addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
                "DETAIL to print out information about which particular parameters did not receive gradient on "
                "this rank as part of this error"
            )
        return SyncError(
            "Expected to have finished reduction in the prior iteration before starting a new one. A parameter got "
            "no gradient on at least one rank. You can enable unused parameter detection by passing the keyword "
            "argument `find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by making "
            "sure all `forward` function outputs participate in calculating loss.\n" + found,
            rank=rank,
            step=self._engine.step,
            remedy="pass find_unused_parameters=True if that is intended (it costs nothing here)",
        )

    def _rebuild_buckets(self) -> bool:
        """Return True once, when the buckets have been built."""
        built = self._engine.has_buckets and not self._rebuilt
        self._rebuilt = self._rebuilt or built
        return built

    def _set_forward_pass_work_handle(self, work: dist.Work, divide_by_initial_world_size: bool) -> None:
        """Set how ranks without a batch count, and what shows that all others know of this forward."""
        self._engine.weights.counts_joined = divide_by_initial_world_size
        self._engine.usage_varies = True  # ranks may join in any round
        self._joining = work

    def _install_post_backward_futures(self, futures: list[torch.futures.Future[Any]]) -> None:
        self._futures = list(futures)

    def forward_done(self) -> None:
        """Wait for the join context's message about this forward."""
        if self._joining is not None:
            self._joining.wait()
            self._joining = None

    def backward_reached(self) -> None:
        """Wait for futures of a buffer hook at the end of this backward."""
        if self._futures:
            torch.autograd.Variable._execution_engine.queue_callback(self._await_futures)

    def _await_futures(self) -> None:
        torch.futures.wait_all(self._futures)
        self._futures = []

    # ------------------------------------------------------------------ what it knows

    def _get_local_used_map(self) -> torch.Tensor:
        """Return per parameter on how many ranks it got a gradient, int32, in torch's order."""
        summary, slots = self._engine.summary, self._engine.slots
        users = summary.users if summary is not None else [0] * len(slots)
        count = {id(slot.param): found for slot, found in zip(slots, users, strict=False)}
        return torch.tensor([count.get(id(param), 0) for _, param in self._parameters], dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        """Return whether the same parameters got gradients in all iterations."""
        summary = self._engine.summary
        if summary is not None:
            self._graph_changed |= self._flags not in (None, summary.flags)
            self._flags = summary.flags
        return not self._graph_changed

    def _check_reducer_finalized(self) -> None:
        """Raise if a backward did not end.

        Raises:
            SyncError: an exception ended the latest backward.
        """
        if self._engine.recover():
            raise SyncError(
                "Expected to have finished reduction in the prior iteration: an exception ended the backward",
                rank=self._engine.comm.rank,
                step=self._engine.step,
                remedy="run forward and backward again",
            )

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        group = self._engine.comm.group
        assert group is not None, "DistributedDataParallel has a process group"
        return default_hooks.allreduce_hook(group, bucket)  # type: ignore[arg-type]

    def _remove_autograd_hooks(self) -> None:
        self._engine.remove_hooks()

    # ------------------------------------------------------------------ what the engine does without it

    def _set_static_graph(self) -> None:
        if self._engine.step > 0:
            raise self._refuse(
                SyncError(
                    "_set_static_graph() should be called before training loop starts",
                    rank=self._engine.comm.rank,
                    step=self._engine.step,
                    remedy="pass static_graph=True to DistributedDataParallel",
                )
            )
        self._may_stay_unused = True

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate

    def _push_all_rebuilt_params(self) -> None: ...

    def _set_optimizer_in_backward(self) -> None: ...

    def _reset_state(self) -> None: ...


class DDPLogger:
    """The facts that ``ddp._get_ddp_logging_data()`` returns.

    Args:
        reducer: of the model.
        engine: the same.
        parameters: trainable, in torch's order.
    """

    def __init__(self, reducer: DDPReducer, engine: Reducer, parameters: list[torch.nn.Parameter]) -> None:
        self._reducer, self._engine, self._parameters = reducer, engine, parameters
        self._facts: dict[str, Any] = {"iteration": 0, "has_error": 0, "error": ""}
        self._sums: dict[str, int] = {}
        self._samples = 0
        reducer.log_error = self.set_error_and_log
        self._forward_start = 0.0

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: list[int],
        output_device: int,
        broadcast_buffers: bool,
        options: dict[str, int],
    ) -> None:
        """Record what is known when the model is wrapped; `options` are the arguments of DistributedDataParallel."""
        comm, params = self._engine.comm, self._parameters
        nbytes = [param.nbytes for param in params]
        dtypes = sorted({_cpp_name(param.dtype) for param in params})
        backwards = list(reversed(range(len(params))))
        kinds = [(param.device, param.dtype) for param in params]
        planned = plan_buckets(backwards, nbytes, kinds, self._engine.plan.bucket_caps(sum(nbytes)))
        self._facts.update(
            world_size=comm.size,
            rank=comm.rank,
            backend_name=comm.backend,
            module_name=module_name,
            device_ids=", ".join(map(str, device_ids)),
            output_device=output_device,
            broadcast_buffers=int(broadcast_buffers),
            bucket_cap_bytes=int(self._engine.plan.bucket_nbytes),
            dtypes=", ".join(dtypes),
            total_parameter_size_bytes=sum(nbytes),
            num_parameter_tensors=len(params),
            bucket_sizes=", ".join(str(sum(nbytes[at] for at in members)) for members in planned),
            **options,
            **_environment(comm),
        )

    def set_runtime_stats_and_log(self) -> None:
        """Record the times of the previous iteration, if it is a sampled one."""
        iteration, rate = self._reducer.iterations, self._reducer.sample_rate
        moments = self._engine.launch_queue.moments
        if moments.reduced > 0 and (iteration < _FIRST_SAMPLED or iteration % rate == 0):
            self._record(iteration, moments)
        self._forward_start = time.perf_counter()

    def _record(self, iteration: int, moments: RoundMoments) -> None:
        forward, launched = self._forward_start, moments.launched or moments.computed
        times = {
            "forward_compute_time": moments.began - forward,
            "backward_compute_time": moments.computed - moments.began,
            "backward_comm_time": moments.reduced - launched,
            "backward_compute_comm_overlap_time": max(moments.computed - launched, 0.0),
        }
        self._samples += 1
        for name, seconds in times.items():
            nanoseconds = max(int(seconds * 1e9), 0)
            self._facts[name] = nanoseconds
            self._sums[name] = self._sums.get(name, 0) + nanoseconds
            self._facts[f"avg_{name}"] = self._sums[name] // self._samples
        for name, moment in {
            "forward_compute_time_start": forward,
            "backward_compute_time_start": moments.began,
            "backward_compute_time_end": moments.computed,
            "backward_comm_time_start": launched,
            "backward_comm_time_end": moments.reduced,
        }.items():
            self._facts[name] = int(moment * 1e9)
        self._facts["iteration"] = iteration

    def set_error_and_log(self, message: str) -> None:
        """Record an error."""
        self._facts.update(has_error=1, error=message)

    def _set_static_graph(self) -> None:
        self._facts["static_graph"] = 1

    def _set_uneven_input_join(self) -> None:
        self._facts["join_uneven_inputs"] = 1

    def _set_comm_hook_name(self, name: str) -> None:
        self._facts["comm_hook"] = name

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """Return all facts, texts in ``strs_map`` and numbers in ``ints_map``."""
        facts = {**self._facts, **self._round_facts()}
        return SimpleNamespace(
            strs_map={name: value for name, value in facts.items() if isinstance(value, str)},
            ints_map={name: value for name, value in facts.items() if not isinstance(value, str)},
        )

    def _round_facts(self) -> dict[str, Any]:
        engine = self._engine
        if not engine.has_buckets:
            return {}
        at = {id(param): index for index, param in enumerate(self._parameters)}
        full = [bucket for bucket in engine.buckets if bucket.slots]
        members = [[at[id(slot.param)] for slot in bucket.slots] for bucket in full]
        sizes = [sum(self._parameters[index].nbytes for index in held) for held in members]
        unused = [slot for slot in engine.slots if not slot.used]
        return {
            "has_rebuilt_buckets": 1,
            "rebuilt_bucket_sizes": ", ".join(map(str, sizes)),
            "rebuilt_per_bucket_param_indices": ", ".join(" ".join(map(str, held)) for held in members),
            "prev_iteration_grad_ready_order_indices": ", ".join(str(i) for held in members for i in held),
            "num_buckets_reduced": len(full),
            "unused_parameter_size": sum(slot.param.nbytes for slot in unused),
            "can_set_static_graph": int(self._reducer._ddp_graph_static()),
        }


def _cpp_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return {"float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16"}.get(
        name, name
    )


def _environment(comm: Comm) -> dict[str, str | int]:
    names = ["MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"]
    if comm.backend == "gloo":
        names += ["GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"]
    found: dict[str, str | int] = {name.lower(): os.environ.get(name, "N/A") for name in names}
    if comm.backend == "gloo" and comm.group is not None:
        options = getattr(comm.group._get_backend(torch.device("cpu")), "options", None)
        found["gloo_num_threads"] = getattr(options, "_threads", 0)
    return found
