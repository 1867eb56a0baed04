"""``synapse generate``: continue a prompt greedily, or answer a message in the model's chat template."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from synapse_host.bulk.corpus import opened, whole
from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, count
from synapse_host.cli.session import OWN_HOST, left, model_name, reading, run_host, served_by, serving_options, watched
from synapse_host.errors import EXIT_OK

if TYPE_CHECKING:
    from synapse_host.host import Generation, Host


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Continue a prompt, greedily: the same prompt gives the same text on the same engine.\n" + OWN_HOST
    )
    parser.examples("""
        synapse generate 'The capital of Italy is' --max-tokens 8
        synapse generate --chat 'Name three rivers.'
        synapse generate - < prompt.txt
    """)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="PROMPT is a message; use the model's chat template")
    parser.add_argument("--max-tokens", type=count, default=128, metavar="N", help="at most this many (default: 128)")
    serving_options(parser, "generate")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    model = model_name(args.model)
    prompt: str = args.prompt
    if prompt == "-":
        with reading(args), opened("-") as file:
            prompt = whole(file, "stdin").removesuffix("\n").removesuffix("\r")

    async def work(host: Host) -> Generation:
        asked = host.generate(
            model, prompt, max_tokens=args.max_tokens, chat=args.chat, lane=args.lane, deadline=left(args)
        )
        return await watched(host, console, asked)

    result = run_host(args, console, {model: args.model}, work)
    counts = {"n_prompt": result.n_prompt, "n_gen": result.n_gen, "finish_reason": result.finish_reason}
    console.document({**served_by(result), "text": result.text, **counts})
    console.line(result.text)
    console.note(
        f"{result.n_prompt} tokens in, {result.n_gen} out ({result.finish_reason}) "
        f"from {result.model} on {result.engine}"
    )
    return EXIT_OK
