"""The bundles and certificates on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from engines.bundle import manifest
from engines.bundle.manifest import Bundle, BundleError
from synapse_host import builder, catalogue, certificates
from synapse_host.doctor.finding import Finding
from synapse_host.errors import SynapseError
from synapse_host.hardware import HostProfile
from synapse_host.matrix import HardwareMatrix


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
    matrix: HardwareMatrix,
    profile: HostProfile,
    versions: Mapping[str, str],
    models_dir: Path | None,
    data_dir: Path | None = None,
) -> Iterator[Finding]:
    """Say of every certificate on this machine whether it still holds, and what voided it. *versions*: worker lines."""
    bundles: dict[str, tuple[str, Bundle]] = {}
    with suppress(OSError):
        for name, path in catalogue.installed(models_dir).items():
            with suppress(BundleError):
                bundle = manifest.read(path)
                bundles[bundle.digest] = (name, bundle)
    for path, found in certificates.stored(data_dir):
        if found is None:
            yield Finding(f"certificate.{path.stem[:12]}.unreadable", "warning", f"{path} can't be read", f"rm {path}")
            continue
        name, known = bundles.get(found.manifest_digest, (found.model_id, None))
        what = f"certificate {found.lane}/{found.engine_id}/{name}"
        id = f"{found.lane}.{found.engine_id}.{name}"
        if known is None:
            why = f"{what}: its bundle is not installed here, or was made anew since"
            yield Finding(f"certificate.{id}.unused", "info", why)
            continue
        again = f"synapse certify {found.lane} --model {name} --engine {found.engine_id}"
        engine = matrix.engines.get(found.engine_id)
        if engine is None:
            why = f"{what}: the matrix has no engine {found.engine_id}"
            yield Finding(f"certificate.{id}.void", "warning", why, f"rm {path}")
            continue
        artifacts = known.artifacts(engine.format)
        artifact = next((one for one in artifacts if one.dtype == found.binding.dtype), None)
        if artifact is None:
            reasons = [f"the bundle has no {engine.format} {found.binding.dtype} any more"]
        else:
            identity = certificates.identity_of(versions.get(engine.id, ""))
            now = certificates.present(engine, artifact, profile, identity)
            reasons = [*certificates.void_because(found.binding, now), *certificates.stricter(found, matrix)]
        if reasons:
            yield Finding(f"certificate.{id}.void", "warning", f"{what}: void since {'; '.join(reasons)}", again)
        else:
            kind = ", approximate" if found.precision == "approximate" else ""
            yield Finding(f"certificate.{id}.valid", "info", f"{what}: holds (since {found.certified_at[:10]}{kind})")
