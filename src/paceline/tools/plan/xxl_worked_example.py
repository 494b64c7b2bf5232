"""The XXL model worked out: every figure with its derivation and the mistakes that are usual (pure).

126 blocks of two linear layers, 16384 → 53248 → 16384, nothing else: the problem "communication accounting" of Stanford
CS336 (spring 2025, assignment 2), in the notation of Austin et al., How to Scale Your Model (2025), "Training".
Activations and messages are bfloat16; master weights, accumulated gradients and Adam's states are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.tools.plan.communication_roofline import fsdp_tp_tokens
from paceline.tools.plan.devices_needed import ModelStates, device_nbytes, devices_needed

__all__ = ["BLOCKS", "D_FF", "D_MODEL", "PARAMETERS", "TOKEN_NBYTES", "DerivedFigure", "derive_figures"]


@dataclass(frozen=True, kw_only=True)
class DerivedFigure:
    """A figure with its derivation.

    Attributes:
        key: name in JSON, with its unit, such as ``"devices"`` or ``"state_nbytes"``.
        what: description.
        formula: with numbers.
        value: the result.
        shown: the result as text, with its unit.
        why: reason for the formula; empty if it is obvious.
        wrong: a usual mistake, and its result; empty if there is none.
    """

    key: str
    what: str
    formula: str
    value: float
    shown: str
    why: str = ""
    wrong: str = ""


D_MODEL, D_FF, BLOCKS = 16384, 53248, 126
PARAMETERS = 2 * BLOCKS * D_MODEL * D_FF
TOKEN_NBYTES = 2 * BLOCKS * (D_MODEL + D_FF)
"""A of one token: the input of each linear layer, in 2 bytes."""
GPU_NBYTES, TPU_NBYTES = 80e9, 95e9
FLOPS, WIRE = 4.6e14, 2 * 9e10
"""C and W of a TPU v5p as the problem gives them: 459 TFLOP/s rounded, two directions of 9e10 B/s along an axis."""
_X, _Y, _MX, _MY = 16, 4, 2, 1
_SHARED = 0.5


def derive_figures() -> tuple[DerivedFigure, ...]:
    """Return all figures, in the order of derivation.

    Example:
        >>> {each.key: round(each.value) for each in derive_figures()}["devices_95_1024"]
        41
    """
    return (*_sizes(), *_devices(), *_compute_bound())


def _sizes() -> tuple[DerivedFigure, ...]:
    states = 16 * PARAMETERS
    return (
        DerivedFigure(
            key="parameters",
            what="parameters",
            formula="N = 2 · 126 · 16384 · 53248",
            value=PARAMETERS,
            shown=f"{PARAMETERS / 1e9:.2f} G",
            why="two matrices of d_model × d_ff in each block, no biases",
        ),
        _bytes("weights_nbytes", "master weights, float32", "4 · N", 4 * PARAMETERS),
        _bytes("gradients_nbytes", "accumulated gradients, float32", "4 · N", 4 * PARAMETERS),
        _bytes("adam_nbytes", "Adam's two moments, float32", "8 · N", 8 * PARAMETERS),
        DerivedFigure(
            key="state_nbytes",
            what="all states",
            formula="16 · N",
            value=states,
            shown=_both(states),
            why="all of them persist from step to step",
            wrong="3276 GiB / 80 GB = 41 mixes units; 80 GB and 3518 GB are decimal. Only where the driver shows "
            "80 GiB (85.9 GB) do 41 do.",
        ),
        DerivedFigure(
            key="devices_80",
            what="devices of 80 GB for the states alone",
            formula=f"⌈{states / 1e9:,.1f} / 80⌉ = ⌈{states / GPU_NBYTES:.2f}⌉",
            value=devices_needed(ModelStates(states), 0.0, GPU_NBYTES) or 0,
            shown=f"{devices_needed(ModelStates(states), 0.0, GPU_NBYTES)}",
            why="which leaves no memory for activations",
        ),
        DerivedFigure(
            key="token_nbytes",
            what="activations of a token, bfloat16",
            formula="A₁ = 2 B · 126 · (16384 + 53248)",
            value=TOKEN_NBYTES,
            shown=f"{TOKEN_NBYTES:,} B",
            why="backward needs the input of each linear layer: d_model of the first, d_ff of the second",
            wrong="17,543,808 appears elsewhere. It is not a multiple of 2 · 126 = 252, so no pair of widths gives it.",
        ),
    )


def _devices() -> tuple[DerivedFigure, ...]:
    states, found = ModelStates(16.0 * PARAMETERS), []
    for memory, tokens in (*((TPU_NBYTES, each) for each in (0, 1024, 4096)), (GPU_NBYTES, 1024)):
        activations = float(tokens * TOKEN_NBYTES)
        count = devices_needed(states, activations, memory, _SHARED)
        half = activations / 2e9
        assert count is not None
        held = device_nbytes(states, activations, count, _SHARED) / 1e9
        everything = devices_needed(states, activations, memory, 1.0) or 0
        wrong = ""
        if everything != count:
            real = device_nbytes(states, activations, everything, _SHARED) / 1e9
            wrong = (
                f"(16·N + A)/n, all of A divided by n, gives {everything} devices, and each would hold "
                f"{real:.1f} GB: the half of A that is not divided is on every device, whatever n is."
            )
        found.append(
            DerivedFigure(
                key=f"devices_{memory / 1e9:.0f}_{tokens}",
                what=f"devices of {memory / 1e9:.0f} GB, {tokens} tokens" if tokens else
                f"devices of {memory / 1e9:.0f} GB, few tokens (A → 0)",
                formula=f"n ≥ (16·N + A/2)/(M − A/2) = ({states.shared / 1e9:,.1f} + {half:.2f})/"
                f"({memory / 1e9:.0f} − {half:.2f}) = {(states.shared / 1e9 + half) / (memory / 1e9 - half):.2f}",
                value=count,
                shown=f"{count} ({held:.1f} GB each)",
                why="m = (16·N + A/2)/n + A/2: n devices divide the states and every second layer's activations, "
                "and each keeps the other half of its own",
                wrong=wrong,
            )
        )  # fmt: skip
    return tuple(found)


def _compute_bound() -> tuple[DerivedFigure, ...]:
    alpha = FLOPS / WIRE
    added = fsdp_tp_tokens(alpha, D_FF, _Y, _MX, _MY)
    overlapped = fsdp_tp_tokens(alpha, D_FF, _Y, _MX, _MY, overlap=True)
    return (
        DerivedFigure(
            key="intensity",
            what="FLOP per byte sent",
            formula="α = C/W = 4.6e14 / (2 · 9e10)",
            value=alpha,
            shown=f"{alpha:,.0f} FLOP/B",
            why="the time to compute b tokens and the time to send weights are equal at b = α on one axis",
        ),
        DerivedFigure(
            key="tokens_added",
            what="tokens of an FSDP shard from which forward is compute-bound, FSDP and TP one after another",
            formula=f"b = B/X ≥ (α/Mx)/(1 − Y·α/(F·My)) = {added.formula}",
            value=added.tokens,
            shown=f"{added.tokens:,.0f} tokens",
            why="a block computes 4·b·D·F/(Y·C), gathers 4·D·F/(Y·W·Mx) of weights and exchanges 4·b·D/(W·My) of "
            "activations; b is where the first equals the sum of the others",
            wrong=f"counting four micro-batches of {added.tokens / 4:,.0f} tokens as {added.tokens:,.0f}. FSDP gathers "
            "the weights in each of them, so each must be large enough. Only under DDP do tokens of a step add up.",
        ),
        DerivedFigure(
            key="tokens_overlapped",
            what="the same, FSDP and TP at the same time",
            formula=f"b ≥ α/Mx = {overlapped.formula}, while Y·α/(F·My) = {_Y * alpha / (D_FF * _MY):.3f} ≤ 1",
            value=overlapped.tokens,
            shown=f"{overlapped.tokens:,.0f} tokens",
            why="they use separate axes, so the longer one decides",
        ),
        _whole(added.tokens, "one after another"),
        _whole(overlapped.tokens, "at the same time"),
        DerivedFigure(
            key="tokens_device",
            what="tokens of each chip, one after another",
            formula=f"{added.tokens:,.0f} / Y = {added.tokens:,.0f} / {_Y}",
            value=added.tokens / _Y,
            shown=f"{added.tokens / _Y:,.0f} tokens",
            why="Y chips work on the same tokens",
            wrong="b is per FSDP shard (B/X). Read as per chip, the batch would come out Y = 4 times too large.",
        ),
    )  # fmt: skip


def _whole(tokens: float, how: str) -> DerivedFigure:
    return DerivedFigure(
        key=f"tokens_global_{how.split()[0]}",
        what=f"global batch, {how}",
        formula=f"X · {tokens:,.0f} = {_X} · {tokens:,.0f}",
        value=_X * tokens,
        shown=f"{_X * tokens / 1e3:.1f} k tokens",
    )


def _bytes(key: str, what: str, formula: str, nbytes: float) -> DerivedFigure:
    return DerivedFigure(key=key, what=what, formula=formula, value=nbytes, shown=_both(nbytes))


def _both(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.0f} GB ({nbytes / 2**30:,.0f} GiB)"
