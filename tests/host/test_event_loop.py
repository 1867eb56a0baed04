"""synapse_host.sync: uvloop where it is installed."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from synapse_host import sync


def test_uvloop_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = asyncio.new_event_loop()
    module = ModuleType("uvloop")
    module.__dict__["new_event_loop"] = lambda: made
    monkeypatch.setattr(sync, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setitem(sys.modules, "uvloop", module)
    with closing(sync.new_event_loop()) as loop:
        assert loop is made
