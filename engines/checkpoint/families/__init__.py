"""What each family of models is: its config.json, its tensors, and what its manifest says.

A family is one file here with one class: the class's fields are the keys of config.json that its forward pass reads,
its methods say which tensors it has and how it is used. :data:`FAMILIES` names them by ``model_type``; the same word
must stand in ``engines.bundle.manifest.Family``. Nothing here opens a file. It must not know an engine or the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from engines.bundle.manifest import Family
from engines.checkpoint.families.base import Config
from engines.checkpoint.families.bert import Bert
from engines.checkpoint.families.decoder import Llama, Mistral, Qwen2, Qwen3
from engines.checkpoint.families.gemma3_text import Gemma3Text
from engines.checkpoint.families.modernbert import ModernBert
from engines.checkpoint.families.mpnet import Mpnet
from engines.checkpoint.families.nomic_bert import NomicBert

FAMILIES: Final[Mapping[Family, type[Config]]] = {
    "bert": Bert,
    "modernbert": ModernBert,
    "mpnet": Mpnet,
    "nomic_bert": NomicBert,
    "gemma3_text": Gemma3Text,
    "qwen3": Qwen3,
    "qwen2": Qwen2,
    "llama": Llama,
    "mistral": Mistral,
}


def known(family: Family, config: Mapping[str, Any]) -> Config:
    """Return a complete config as its family's class."""
    return msgspec.convert(config, FAMILIES[family])
