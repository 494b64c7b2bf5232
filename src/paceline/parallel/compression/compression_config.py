"""How numbers are made smaller before they are sent: :class:`Compression`.

| name       | bytes a number | what it does                                     | best for                         |
|------------|---------------:|--------------------------------------------------|----------------------------------|
| `bf16`     |              2 | rounds to 8 bits of mantissa                     | a network a little too slow      |
| `fp16`     |              2 | rounds to 11 bits, with a scale for each block   | the same, somewhat more exact    |
| `int8`     |           1.02 | 255 levels for each block of 256                 | gradients, every step            |
| `int4`     |           0.52 | 15 levels for each block                         | pseudo-gradients, every H steps  |
| `topk`     |   4 x the share | sends the largest only (1 % unless told)        | gradients, in long runs          |
| `powersgd` |  4r(n+m) / nm  | a low-rank product for each n x m matrix         | large matrices, every step       |

What a rank leaves out it remembers and adds to what it gives next (error feedback), except for the first two, where
so little is left out that remembering costs more than it brings. Some parameters are exempt, since they are few and
matter much: those with fewer than two dimensions (norms, biases), small ones, and any that are named.

What computes is imported where it is used: a command refuses bad names and values before it loads torch.
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

COMPRESSIONS = ("bf16", "fp16", "int8", "int4", "topk", "powersgd")

_FEEDBACK = {"bf16": False, "fp16": False, "int8": True, "int4": True, "topk": True, "powersgd": True}
_WIDE = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Compression:
    """A way to send numbers in fewer bytes.

    Attributes:
        name: ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"topk"`` or ``"powersgd"``.
        feedback: remember what was left out, and give it next time; None: as the table above says.
        rounding: ``"nearest"``, or ``"stochastic"``: up or down at random, right in the mean (bf16, int8, int4).
        block: numbers that share a scale (int8, int4).
        keep: share of the numbers that is sent (topk), above 0, at most 1.
        momentum: of DGC's momentum correction (topk, arXiv 1712.01887 §3.1); the optimizer must then have none.
        rank: of the product (powersgd, arXiv 1905.13727).
        warmup: steps over which `keep` falls from 25 % (topk), or before which nothing is compressed (powersgd).
        exempt: names or patterns (``"*.embedding.*"``) of parameters that are sent as they are.
        exempt_below: parameters with fewer numbers are, too, and all with fewer than two dimensions.
        seed: of stochastic rounding, and of the first guess of powersgd.

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
            object.__setattr__(self, "feedback", _FEEDBACK[self.name])
        if self.rounding not in ("nearest", "stochastic"):
            raise unknown("rounding", self.rounding, ["nearest", "stochastic"])
        if self.rounding == "stochastic" and self.name not in ("bf16", "int8", "int4"):
            raise UsageError(
                f"{self.name} has no stochastic rounding", remedy="use it with bf16, int8 or int4"
            )
        if not isinstance(self.keep, int | float) or not 0 < self.keep <= 1:
            raise UsageError(
                f"keep={self.keep!r}", remedy="give the share that is sent, above 0 and at most 1"
            )
        if not isinstance(self.momentum, int | float) or not 0 <= self.momentum < 1:
            raise UsageError(
                f"momentum={self.momentum!r}", remedy="give a number from 0 to below 1, such as 0.9"
            )
        if self.momentum and (self.name != "topk" or not self.feedback):
            raise UsageError(
                f"momentum={self.momentum!r} with {self.name}"
                + ("" if self.feedback else ", feedback=False"),
                remedy="momentum correction is topk's, with feedback",
            )
        for name, least in (("rank", 1), ("warmup", 0), ("exempt_below", 0), ("block", 32)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name}={value!r}", remedy=f"give a whole number of {least} or more")
        if self.block % 32:
            raise UsageError(f"block={self.block}", remedy="give a multiple of 32")
        if isinstance(self.exempt, str):  # its letters would be the patterns, and "*" exempts everything
            raise UsageError(f"exempt={self.exempt!r}", remedy=f"give a tuple: exempt=({self.exempt!r},)")

    def __repr__(self) -> str:
        """Return what differs from the name's own settings."""
        usual = {field.name: field.default for field in fields(self)} | {"feedback": _FEEDBACK[self.name]}
        told = [f"{name}={getattr(self, name)!r}" for name in usual if getattr(self, name) != usual[name]]
        return f"Compression({', '.join([repr(self.name), *told[1:]])})"

    @classmethod
    def of(cls, compression: str | Compression | None) -> Compression | None:
        """Return the compression of that name; None and a `Compression` are returned as they are.

        Raises:
            UsageError: nothing is called so (the nearest one is suggested), or it is no name.
        """
        if compression is None or isinstance(compression, Compression):
            return compression
        return cls(compression)

    def exempts(self, name: str, param: torch.Tensor) -> bool:
        """Tell whether a parameter is sent as it is."""
        if param.dim() < 2 or param.numel() < self.exempt_below:
            return True
        if self.name == "powersgd":
            from paceline.parallel.compression.powersgd import factors_of

            if not factors_of([param.shape], self.rank).thin:
                return True
        return any(fnmatchcase(name, pattern) for pattern in self.exempt)

    def check_supported(self, name: str, param: torch.Tensor) -> None:
        """Raise where the numbers of a parameter can't be made smaller in this way.

        Raises:
            UsageError: naming the parameter.
        """
        dtype = str(param.dtype).removeprefix("torch.")
        if dtype not in _WIDE or (self.name in ("bf16", "fp16") and dtype != "float32"):
            raise UsageError(
                f"{self.name} is unfit for parameter {name!r} of {dtype}",
                remedy="compress float32 (int8, int4, topk and powersgd also bfloat16 and float16), exempt the "
                "parameter by name, or leave compression out",
            )

    @property
    def is_sparse(self) -> bool:
        """Whether packets hold some of the numbers only, so that a sum has others than each."""
        return self.name == "topk"

    def phase(self, step: int) -> float:
        """Return what changes with the step: as long as it stays, so do the packets."""
        if self.name == "topk":
            from paceline.parallel.compression.error_feedback import density_at

            return density_at(step, self.keep, self.warmup)
        return float(self.factors(step))

    def codec(self, *, rank: int, step: int = 0) -> Codec:
        """Return what makes the packets of `rank` at optimizer step `step`."""
        import torch

        from paceline.parallel.compression.codecs import HalfCodec, IntCodec, RawCodec
        from paceline.parallel.compression.topk import TopKCodec

        if self.name in ("bf16", "fp16"):
            return HalfCodec(self.name, self.rounding, self.seed, rank)
        if self.name in ("int8", "int4"):
            return IntCodec(int(self.name[3:]), self.block, self.rounding, self.seed, rank)
        if self.name == "topk":
            return TopKCodec(self.phase(step))
        return RawCodec(torch.float32)  # what powersgd sends, before and after it begins

    def factors(self, step: int) -> bool:
        """Tell whether matrices are sent as products at optimizer step `step`."""
        return self.name == "powersgd" and step >= self.warmup
