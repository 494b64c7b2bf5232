"""Mutation test: if a call that orders streams is deleted from the engine, some scene gives other bits or fails."""

from __future__ import annotations

import torch
import torch.distributed as dist

from deleted_waits import find_waits, without
from simulated_worlds import same_bits, world_beside_cpus
from training_scenes import SCENES, Place

NO_EFFECT = {
    "buckets/neighbour_exchange.py: NeighbourExchange.pass_on: PendingCollective(works, held=comm.pending).wait()": (
        "copies are kept on CPUs only"
    ),
    "buckets/neighbour_exchange.py: NeighbourExchange.pass_on: reduced.wait()": "copies are kept on CPUs only",
    "compression/compressed_allreduce.py: AllToAllReduce._reduce: swapping.wait()": "the host reduces there, over gloo",
    "compression/powersgd.py: PowerSGDAllReduce.wait: pending.wait()": "the second sum ends later on the same stream; "
    "over gloo this waits until a thread has launched it",
    "ddp.py: DistributedDataParallel._delayed_all_reduce_hook: work.wait()": "the round status, which is waited for, "
    "follows on the group's stream; gloo has none",
    "ddp_reducer.py: DDPReducer.forward_done: self._joining.wait()": "no rank that sends this message reads it",
    "ddp_reducer.py: DDPReducer._await_futures: torch.futures.wait_all(self._futures)": "torch orders the streams in "
    "C++, where simulated ones are not known",
    "engine/gradient_state.py: GradientState.drop: self.launch_queue.wait_all()": "the next backward waits before it "
    "writes; over gloo, peers may need this rank's messages before the group ends",
    "engine/launch_queue.py: LaunchQueue._free_before: self.wait_for(self.buckets[index])": "frees memory earlier; the "
    "results are waited for later too",
    "engine/launch_queue.py: LaunchQueue.launch_rest: self.wait_for(bucket)": "without overlap, calls are one by one; "
    "the results are waited for later too",
    "engine/parameter_gather.py: ParameterGather.before_forward: self.wait_all()": "no scene has several threads",
    "engine/parameter_gather.py: ParameterGather.finish: self._end.synchronize()": "no scene compiles",
    "engine/parameter_gather.py: ParameterGather.finish: self.wait_all()": "no scene compiles",
    "engine/parameter_gather.py: ParameterGather.leave_in_flight: self.wait_all()": "no scene compiles or scripts",
    "engine/reducer.py: Reducer.begin: self.parameter_gather.wait_all()": "what a backward uses, its forward has "
    "waited for; it bounds how long a gather is in flight",
    "engine/round_closing.py: RoundClosing._keep_late: self._late.keep(slot)": "takes a gradient, orders nothing",
    "virtual_ranks/virtual_reducer.py: VirtualRankReducer.finish: self._partial_sums.keep(self.buckets, "
    "self._leaves[self._done])": "keeps partial sums, orders nothing",
    "engine/sparse_gradients.py: SparseGradients._launch: work.wait()": "NCCL reduces no sparse tensors; over gloo",
    "sharding/copying_update.py: CopyingUpdate._update_with_copy: gather.wait_for(flats)": "copies are kept "
    "on CPUs only",
    "sharding/copying_update.py: CopyingUpdate._update_with_copy: reducer.launch_queue.wait_all()": "copies are kept "
    "on CPUs only",
    "sharding/fsdp.py: _P2PAllGather.__call__: self._comm.all_gather(output_tensor).wait()": "over gloo only",
    "sharding/fsdp.py: _P2PReduceScatter.__call__: self._comm.reduce_scatter(input_tensor, output_tensor).wait()": (
        "over gloo only"
    ),
    "sharding/zero.py: ShardedOptimizer._update_shards: gather.wait_for(flats)": "a second step without a backward, "
    "which changes no parameter",
    "two_axis_collectives.py: TwoAxisComm.reduce_scatter: thread.keep(flat)": "the stream of the second stage "
    "computes with the memory for means of 16-bit floats only; the collectives keep it otherwise",
    "two_axis_collectives.py: _TwoStages.wait: self._launched.wait()": "the second stage ends later on the same "
    "stream; over gloo this waits until a thread has launched it",
    "tuning/tuner.py: _seconds: comm.all_reduce(flat).wait()": "measures time; the numbers are not used",
    "tuning/tuner.py: _seconds: synchronize(device)": "measures time; the numbers are not used",
}
"""Calls whose deletion can't show on an accelerator, and why."""

LIKELY = {
    "buckets/": ["two streams"],
    "comm_hook": ["hook"],
    "AllGatherReduce.wait": ["topk"],
    "AllToAllReduce.wait: pending": ["sharded, int8"],
    "PendingExchange": ["sharded, int8"],
    "two_axis": ["two axes"],
    "compressed_bucket": ["flat, powersgd"],
    "PowerSGDAllReduce._start": ["flat, powersgd"],
    "PowerSGDAllReduce.wait": ["flat, powersgd"],
    "powersgd": ["given up, powersgd"],
    "compression/": ["given up, int8"],
    "deferred_status": ["flat"],
    "late": ["late gradients"],
    "Late": ["late gradients"],
    "_pieces_of": ["sharded, clipped by torch"],
    "local_grads_of": ["GradScaler"],
    "local_grads": ["sharded, accumulated, clipped"],
    "parts_by_name": ["guarded"],
    "FiniteCheck": ["two streams, guarded", "guarded"],
    "Reducer.begin": ["sharded, kept"],
    "_update_shards": ["sharded, in parts"],
    "wait_for_parameters": ["sharded, read unseen"],
    "parameter_gather": ["sharded, averaged beside", "sharded"],
    "_norm_of_blocks": ["virtual ranks, sharded", "virtual ranks"],
    "virtual_ranks/": ["virtual ranks", "virtual ranks, sharded"],
    "engine/": ["bucketed"],
    "gradient_collectives": ["naive"],
    "ModelFragment.state": ["DiLoCo, saved"],
    "local_sgd/": ["local SGD, delayed"],
    "optimizer_resharding": ["sharded, clipped by torch"],
    "sharding/": ["sharded"],
}
"""Scenes that are likely to show a missing call, by a part of its name; the first part that fits."""

HELD_BACK = (1, 0, 2, 3)
"""Streams to hold back, in the order of their use: 0 is the default one, 1 often that of collectives."""

RANDOM = 2
"""Orders of likely scenes after those."""

MISTAKES = (AttributeError, TypeError, NameError, LookupError, ImportError)
"""Exceptions that do not show that a wait is missing, but that a call can't be deleted this way."""


def attempts(wait):
    """Yield scenes with the stream to hold back and a seed; the scenes that are likely for a call in many orders."""
    likely = next((scenes for part, scenes in LIKELY.items() if part in wait.name), [])
    for scene in likely:
        yield from ((scene, stream, 7) for stream in HELD_BACK)
        yield from ((scene, None, seed) for seed in range(RANDOM))
    yield from ((scene, HELD_BACK[0], 7) for scene in SCENES if scene not in likely)


_expected = {}  # by scene, in a rank's process


def shows(place, simulator, host, wait):
    """Return the scene and order that show that a wait is missing, or an empty text."""
    for scene, stream, seed in attempts(wait):
        if scene not in _expected:
            _expected[scene] = SCENES[scene](Place(place.rank, place.size, "cpu", host))
        simulator.restart(seed * place.size + place.rank, hold_back=stream)
        with simulator.keeping_failures() as failures, without(wait):
            found = SCENES[scene](place)
        same = all(map(same_bits, found, _expected[scene]))
        wrong = torch.tensor(bool(failures) or not same, dtype=torch.int32)
        dist.all_reduce(wrong, group=host)
        if wrong:
            return f"{scene}, {'a random order' if stream is None else f'stream {stream} held back'}, seed {seed}"
    return ""


def look_for(rank, size, path, number, waits):
    """Return what shows that each call is missing, until a rank raises: its world can't be used any more."""
    found = []
    try:
        with world_beside_cpus(rank, size, path, number) as simulator:
            host = dist.new_group(backend="gloo")
            place = Place(rank, size, "sim", dist.group.WORLD)
            for wait in waits:
                how = shows(place, simulator, host, wait)
                found.append(how)
    except MISTAKES:
        raise
    except Exception as error:  # noqa: BLE001 — which one depends on what was read
        found.append(f"{type(error).__name__}: {error}".splitlines()[0])
    return found


def test_every_wait_is_needed(simulated_pool, tmp_path):
    waits = find_waits()
    assert NO_EFFECT.keys() <= {wait.name for wait in waits}
    waits, found = [wait for wait in waits if wait.name not in NO_EFFECT], []
    while len(found) < len(waits):
        case = (look_for, str(tmp_path / "store"), len(found), waits[len(found) :])
        found += simulated_pool(2).run(*case, world=False, timeout=100)[0]
    for wait, how in zip(waits, found, strict=True):
        print(f"{wait.name}\n    {how or 'NOTHING SHOWS'}")
    assert [wait.name for wait, how in zip(waits, found, strict=True) if not how] == []
