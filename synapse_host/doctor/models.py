"""The bundles and certificates on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from engines.bundle import manifest
from engines.bundle.manifest import Bundle, BundleError
from synapse_host.certificates import binding, standing
from synapse_host.doctor.machine import Finding
from synapse_host.errors import SynapseError
from synapse_host.models import builder, catalogue
from synapse_host.models.bundles import readable
from synapse_host.placement.hardware import HostProfile
from synapse_host.placement.matrix import HardwareMatrix


def bundle_findings(models_dir: Path) -> Iterator[Finding]:
    """Re-check every installed bundle: manifest and digests."""
    try:
        installed = catalogue.installed(models_dir)
    except OSError as exc:
        yield Finding("models.unreadable", "warning", f"{models_dir}: {exc.strerror or exc}", "pass --models-dir")
        return
    for name, path in installed.items():
        fix = f"build the bundle again: {path}"
        try:
            bundle: Bundle = manifest.read(path)
            wrong = builder.verify(bundle)
            if catalogue.ours(name, bundle):
                fix = f"synapse models install {name} --force"
        except (BundleError, SynapseError, OSError) as exc:
            wrong = [str(exc)]
            if name in catalogue.DEFAULTS:
                fix = f"synapse models install {name} --force   (it replaces {path})"
        for what in wrong:
            yield Finding(f"model.{name}.invalid", "failure", f"model {name}: {what}", fix)
        if not wrong:
            formats = ", ".join(f"{artifact.format} {artifact.dtype}" for artifact in bundle.manifest.artifacts)
            yield Finding(f"model.{name}.ok", "info", f"model {name}: digests match ({formats})")
            if catalogue.outdated(name, bundle):
                what = f"model {name}: made by the recipe of another release; it serves as it is"
                yield Finding(f"model.{name}.outdated", "info", what, f"synapse models install {name}")


def certificate_findings(
    matrix: HardwareMatrix, profile: HostProfile, versions: Mapping[str, str], models_dir: Path | None
) -> Iterator[Finding]:
    """Say of every certificate on this machine whether it is valid, and what voided it. *versions*: worker lines."""
    identities = {id: binding.identity_of(line) for id, line in versions.items()}
    for one in standing.listed(matrix, readable(models_dir), profile, identities=identities):
        found = one.certificate
        if found.evidence is None:
            why, name = "; ".join(found.why), found.path.stem[:12]
            yield Finding(f"certificate.{name}.unreadable", "warning", why, f"rm {found.path}")
            continue
        id, what = f"{one.lane}.{one.engine}.{one.model}", f"certificate {one.lane}/{one.engine}/{one.model}"
        if found.valid:
            kind = ", approximate" if found.evidence.precision == "approximate" else ""
            since = found.evidence.created[:10]
            yield Finding(f"certificate.{id}.valid", "info", f"{what}: valid (since {since}{kind})")
        elif one.fix is None:
            yield Finding(f"certificate.{id}.unused", "info", f"{what}: {'; '.join(found.why)}")
        else:
            yield Finding(f"certificate.{id}.void", "warning", f"{what}: void: {'; '.join(found.why)}", one.fix)
