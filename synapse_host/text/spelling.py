"""What token ids spell, as bytes: a character may be spread over several tokens.

The same bytes as llama.cpp's pieces of a GGUF that :mod:`engines.llama.build` wrote from the same tokenizer file, so
that a text put together from slices is the text of one long generation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PRINTED: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_REST: Final = tuple(byte for byte in range(256) if byte not in _PRINTED)
# Source: GPT-2's bytes_to_unicode. Printable bytes are written as themselves, the others as characters from 256 on.
_BYTES: Final = {**{chr(byte): byte for byte in _PRINTED}, **{chr(256 + n): byte for n, byte in enumerate(_REST)}}
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-F]{2})>")


def speller(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Return the function from a token id to its bytes; special tokens and ids beyond the vocabulary have none."""
    added = tokenizer.get_added_tokens_decoder()
    # Not by its decoder: a tokenizer is opened without one (text.tokenizer_file).
    byte_level = "ByteLevel" in repr(tokenizer.pre_tokenizer) + repr(tokenizer.normalizer)

    def spelled(id: int) -> bytes:
        if id in added:
            return b"" if added[id].special else added[id].content.encode()
        token = tokenizer.id_to_token(id) or ""
        if byte_level:
            return bytes(_BYTES[character] for character in token if character in _BYTES)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()

    return spelled
