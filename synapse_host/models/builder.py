"""Model bundles from checkpoints. The conversions run as child programs, so the host imports no engine for them.

A builder program prints JSON lines on stdout: ``{"stage", "done", "total"}`` as work is finished, at the end
``{"stage": "result", "path", "bytes", "digest", "dtype", ...}``; a failure is one line on stderr and a non-zero exit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import UNSET

from engines.bundle import digest, manifest
from engines.bundle.manifest import Artifact, Bundle, BundleError, FileRef, Manifest
from engines.bundle.preparation import sweep
from engines.checkpoint import facts, tokenizer
from engines.checkpoint.package import profile_of
from engines.checkpoint.read import Checkpoint, plain_numbers
from synapse_host.errors import BundleInvalid, InvalidRequest, QueueFull, StorageFull
from synapse_host.models.bundles import Progress, failures, silent
from synapse_host.placement import interpreter, places
from synapse_host.text import tokenizer_file

NO_ROOM: Final = re.compile(r"\[Errno (28|122)\]|No space left on device|Disk quota exceeded|Not enough free space")
"""How a child program says that the disk is full."""

FORMATS: Final = ("gguf", "safetensors-package", "coreml")
TOKENIZER: Final = "tokenizer.json"
FIXTURES: Final = "fixtures.npz"


def run_tool(argv: Sequence[str], *, stage: str, progress: Progress = silent) -> dict[str, Any]:
    """Run ``python -m *argv`` and return its result line; paths among *argv* are absolute, for it runs in our folder.

    Raises BundleInvalid or StorageFull with the program's own last line when it fails, BackendMissing where there is no
    Python to run it. The child is gone when this returns or raises.
    """
    command, surroundings = [*interpreter.module(argv[0]), *argv[1:]], dict(os.environ)
    surroundings.pop("PYTHONPATH", None)
    with tempfile.TemporaryFile(dir=places.temporary()) as errors:
        child = subprocess.Popen(  # noqa: S603 - our own modules, no shell
            command,
            cwd=interpreter.package_root(),
            env={**surroundings, **interpreter.search_path()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        result: dict[str, Any] | None = None
        try:
            assert child.stdout is not None
            for raw in child.stdout:
                try:
                    line = json.loads(raw)
                except ValueError:
                    line = None
                if not isinstance(line, dict):
                    continue  # a library printed something
                if line.get("stage") == "result":
                    result = line
                elif type(line.get("done")) is int and type(line.get("total")) is int:
                    progress(stage, line["done"], line["total"])
            status = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        if status == 0 and result is not None:
            return result
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 8192))
        said = [line.strip() for line in errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
    why = said[-1] if said else f"ended with status {status}"
    kind = StorageFull if NO_ROOM.search(why) else BundleInvalid
    raise kind(why, details={"stage": stage, "status": status})


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yield a fresh folder beside *target*; when the block succeeds it becomes *target* by one rename.

    An existing *target* is replaced only then; on failure it is left as it was and the staging folder is removed.
    Before all that goes what a killed build left there a day ago.
    """
    # Where *target* is a link (to a larger disk), what it points to is replaced, never the link.
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent, pattern=f".{escape(target.name)}.????????.building")
    if target.exists():  # else the last build was killed between two renames, and there lies what was
        sweep(target.parent, pattern=f".{escape(target.name)}.????????.old")
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".building", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
            target.rename(old / "was")
            folder.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            folder.rename(target)
    finally:
        if folder.exists() and folder != target:
            shutil.rmtree(folder, ignore_errors=True)


def build(
    checkpoint_folder: Path,
    out: Path,
    *,
    formats: Sequence[str],
    dtypes: Mapping[str, Sequence[str]],
    model_id: str,
    task: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    fixtures: Path | None = None,
    reference: bool = False,
    progress: Progress = silent,
) -> Bundle:
    """Build a bundle folder from a checkpoint folder and return it.

    ``dtypes``: format -> the dtypes to write, in order of preference. ``overrides``: manifest fields that the
    checkpoint doesn't say (license, source, max_tokens, score). ``fixtures``: reference fixtures to take along;
    ``reference``: compute them (extra ``reference``). Raises BundleInvalid or InvalidRequest; *out* is untouched then.
    """
    from engines.checkpoint import dense

    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise InvalidRequest(f"format {unknown[0] if unknown else ''!r} is not one of {', '.join(FORMATS)}")
    said = dict(overrides or {})
    with failures(out):
        checkpoint = Checkpoint.open(checkpoint_folder.absolute(), task=task)  # type: ignore[arg-type]
        for name in formats:
            checkpoint.need_format(name)
        known = facts.of_checkpoint(checkpoint)
        _check_tokenizer(checkpoint_folder / TOKENIZER)
        with staging(out) as folder:
            wanted = [(name, dtype) for name in formats for dtype in dtypes.get(name) or [""]]
            artifacts = [
                _artifact(*each, checkpoint, folder, model_id, said.get("pooling"), progress) for each in wanted
            ]
            if reference:
                fixtures = _reference(checkpoint, said.get("max_tokens", known.max_tokens), folder / FIXTURES, progress)
            # What the manifest has of them under the same names; empty ones are left out.
            same = {key: getattr(known, key) for key in Manifest.__struct_fields__ if hasattr(known, key)}
            fields = {
                **{key: value for key, value in same.items() if value not in (None, {}, ())},
                "config": plain_numbers(checkpoint.config),
                "tokenizer": _tokenizer(checkpoint, folder / TOKENIZER),
                "fixtures": fixtures and take(fixtures, folder / FIXTURES),
                "dense": dense.write(known.dense, folder),
                **said,
            }
            built = Manifest(
                manifest_version=1,
                model_id=model_id,
                family=checkpoint.family,
                task=checkpoint.task,
                artifacts=artifacts,
                **{key: value for key, value in fields.items() if value is not None},
            )
            manifest.write(folder, built)
            try_bundle(manifest.read(folder), checkpoint.config["vocab_size"])
        return manifest.read(out)


def try_bundle(bundle: Bundle, vocab_size: int) -> None:
    """Use a bundle once, as a host would, so that none is built which can't take a text. Raises BundleInvalid.

    Its tokenizer reads a text, and its ids are below the model's *vocab_size*; its chat template is parsed, its dense
    modules are read. A template that refuses this message, or fails over it, is taken: others may pass.
    """
    from engines.checkpoint import dense
    from synapse_host.text.chat import Renderer
    from synapse_host.text.tokenizer import TextTokenizer

    known = bundle.manifest
    if known.tokenizer is not UNSET:
        tokenizer = TextTokenizer(bundle)
        if tokenizer.last_id >= vocab_size:
            raise BundleInvalid(
                f"{known.tokenizer.path}: its largest id is {tokenizer.last_id}, config.json's vocab_size is "
                f"{vocab_size}: the tokenizer belongs to another model"
            )
        try:
            tokenizer.rows(["a"], truncate=True)
        except InvalidRequest as exc:
            raise BundleInvalid(f"{known.tokenizer.path}: it can't read the text 'a': {exc}") from exc
    if known.chat_template is not UNSET:
        renderer = Renderer(bundle.root)
        try:
            renderer.render(known.chat_template, [{"role": "user", "content": "a"}], name=known.model_id)
        except (InvalidRequest, QueueFull):
            pass  # also without jinja2
        except BundleInvalid as exc:
            if not exc.details["readable"]:
                raise
        finally:
            renderer.close()
    dense.read(bundle)


def _reference(checkpoint: Checkpoint, max_tokens: int, target: Path, progress: Progress) -> Path:
    """Compute reference fixtures, and note down that it was done on this machine."""
    argv = ["engines.checkpoint.reference", str(checkpoint.folder), str(target), "--task", checkpoint.task]
    run_tool([*argv, "--max-tokens", str(max_tokens)], stage="reference", progress=progress)
    ledger = computed_here()
    ledger.mkdir(parents=True, exist_ok=True)
    (ledger / digest.file_digest(target)).touch()
    return target


def computed_here(data_dir: Path | None = None) -> Path:
    """Return the folder that holds one empty file, named by digest, for all fixtures computed on this machine."""
    from platformdirs import user_data_path

    return (user_data_path("synapse", appauthor=False) if data_dir is None else data_dir / "synapse") / "references"


def reference_origin(found: str, data_dir: Path | None = None) -> Literal["project", "computed_here", "bundle"]:
    """Return whose fixtures have this digest: shipped with this project, computed on this machine, or a bundle's own.

    What a bundle says of its fixtures is its author's word, so it is not asked.
    """
    shipped = Path(__file__).parents[1] / "fixtures"
    if any(digest.PREFIX + digest.file_digest(path) == found for path in shipped.glob("*.npz")):
        return "project"
    return "computed_here" if (computed_here(data_dir) / found.removeprefix(digest.PREFIX)).exists() else "bundle"


def take(source: Path, target: Path) -> FileRef | None:
    """Copy a file into the bundle and return its reference; None where the checkpoint has none."""
    if not source.exists():
        return None
    if source != target:
        shutil.copyfile(source, target)
    return FileRef(target.name, digest.PREFIX + digest.file_digest(target))


def _artifact(
    name: str,
    dtype: str,
    checkpoint: Checkpoint,
    folder: Path,
    model_id: str,
    pooling: str | None,
    progress: Progress,
) -> Artifact:
    source = str(checkpoint.folder)
    task = ["--task", checkpoint.task]
    stage = f"{name} {dtype}".strip()
    if name == "gguf":
        dtype = dtype or "f16"
        out = folder / f"model-{dtype}.gguf"
        options = ["--pooling", pooling] if pooling else []
        argv = ["engines.llama", "build", source, str(out), "--dtype", dtype, "--name", model_id, *task, *options]
    elif name == "safetensors-package":
        dtype = dtype or checkpoint.stored_dtype
        out = folder / f"model-{dtype}.safetensors"
        argv = ["engines.checkpoint.package", source, str(out)]
        argv += ["--profile", profile_of(model_id), "--dtype", dtype, *task]
    else:
        out = folder / "model.mlpackage"
        argv = ["engines.ane", "build", source, str(out), *task]
    result = run_tool(argv, stage=stage, progress=progress)
    if name == "coreml":
        return _coreml(out, result)
    return Artifact(name, out.name, result["digest"], result["dtype"], bytes=result["bytes"])


def _coreml(out: Path, result: dict[str, Any]) -> Artifact:
    """The package is a folder: both tree digests are computed here, functions and layers come from its builder."""
    tree = digest.tree_digest(out)
    return Artifact(
        "coreml",
        out.name,
        digest.PREFIX + tree.compatible,
        result.get("dtype", "f16"),
        bytes=tree.nbytes,
        tree=digest.PREFIX + tree.injective,
        layers=result.get("layers", UNSET),
        functions=[manifest.Function(**item) for item in result["functions"]],
        files=tree.files,
    )


def _tokenizer(checkpoint: Checkpoint, target: Path) -> FileRef | None:
    """Take the tokenizer along; an embedder's with the end-of-text token that its settings add to every text."""
    ended = tokenizer.with_end(checkpoint.folder) if checkpoint.task == "embed" else None
    if ended is None:
        return take(checkpoint.folder / TOKENIZER, target)
    target.write_text(json.dumps(ended[1], ensure_ascii=False), encoding="utf-8")
    return FileRef(target.name, digest.PREFIX + digest.file_digest(target))


def _check_tokenizer(file: Path) -> None:
    """Refuse now what a host would refuse at the first text."""
    if file.exists():
        try:
            tokenizer_file.sanitized(tokenizer_file.read(file))
        except ValueError as exc:
            raise BundleInvalid(f"{file} can't be read as a tokenizer: {exc}") from exc


def verify(bundle: Bundle, progress: Progress = silent) -> list[str]:
    """Re-hash every file of a bundle; return what is wrong, one line each (empty: all as the manifest says)."""
    wrong: list[str] = []
    refs = [(artifact.path, artifact.digest, artifact.tree) for artifact in bundle.manifest.artifacts]
    others = [ref for key in manifest.FILES if (ref := getattr(bundle.manifest, key)) is not UNSET]
    for relative, stated, tree in [*refs, *((ref.path, ref.digest, UNSET) for ref in others)]:
        path = bundle.path(relative)

        def report(done: int, total: int, stage: str = relative) -> None:
            progress(stage, done, total)

        try:
            if tree is UNSET:
                digest.verify_file(path, stated, report)
            else:
                found = digest.tree_digest(path, report)
                if not digest.same(tree, found.injective) or not digest.same(stated, found.compatible):
                    wrong.append(f"{relative}: the folder's digest differs from the manifest")
        except BundleError as exc:
            wrong.append(str(exc))
    return wrong
