"""Proposes which parameters a matrix optimizer such as Muon should update, and which are left to AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from paceline.errors import UsageError, unknown

__all__ = ["matrix_parameters"]

_HEADS = ("head", "lm_head", "classifier", "unembed", "embed_out")
"""Last parts of names of layers that make a model's outputs."""

_Named = list[tuple[str, torch.nn.Parameter]]


def matrix_parameters(model: torch.nn.Module, *, exclude: Sequence[str] = ()) -> tuple[_Named, _Named]:
    """Divide a model's trainable parameters into hidden matrices and the rest.

    Muon is meant for the matrices between layers. Embeddings, the layer that makes the outputs, biases, gains and
    everything with one dimension belong to an elementwise optimizer (Jordan et al., "Muon: an optimizer for hidden
    layers", 2024). A hidden matrix is a trainable parameter with two dimensions, or three (experts, see `split` of
    `ShardedOptimizer`), that belongs to no embedding, normalisation or convolution, is not tied to an embedding, and
    is not of the output layer: one named ``head``, ``lm_head``, ``classifier``, ``unembed`` or ``embed_out``, or the
    last linear layer if it has as many outputs as an embedding has entries.

    Args:
        model: wrapped or not.
        exclude: patterns, as of ``fnmatch``, of names that belong to the rest.

    Returns:
        The hidden matrices and the rest, as (name, parameter), each once, in the order of ``named_parameters()``.

    Raises:
        UsageError: `exclude` is a string, or one of its patterns fits no parameter.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
        >>> matrices, rest = matrix_parameters(model)
        >>> [name for name, _ in matrices]
        ['1.weight']
    """
    if isinstance(exclude, str):
        raise UsageError(f"exclude={exclude!r}", remedy=f"give a list of patterns: [{exclude!r}]")
    model = (
        getattr(model, "module", model) if hasattr(model, "engine") else model
    )  # names as without a wrapper
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise unknown("parameter pattern in exclude", pattern, [name for name, _ in named])
    others = _ids_of_other_layers(model)
    matrices = [
        (name, param)
        for name, param in named
        if param.dim() in (2, 3)
        and id(param) not in others
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    ]
    hidden = {id(param) for _, param in matrices}
    return matrices, [(name, param) for name, param in named if id(param) not in hidden]


def _ids_of_other_layers(model: torch.nn.Module) -> set[int]:
    """Return ids of the parameters of embeddings, norms, convolutions and output layers."""
    embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag)]
    entries = {module.num_embeddings for module in embeddings}
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    norms = (torch.nn.modules.batchnorm._NormBase, torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm)
    outside = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _HEADS
        or isinstance(module, (torch.nn.modules.conv._ConvNd, *norms))
        or (linear and module is linear[-1] and linear[-1].out_features in entries)
    ]
    found = {id(param) for module in embeddings for param in module.parameters(recurse=False)}
    return found | {id(param) for module in outside for param in module.parameters()}
