"""A profile of a step whose parts are round numbers, so that predictions can be worked out by hand."""

from __future__ import annotations

from paceline.cost_model.fit_measurements import MeasuredPoint, fit_points
from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import Contention, ExchangeCost, ModelStep, Parameter, Source

SOURCE = Source(
    "paceline bench parts --profile profile.json", "2026-01-02T03:04:05+00:00", {"cpu": "a"}, {"torch": "2"}
)
MIB = 1 << 20
CALL, RATE = 1e-3, 100 * MIB
"""Seconds per call, and bytes per second."""


def seconds(op, nbytes, call=CALL):
    """Return the exact price: an all-reduce takes twice as long per byte as the others."""
    return call + nbytes * (2 if op == "all-reduce" else 1) / (2 * RATE)


def exchange(op, queued, caller="paceline", backend="gloo", network="lab", ranks=(2,), call=CALL):
    points = tuple(
        MeasuredPoint(1024 * 4**step, p, seconds(op, 1024 * 4**step, call))
        for p in ranks
        for step in range(8)
    )
    fit = fit_points(points, op, per_ranks=False)
    return ExchangeCost(caller, backend, network, queued, fit=fit, points=points, source=SOURCE)


def contention(
    op, caller="paceline", backend="gloo", network="lab", ranks=2, launch=0.0, computing=1.0, calls=1.0
):
    return Contention(
        caller=caller,
        backend=backend,
        network=network,
        op=op,
        device="cpu",
        ranks=ranks,
        threads=1,
        nbytes=MIB,
        launch_seconds=launch,
        computing_slows=computing,
        calls_slow=calls,
        source=SOURCE,
    )


def model(ranks=2, batch=4, name="net", parameters=None, shape="context 8"):
    """Return a model of 10 parameters of 1 MiB, ready every 0.1 s of a backward of 1 s; forward takes 0.5 s."""
    parameters = parameters or tuple(
        Parameter(f"layers.{9 - at}.weight", MIB, 0.1 * (at + 1), "cpu float32", at // 5) for at in range(10)
    )
    return ModelStep(
        model=name,
        fingerprint="0123456789ab",
        batch=batch,
        shape=shape,
        device="cpu",
        backend="gloo",
        ranks=ranks,
        threads=1,
        forward=0.5,
        backward=0.9,
        buffered=1.0,
        optimizer=0.2,
        update_call=0.001,
        update_byte=0.02 / MIB,
        spread=0.1,
        parameters=parameters,
        source=SOURCE,
    )


OPS = ("all-reduce", "reduce-scatter", "all-gather")


def profile(call=CALL, models=None, **contended):
    """Return the profile; `contended` is passed to every contention."""
    return Profile(
        exchanges=(
            *(exchange(op, queued, call=call) for op in OPS for queued in (False, True)),
            *(exchange("all-reduce", queued, "torch", call=call) for queued in (False, True)),
        ),
        models=models or (model(),),
        contentions=(
            *(contention(op, **contended) for op in OPS),
            contention("all-reduce", "torch", **contended),
        ),
    )
