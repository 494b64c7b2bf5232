"""Values as records of a journal hold them."""

from __future__ import annotations

from hypothesis import strategies as st

__all__ = ["PLAIN", "VALUES"]

PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


VALUES = st.dictionaries(st.text(max_size=6).filter(lambda name: name != "n"), PLAIN, max_size=4)
