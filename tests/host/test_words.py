"""What an error says fits its reader: a program gets no options of the command, a command no Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import synapse_host
from engines.bundle import manifest
from engines.bundle.manifest import Bundle
from synapse_host import errors
from synapse_host.bulk import Corpus
from synapse_host.bulk.entries import entries
from synapse_host.bulk.search import Index
from synapse_host.errors import SynapseError
from synapse_host.host import open_bundles
from synapse_host.models import catalogue
from synapse_host.placement.assignment import Assignment, unknown_model
from synapse_host.placement.select import Placement
from synapse_host.text.chat import chat_ids
from synapse_host.text.limits import too_long
from synapse_host.text.tokenizer import TextTokenizer
from synapse_host.worker.listener import RuntimeDirectory
from tests.support.small_bundle import write_bundle


def bundle(root: Path, **options: Any) -> Bundle:
    return manifest.read(write_bundle(root / "toy", **options))


def column(root: Path) -> None:
    (root / "x.csv").write_text("other\na\n")
    list(Corpus.of(root / "x.csv"))


def index(root: Path) -> Index:
    np.save(root / "x.npy", np.zeros((1, 8), np.float32))
    facts = {"dims": 8, "n": 1, "model": "older", "manifest_digest": "0", "files": [], "column": "text"}
    facts |= {"input_digest": "0", "truncate": False, "empty": "error", "on_error": "stop", "chunk": None}
    facts["left_out"] = []
    (root / "x.npy.meta.json").write_text(json.dumps(facts))
    return Index(root / "x.npy")


def busy(root: Path) -> None:
    held = RuntimeDirectory.open(root)
    try:
        RuntimeDirectory.open(root)
    finally:
        held.close()


def no_engine(root: Path) -> None:
    Assignment("embed", "embed", "toy", bundle(root), Placement("embed", None, None, ()), None).require()


def raised(error: SynapseError) -> None:
    raise error


# What a program reads at the end of the message; what a command prints there.
ADVICE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no engine": (no_engine, "See: host.explain('embed').", "See: synapse matrix explain embed."),
    "no model": (lambda root: raised(unknown_model("x", {"toy": 1})), "(have: toy).", "List them: synapse models."),
    "no installed model": (lambda root: catalogue.obtain("x", root), ").", "List them: synapse models."),
    "a bundle to install": (
        lambda root: catalogue.install(str(bundle(root).root), root), "Use it as it is.", "Use it as it is: --model"
    ),
    "a name for a folder": (
        lambda root: open_bundles({"toy": "minilm"}),
        "without models= a host has the installed ones.", "synapse models path minilm.",
    ),
    "no tokenizer": (
        lambda root: TextTokenizer(bundle(root, tokenizer=False)),
        "Send token ids (embed_ids, rerank_ids, generate_ids).", "a Python program may send it token ids.",
    ),
    "no template": (
        lambda root: chat_ids(bundle(root), None, None, "a"),  # type: ignore[arg-type]
        "Generate without chat=True.", "Generate without --chat.",
    ),
    "too long": (lambda root: raised(too_long(0, 9, 8, model="toy")), "pass truncate=True (", "pass --truncate ("),
    "an empty text": (lambda root: list(entries(Corpus.of([""]))), 'Policy(empty="zero").', "--empty zero."),
    "no column": (column, "Corpus.of(…, column=NAME).", "--column NAME."),
    "no index": (
        lambda root: Index(root / "x.npy"),
        "embed_file(host, model, corpus, path).", "synapse embed --file CORPUS --out",
    ),
    "another index": (
        lambda root: index(root).check_model(bundle(root), "toy"),
        "or take the model it was made by.", "or name the model it was made by: --model.",
    ),
    "a busy directory": (busy, "set another HostConfig.runtime_dir.", "pass another --runtime-dir."),
}  # fmt: skip


@pytest.mark.parametrize(("fail", "program", "command"), ADVICE.values(), ids=ADVICE)
def test_advice_is_given_in_the_readers_own_terms(
    fail: Callable[[Path], object], program: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SynapseError) as caught:
        fail(tmp_path)
    error = caught.value
    assert program in error.message and not OF_A_COMMAND.search(error.message), error.message
    assert command in error.said("command") and not OF_A_PROGRAM.search(error.said("command")), error.said("command")


OF_A_COMMAND = re.compile(r"(^|[\s(])--[a-z]|synapse (?!certify|build|models install)[a-z]+\b(?!\.)")
"""An option, or a verb. Some prepare a machine, whoever asks; what they say has their own options."""
OF_A_PROGRAM = re.compile(r"host\.|=True|HostConfig|Policy\(|models=|_ids\b|Corpus\.")
ROOT = Path(synapse_host.__file__).parent
COMMANDS = ("cli", "doctor", "certification", "serve")
"""Rooms that only commands reach."""
KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, SynapseError)}


def messages() -> Iterator[tuple[str, str]]:
    """Yield the literal words of every message that an error is made with, and where."""
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in COMMANDS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS and node.args:
                words = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
                yield f"{path.relative_to(ROOT)}:{node.lineno}", "".join(map(str, words))


def test_no_message_names_what_only_a_command_has() -> None:
    found = dict(messages())
    assert len(found) > 100
    setup = ("synapse certify", "synapse build", "synapse models install", "pip install")
    assert {
        where: text
        for where, text in found.items()
        if OF_A_COMMAND.search(text) and not any(verb in text for verb in setup)
    } == {}
