"""The coverage judge knows its modules and says no below its limit."""

from __future__ import annotations

import pytest

from tests.faults import branches

pytestmark = pytest.mark.process


def test_every_module_and_test_is_there() -> None:
    for modules, tests in branches.GROUPS.values():
        for module in modules:
            path = branches.ROOT / module.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), module
        assert all((branches.ROOT / test).exists() for test in tests), tests


def test_the_status_follows_the_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert branches.main(["--only", "permits"]) == 0
    assert "synapse_host/supervision/queueing.py" in capsys.readouterr().out
    monkeypatch.setattr(branches, "LIMIT", 100.5)
    assert branches.main(["--only", "permits"]) == 1
    assert "below 100.5 %" in capsys.readouterr().out
