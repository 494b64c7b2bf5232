"""The reference GPT: bytes (or any tokens) in, logits out.

Pre-norm blocks with RMSNorm (arXiv 1910.07467), rotary positions (arXiv 2104.09864), causal attention through
``scaled_dot_product_attention`` and a GELU feed-forward layer of two matrices. No biases, and by default no dropout:
equal inputs give equal gradients, which comparisons of strategies require.

Shapes are written as ``[batch, context, …]``.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError
from paceline.tools.models.gpt_sizes import GptSize

__all__ = ["GPT", "token_loss"]


def rotary_tables(context: int, d_head: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, each ``[context, d_head / 2]``."""
    rates = base ** -(torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), rates)
    return angles.cos().to(torch.get_default_dtype()), angles.sin().to(torch.get_default_dtype())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` ``[batch, heads, context, d_head]``, its halves turned as pairs by the position's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention of many heads with rotary positions."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.d_model, 3 * size.d_model, bias=False)
        self.out = nn.Linear(size.d_model, size.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the attention output ``[batch, context, d_model]`` for `x` of the same shape."""
        batch, context, d_model = x.shape
        # [batch, context, 3, heads, d_head] → three times [batch, heads, context, d_head]
        qkv = self.qkv(x).view(batch, context, 3, self.heads, d_model // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, context, d_model))


class FeedForward(nn.Module):
    """Two matrices with GELU between them."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.up = nn.Linear(size.d_model, size.d_ff, bias=False)
        self.out = nn.Linear(size.d_ff, size.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for `x`, both ``[batch, context, d_model]``."""
        return self.out(functional.gelu(self.up(x)))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, size: GptSize, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.RMSNorm(size.d_model, eps=1e-6)
        self.attention = Attention(size)
        self.feed_forward_norm = nn.RMSNorm(size.d_model, eps=1e-6)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream ``[batch, context, d_model]`` after this layer."""
        x = x + self._thinned(self.attention(self.attention_norm(x), cos, sin))
        return x + self._thinned(self.feed_forward(self.feed_forward_norm(x)))

    def _thinned(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """A GPT of a given :class:`~paceline.tools.models.gpt_sizes.GptSize`.

    Args:
        size: its shapes.
        tie: share the weights of embedding and head.
        recompute: keep only each block's input and run the block again in backward (activation checkpointing).
        dropout: share of the outputs of each attention and feed-forward layer that is zeroed in training.

    Example:
        >>> from paceline.tools.models.gpt_sizes import gpt_size
        >>> GPT(gpt_size("tiny"))(torch.zeros(2, 16, dtype=torch.int64)).shape
        torch.Size([2, 16, 256])
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, size: GptSize, *, tie: bool = False, recompute: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.size, self.tied, self.recompute = size, tie, recompute
        self.embedding = nn.Embedding(size.vocabulary, size.d_model)
        self.blocks = nn.ModuleList(Block(size, dropout) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.d_model, eps=1e-6)
        self.head = nn.Linear(size.d_model, size.vocabulary, bias=False)
        cos, sin = rotary_tables(size.context, size.d_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if tie:
            self.head.weight = self.embedding.weight
        self._initialise()

    def _initialise(self) -> None:
        """Draw weights from N(0, 1/inputs); those that add to the residual stream are smaller by √(2·layers).

        The head starts small, so that the first loss is close to ln(vocabulary). The embedding starts large enough
        not to be drowned by the first blocks, unless it is the head too.
        """
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=self._std(name, weight.shape[1]))

    def _std(self, name: str, inputs: int) -> float:
        if name == "head.weight" or (name == "embedding.weight" and self.tied):
            return 0.02
        if name == "embedding.weight":
            return 0.5
        return 1 / math.sqrt(inputs) / (math.sqrt(2 * self.size.layers) if name.endswith("out.weight") else 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every position's next token.

        Args:
            tokens: ``[batch, context]`` integers below the vocabulary, at most ``size.context`` long.

        Returns:
            ``[batch, context, vocabulary]``.

        Raises:
            UsageError: `tokens` has another shape or type, or is too long.
        """
        self._check(tokens)
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]].to(x.dtype), self.sin[: tokens.shape[1]].to(x.dtype)
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = cast(Tensor, checkpoint(block, x, cos, sin, use_reentrant=False))
            else:
                x = block(x, cos, sin)
        return self.head(self.norm(x))

    def _check(self, tokens: Tensor) -> None:
        shape = list(tokens.shape)
        if tokens.ndim != 2 or 0 in shape[1:] or tokens.dtype not in (torch.int64, torch.int32):
            raise UsageError(
                f"tokens of shape {shape} and type {tokens.dtype}; valid: [batch, context] of torch.int64",
                remedy="one row per sequence, one integer per token",
            )
        if shape[1] > self.size.context:
            raise UsageError(
                f"tokens of shape {shape}: {shape[1]} tokens a row, but the context is {self.size.context}",
                remedy="cut the rows, or build the model with a larger context",
            )

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, n: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return `prompt` followed by `n` tokens drawn from the model.

        Args:
            prompt: ``[batch, length]`` integers, length 1 or more; the last ``size.context`` are seen.
            n: number of tokens to add to each row.
            temperature: divides the logits; 0 takes the most likely token.
            generator: source of randomness; None: torch's default.

        Returns:
            ``[batch, length + n]``.

        Raises:
            UsageError: `prompt` is empty or no integers, `n` or `temperature` is negative.
        """
        if n < 0 or not temperature >= 0:
            raise UsageError(f"generate(n={n}, temperature={temperature}): both must be 0 or more")
        tokens = prompt
        for _ in range(n):
            logits = self(tokens[:, -self.size.context :])[:, -1].float()
            if temperature == 0:
                drawn = logits.argmax(dim=-1, keepdim=True)
            else:
                drawn = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat((tokens, drawn.to(tokens.dtype)), dim=1)
        return tokens


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens, in nats per token.

    Args:
        logits: ``[batch, context, vocabulary]``.
        targets: ``[batch, context]``, the token that follows each position.

    Raises:
        UsageError: the shapes do not fit each other.
    """
    if logits.shape[:-1] != targets.shape:
        raise UsageError(
            f"logits of shape {list(logits.shape)} and targets of shape {list(targets.shape)} do not fit",
            remedy="targets must be [batch, context] for logits [batch, context, vocabulary]",
        )
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
