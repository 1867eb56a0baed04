"""Async tests run on a loop of their own, as in tests/host."""

from tests.host.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
