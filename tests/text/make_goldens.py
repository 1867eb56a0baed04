"""Write chat_goldens.json: what transformers' apply_chat_template gives. Run with .venv-reference/bin/python.

    .venv-reference/bin/python tests/text/make_goldens.py [SMOLLM2_BUNDLE]

Token ids for smollm2 with its own template and tokenizer, and the text of templates written for the features that
shipped templates use (bos and eos tokens, tojson, namespaces, loop controls, generation marks, tools).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

CONVERSATIONS = {
    "one": [{"role": "user", "content": "Name three rivers."}],
    "system": [
        {"role": "system", "content": "Answer in French."},
        {"role": "user", "content": "What is the capital of Italy?"},
    ],
    "turns": [
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello. How can I help?"},
        {"role": "user", "content": "Count to 3:\n1\n2"},
    ],
    "odd": [{"role": "user", "content": "  naïve 日本語 😀 \t{{ 7 * 7 }} <b>&amp;</b> 'quoted' \"too\"  "}],
    "late system": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
    "long": [{"role": "user", "content": "word " * 400}],
}

TEMPLATES = {
    "bos and eos": "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}"
    "{{ eos_token }}{% endfor %}",
    "tojson": "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    "{{ {'b': '<é>', 'a': [1, none]} | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0, sys=false) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.sys = true %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{{ ns.n }}:{{ m.content }}|{% endfor %}"
    "{{ ns.sys }}",
    "whitespace": "{% for m in messages %}\n    {%- if loop.first %}\n  first\n    {%- endif %}\n"
    "  {{ m['content'] }}\n{% endfor %}\n",
    "generation": "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}<{{ m['content'] }}>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}",
    "tools": "{% if tools is none %}none{% elif tools %}some{% else %}empty{% endif %}"
    "{% if documents is none %} none{% endif %}{% if unknown is defined %}?{% endif %}"
    "{{ messages[-1]['content'][:4] }}",
    "macro": "{% macro turn(m) %}{{ m.role | upper }}>{{ m.content.strip().split('\\n')[-1] }};{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}{% set d = dict(a=1) %}{{ d.a }}",
}


def main() -> None:
    default = Path.home() / ".cache" / "synapse" / "models" / "smollm2"
    bundle = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    manifest = json.loads((bundle / "manifest.json").read_text())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(bundle / manifest["tokenizer"]["path"]))
    special = manifest["special_ids"]
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(special["bos"])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(special["eos"])
    options = {"add_generation_prompt": True, "return_dict": False}
    ids = {
        name: tokenizer.apply_chat_template(messages, chat_template=manifest["chat_template"], tokenize=True, **options)
        for name, messages in CONVERSATIONS.items()
    }
    texts = {
        title: {
            name: tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
            for name, messages in CONVERSATIONS.items()
            if name != "long"
        }
        for title, template in TEMPLATES.items()
    }
    document = {
        "template": manifest["chat_template"],
        "tokenizer": manifest["tokenizer"]["digest"],
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "conversations": CONVERSATIONS,
        "templates": TEMPLATES,
        "ids": ids,
        "texts": texts,
    }
    path = Path(__file__).with_name("chat_goldens.json")
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
