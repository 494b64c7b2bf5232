"""Tests of this folder run in a process of their own."""

from simulated_accelerator.isolated_tests import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
