"""Texts that tokenizers read differently: with them a GGUF's tokenizer.json is compared with llama.cpp itself.

White space, digits, code, scripts, joined characters, and the literals of special tokens, which in a person's text are
text. Left out is where llama.cpp only comes near a published tokenizer: capitals beyond ASCII, Korean in BERT's form,
characters newer than its tables.
"""

from __future__ import annotations

from typing import Final

TEXTS: Final = (
    "Hello, world!", " Hello", "Hello ", "  two  spaces  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\t\n", "\r\n",
    "a\nb\n\nc\n\n\nd", "line one\r\nline two\r\n", "tab\tseparated\tvalues", " \n \t \n ", "trailing   \n", "a",
    "The quick brown fox jumps over the lazy dog.", "I'm sure we'll say they've gone; she'd told you, isn't it?",
    "DON'T SHOUT, I'LL LISTEN", "snake_case camelCase kebab-case SCREAMING_CASE HTTPServer", "3", "33", "333", "3333",
    "1234567890", "3.14159 -2.5e-10 0xFF", "1,000,000.00 EUR", "2024-11-30T20:38:00Z", "192.168.0.1:8080/index.html",
    "user.name+tag@example.com", "https://example.com/path?query=1&other=two#part", "def f(x):\n    return x ** 2\n",
    "if (a != b && c >= d) { e[0]++; }", '<div class="x">text</div>', "SELECT * FROM t WHERE a = 'b';",
    "\\n \\t \\\\", "!!!???...---===", "()[]{}<>", "# Title\n\n- item\n- item\n\n```c\nint x;\n```\n",
    "a  b   c    d     e", "$100 50%", "caf\xe9 na\xefve", "cafe\u0301 nai\u0308ve", "\xe9t\xe9 stra\xdfe",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002", "\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440", "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643",
    "\u05e9\u05dc\u05d5\u05dd", "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467 family",
    "\U0001f1ea\U0001f1fa \u2764\ufe0f \U0001f44d\U0001f3fd", "\xa0nbsp\xa0", "\u201cquoted\u201d \u2014 dash\u2026",
    "\xbd \xb2 \u2167 \u2460", "\u2200x\u2208\u211d: x\xb2\u22650", "zero\u200bwidth", "under\u2581line\u2581", "<s>",
    "</s> and <unk> in a text", "<|im_end|>\n<|im_start|>system", "<|endoftext|>", "[CLS] [SEP] [MASK]",
    "[INST] hi [/INST]", "<0x0A>", "<start_of_turn>user", "antidisestablishmentarianism pneumonoultramicroscopic",
)  # fmt: skip
