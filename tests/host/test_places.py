"""Users without a home folder, machines without a temporary one: what needs it says so, the rest works."""

from __future__ import annotations

import tempfile
from pathlib import Path

import platformdirs
import pytest

from synapse_host import doctor
from synapse_host.certificates import standing
from synapse_host.cli import remote
from synapse_host.host import Host
from synapse_host.models import catalogue
from synapse_host.placement import hardware, places
from synapse_host.placement.matrix import load
from synapse_host.placement.places import NoHome, NoTemporary
from synapse_host.worker import runtime_dir
from tests.support.small_bundle import write_bundle, write_matrix


@pytest.fixture(params=["an error", "a path that begins with ~"])
def homeless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What platformdirs and pathlib do without HOME and without a passwd entry, by their version."""

    def found(*_: object, **__: object) -> Path:
        if request.param == "an error":
            raise RuntimeError("could not determine the home directory")
        return Path("~/.cache/synapse")

    def expanduser(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("user_cache_path", "user_data_path", "user_runtime_path"):
        monkeypatch.setattr(platformdirs, name, found)
    monkeypatch.setattr(Path, "expanduser", expanduser)


def test_without_a_home(homeless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for needs in (catalogue.models_dir, standing.folder, lambda: places.expanded("~/m")):
        with pytest.raises(NoHome, match=r"has no home folder.*set HOME") as caught:
            needs()
        assert caught.value.exit_code == 2
    # What would only be kept there is not kept, and nothing is installed.
    assert catalogue.installed() == {} and catalogue.locate("minilm") is None
    assert list(standing.listed(load(write_matrix(tmp_path)), {}, hardware.detect())) == []
    assert remote.default_directory().is_absolute()
    found = doctor.examine(load(write_matrix(tmp_path)))
    assert "home.missing" in {finding.id for finding in found.findings} and found.host["models_dir"] is None
    assert not (tmp_path / "~").exists()


async def test_a_bundle_by_path_needs_no_home(homeless: None, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "toy")
    async with Host.open(write_matrix(tmp_path), {"toy": bundle}) as host:
        assert (await host.embed("toy", ["a"])).shape == (1, 8)


async def test_without_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(NoTemporary, match="Set TMPDIR to a folder"):
        async with Host.open(write_matrix(tmp_path), {}):
            pass
    assert runtime_dir.roots() == [Path("/tmp")]
    found = doctor.examine(load(write_matrix(tmp_path)), models_dir=tmp_path)
    assert "temporary.missing" in {finding.id for finding in found.findings if finding.severity == "failure"}
