"""Sizes of the reference GPT, by name.

`small` to `2.7b` are the usual GPT ladder with a vocabulary of 10,000; `tiny` and `mini` suit a few CPU cores and read
bytes; the 44 million gradients of `44m` don't fit into any cache. Any size can read bytes:
``gpt_size("small", vocabulary=256)``.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from paceline.errors import UsageError, unknown

__all__ = ["SIZES", "GptSize", "gpt_size"]


@dataclass(frozen=True)
class GptSize:
    """Shapes of a :class:`paceline.tools.models.gpt.GPT`.

    Attributes:
        name: of the size.
        d_model: width of the residual stream.
        d_ff: width inside the feed-forward layer.
        layers: number of blocks.
        heads: attention heads of a block; each is ``d_model / heads`` wide.
        vocabulary: number of different tokens.
        context: longest sequence, in tokens.

    Raises:
        UsageError: a value is not positive, or the heads do not fit the width.
    """

    name: str
    d_model: int
    d_ff: int
    layers: int
    heads: int
    _: KW_ONLY
    vocabulary: int = 10_000
    context: int = 256

    def __post_init__(self) -> None:
        for field in ("d_model", "d_ff", "layers", "heads", "vocabulary", "context"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(
                    f"model size {self.name!r}: {field}={value!r}, must be a whole number above 0"
                )
        if self.d_model % self.heads or self.d_head % 2:
            raise UsageError(
                f"model size {self.name!r}: {self.heads} heads do not fit d_model={self.d_model}",
                remedy="d_model / heads must be a whole, even number (rotary positions turn pairs)",
            )

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.heads

    def parameters(self, tie: bool = False) -> int:
        """Return the number of parameters of the model.

        A block has four d_model² matrices of attention, two d_model·d_ff ones of the feed-forward layer and two norms;
        the embedding, the last norm and, unless `tie`, a separate head are added to the blocks.
        """
        block = 4 * self.d_model**2 + 2 * self.d_model * self.d_ff + 2 * self.d_model
        ends = self.vocabulary * self.d_model * (1 if tie else 2) + self.d_model
        return self.layers * block + ends


def _ladder() -> dict[str, GptSize]:
    sizes = [
        GptSize("tiny", 128, 512, 4, 4, vocabulary=256, context=128),
        GptSize("mini", 256, 1024, 4, 4, vocabulary=256, context=128),
        GptSize("44m", 768, 3072, 6, 12, vocabulary=1000),
        GptSize("small", 768, 3072, 12, 12),
        GptSize("medium", 1024, 4096, 24, 16),
        GptSize("large", 1280, 5120, 36, 20),
        GptSize("xl", 1600, 6400, 48, 25),
        GptSize("2.7b", 2560, 10240, 32, 32),
    ]
    return {size.name: size for size in sizes}


SIZES: dict[str, GptSize] = _ladder()


def gpt_size(name: str, *, vocabulary: int | None = None, context: int | None = None) -> GptSize:
    """Return the size of that name, with another vocabulary or context if given.

    Raises:
        UsageError: no size has that name (the nearest one is suggested), or a value is out of range.

    Example:
        >>> gpt_size("small", vocabulary=256).parameters()
        85347072
    """
    if name not in SIZES:
        raise unknown("model size", name, SIZES)
    size = SIZES[name]
    return replace(
        size,
        vocabulary=size.vocabulary if vocabulary is None else vocabulary,
        context=size.context if context is None else context,
    )
