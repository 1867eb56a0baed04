"""What only building asks of llama.cpp: how it tokenises, and k-quants. In a builder's child, for it may abort."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

from engines.llama.binding import library, open_model
from engines.machine import usable_cores
from engines.protocol.errors import EngineError, ErrorCode

UNKNOWN: Final = 1
CONTROL: Final = 8
USER_DEFINED: Final = 16
LSTRIP: Final = 128
RSTRIP: Final = 256
SINGLE_WORD: Final = 512
"""Bits of ``enum llama_token_attr``."""

QUANTS: Final = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}
"""Dtype -> ``enum llama_ftype``: the mixtures of llama.cpp's own making, whose matrices differ in their types."""


def quantize(source: Path, target: Path, dtype: str) -> None:
    """Write *source* with its matrices in one of :data:`QUANTS`. Raises EngineError where llama.cpp can't."""
    lib = library()
    params = lib.api.llama_model_quantize_default_params()
    params.ftype = QUANTS[dtype]
    params.nthread = usable_cores()
    lib.last_error = ""
    if lib.api.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(params)):
        raise EngineError(
            ErrorCode.ARTIFACT_INVALID, f"llama.cpp can't write {dtype}: {lib.last_error or 'no reason given'}"
        )


class NativeVocabulary:
    """The vocabulary of a GGUF as llama.cpp reads it, without the weights."""

    def __init__(self, descriptor: int) -> None:
        """Read the open file *descriptor* from byte 0. Raises EngineError ``artifact_invalid`` where it is refused."""
        self._api = api = library().api
        params = api.llama_model_default_params()
        params.vocab_only = True
        self._model: Any = open_model(descriptor, params)
        self._vocab = api.llama_model_get_vocab(self._model)

    def attributes(self, count: int) -> list[int]:
        """Return the attribute bits of the first *count* tokens."""
        return [int(self._api.llama_vocab_get_attr(self._vocab, token)) for token in range(count)]

    def tokenize(self, text: str, *, framed: bool = False, special: bool = False) -> list[int]:
        """Return a text's ids: *framed* between BOS and EOS as the file says, *special* with control tokens read."""
        data = text.encode()
        room = len(data) + 16
        ids = (ctypes.c_int32 * room)()
        n = int(self._api.llama_tokenize(self._vocab, data, len(data), ids, room, framed, special))
        if n < 0:
            raise EngineError(ErrorCode.ARTIFACT_INVALID, f"llama.cpp makes {-n} tokens of {len(data)} bytes")
        return ids[:n]

    def close(self) -> None:
        """Free the vocabulary; idempotent."""
        model, self._model = self._model, None
        if model:
            self._api.llama_model_free(model)
