"""How numbers are compressed before they are sent: :class:`Compression`.

| name       | bytes per number   | method                                          | best for                         |
|------------|-------------------:|-------------------------------------------------|----------------------------------|
| `bf16`     |                  2 | rounds to 8 bits of mantissa                    | a slightly too slow network      |
| `fp16`     |                  2 | rounds to 11 bits, with a scale per block       | the same, somewhat more exact    |
| `int8`     |               1.02 | 255 levels per block of 256                     | gradients, every step            |
| `int4`     |               0.52 | 15 levels per block                             | pseudo-gradients, every H steps  |
| `int2`     |               0.27 | a sign, and one of two magnitudes per block     | the same, on slow links          |
| `topk`     |           4 × keep | sends the largest numbers only (1 % by default) | gradients, in long runs          |
| `topk-int2`|              0.028 | the largest 64 of 4096 numbers, as in `int2`    | pseudo-gradients, very slow links|
| `powersgd` |       4r(n+m) / nm | low-rank product for each n × m matrix          | large matrices, every step       |

What a rank leaves out it adds to what it sends next (error feedback), except with the first two, whose error is so
small that feedback costs more than it gains. Some parameters are exempt, since they are small and matter much: those
with fewer than two dimensions (norms, biases), small ones, and any that are named.

Torch is imported where it is used: a command rejects bad names and values before it loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from paceline.errors import UsageError, unknown

if TYPE_CHECKING:
    import torch

    from paceline.parallel.compression.codecs import Codec

__all__ = ["COMPRESSIONS", "Compression"]

_DEFAULT_FEEDBACK = {
    "bf16": False,
    "fp16": False,
    "int8": True,
    "int4": True,
    "int2": True,
    "topk": True,
    "topk-int2": True,
    "powersgd": True,
}

COMPRESSIONS = tuple(_DEFAULT_FEEDBACK)

_SPARSE_DECAY = 0.95  # of SparseLoCo, arXiv 2508.15706


@dataclass(frozen=True)
class Compression:
    """A way to send numbers in fewer bytes.

    Attributes:
        name: ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"int2"``, ``"topk"``, ``"topk-int2"`` or ``"powersgd"``.
        feedback: use error feedback; None: as in the table above.
        rounding: ``"nearest"``, or ``"stochastic"``: up or down at random, unbiased (bf16, int8, int4).
        block: numbers that share a scale (int8, int4, int2).
        keep: fraction of the numbers that is sent (topk), above 0 and at most 1.
        momentum: of DGC's momentum correction (topk, arXiv 1712.01887 §3.1); the optimizer must then have none.
        rank: of the product (powersgd, arXiv 1905.13727).
        warmup: steps over which `keep` falls from 25 % (topk), or before which nothing is compressed (powersgd).
        exempt: names or patterns (``"*.embedding.*"``) of parameters that are sent uncompressed.
        exempt_below: parameters with fewer numbers are exempt, too, as are all with fewer than two dimensions.
        seed: of stochastic rounding, and of the first factors of powersgd.

    Raises:
        UsageError: a value is out of range, or makes no sense with this name.

    Example:
        >>> Compression.of("int8").feedback
        True
        >>> Compression("topk", keep=0.001, momentum=0.9, warmup=400)
        Compression('topk', keep=0.001, momentum=0.9, warmup=400)
    """

    name: str
    feedback: bool | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"
    block: int = 256
    keep: float = 0.01
    momentum: float = 0.0
    rank: int = 4
    warmup: int = 0
    exempt: tuple[str, ...] = ()
    exempt_below: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in COMPRESSIONS:
            raise unknown("compression", self.name, COMPRESSIONS)
        if self.feedback is None:
            object.__setattr__(self, "feedback", _DEFAULT_FEEDBACK[self.name])
        if self.rounding not in ("nearest", "stochastic"):
            raise unknown("rounding", self.rounding, ["nearest", "stochastic"])
        if self.rounding == "stochastic" and self.name not in ("bf16", "int8", "int4"):
            raise UsageError(
                f"{self.name} has no stochastic rounding", remedy="use it with bf16, int8 or int4"
            )
        if not isinstance(self.keep, int | float) or not 0 < self.keep <= 1:
            raise UsageError(
                f"keep={self.keep!r}", remedy="give the fraction that is sent, above 0 and at most 1"
            )
        if not isinstance(self.momentum, int | float) or not 0 <= self.momentum < 1:
            raise UsageError(
                f"momentum={self.momentum!r}", remedy="give a number from 0 to below 1, such as 0.9"
            )
        if self.momentum and (self.name != "topk" or not self.feedback):
            raise UsageError(
                f"momentum={self.momentum!r} with {self.name}"
                + ("" if self.feedback else ", feedback=False"),
                remedy="use momentum correction with topk, and with feedback",
            )
        for name, least in (("rank", 1), ("warmup", 0), ("exempt_below", 0), ("block", 32)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name}={value!r}", remedy=f"give an integer of {least} or more")
        if self.block % 32:
            raise UsageError(f"block={self.block}", remedy="give a multiple of 32")
        if isinstance(self.exempt, str):  # its letters would be the patterns, and "*" exempts everything
            raise UsageError(f"exempt={self.exempt!r}", remedy=f"give a tuple: exempt=({self.exempt!r},)")

    def __repr__(self) -> str:
        """Return the settings that differ from the defaults of the name."""
        usual = {field.name: field.default for field in fields(self)} | {
            "feedback": _DEFAULT_FEEDBACK[self.name]
        }
        changed = [f"{name}={getattr(self, name)!r}" for name in usual if getattr(self, name) != usual[name]]
        return f"Compression({', '.join([repr(self.name), *changed[1:]])})"

    @classmethod
    def of(cls, compression: str | Compression | None) -> Compression | None:
        """Return the compression of that name; None and a `Compression` are returned unchanged.

        Raises:
            UsageError: an unknown name (the nearest one is suggested), or not a name.
        """
        if compression is None or isinstance(compression, Compression):
            return compression
        return cls(compression)

    def exempts(self, name: str, param: torch.Tensor) -> bool:
        """Return whether a parameter is sent uncompressed."""
        if param.dim() < 2 or param.numel() < self.exempt_below:
            return True
        if self.name == "powersgd":
            from paceline.parallel.compression.powersgd import worth_factoring

            if not worth_factoring(param.shape, self.rank):
                return True
        return any(fnmatchcase(name, pattern) for pattern in self.exempt)

    def check_supported(self, name: str, param: torch.Tensor) -> None:
        """Check that the numbers of a parameter can be compressed.

        Raises:
            UsageError: naming the parameter.
        """
        dtype = str(param.dtype).removeprefix("torch.")
        half = self.name in ("bf16", "fp16")
        if dtype not in (("float32",) if half else ("float32", "bfloat16", "float16")):
            raise UsageError(
                f"{self.name} can't compress parameter {name!r} of {dtype}",
                remedy="compress float32 (except with bf16 and fp16 also bfloat16 and float16), exempt the "
                "parameter by name, or leave compression out",
            )

    @property
    def is_sparse(self) -> bool:
        """Whether packets hold some of the numbers only, so that a sum has other indices than each packet."""
        return self.name in ("topk", "topk-int2")

    @property
    def feedback_decay(self) -> float:
        """Factor of the residual from one round to the next; see `ErrorFeedback`."""
        return _SPARSE_DECAY if self.name == "topk-int2" else 1.0

    def is_low_rank(self, step: int) -> bool:
        """Return whether matrices are sent as products at optimizer step `step`."""
        return self.name == "powersgd" and step >= self.warmup

    def phase(self, step: int) -> float:
        """Return a number that changes with the step exactly when the form of the packets does."""
        if self.name == "topk":
            from paceline.parallel.compression.topk import density_at

            return density_at(step, self.keep, self.warmup)
        return float(self.is_low_rank(step))

    def codec(self, *, rank: int, step: int = 0) -> Codec:
        """Return the codec of `rank` at optimizer step `step`."""
        import torch

        from paceline.parallel.compression.codecs import HalfCodec, IntCodec, RawCodec
        from paceline.parallel.compression.topk import TopKCodec
        from paceline.parallel.compression.two_bit import TwoBitCodec

        if self.name in ("bf16", "fp16"):
            return HalfCodec(self.name, self.rounding, self.seed, rank)
        if self.name in ("int8", "int4"):
            return IntCodec(int(self.name[3:]), self.block, self.rounding, self.seed, rank)
        if self.name in ("int2", "topk-int2"):
            return TwoBitCodec(sparse=self.is_sparse, block=self.block)
        if self.name == "topk":
            return TopKCodec(self.phase(step))
        return RawCodec(torch.float32)  # for powersgd, before and after its warm-up
