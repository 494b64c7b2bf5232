"""Docstrings say `Example:` where one stands; Griffe, which reads them for the site, knows the plural only."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Plural(Extension):
    """Reads `Example:` as `Examples:`."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of what was just read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
