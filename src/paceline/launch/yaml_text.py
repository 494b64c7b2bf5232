"""Plain values as YAML: blocks for people; texts in quotes, so that none is taken for anything else (pure)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

__all__ = ["yaml_text"]


def yaml_text(value: dict[str, Any]) -> str:
    """Return `value`, made of dicts, lists, texts, numbers and booleans, as a YAML document.

    Example:
        >>> print(yaml_text({"a": {"b": 1, "c": ["no", "x: y"]}}), end="")
        a:
          b: 1
          c:
            - "no"
            - "x: y"
    """
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    """Yield the lines of a dict or list that holds something."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _entry(f"{name}:", inner)
    else:
        for inner in value:
            first, *rest = _lines(inner) if _is_block(inner) else [_scalar(inner)]
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)


def _entry(name: str, value: Any) -> Iterator[str]:
    if not _is_block(value):
        yield f"{name} {_scalar(value)}"
        return
    yield name
    yield from (f"  {line}" for line in _lines(value))


def _is_block(value: Any) -> bool:
    return isinstance(value, dict | list) and bool(value)


def _scalar(value: Any) -> str:
    """Return a value as JSON has it, which YAML 1.2 includes; what can't be seen is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(one if one.isprintable() else _escape(one) for one in text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
