"""Continue a prompt, greedily: the same prompt gives the same text on the same engine.

Examples:
  synapse generate 'The capital of Italy is' --max-tokens 8
  synapse generate --chat 'Name three rivers.'
  synapse generate - < prompt.txt
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from synapse_host.bulk.corpus import opened, whole
from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, count
from synapse_host.cli.session import READING, left, limited, model_name, run_host, served_by, serving_options, watched
from synapse_host.errors import EXIT_OK

if TYPE_CHECKING:
    from synapse_host.host import Generation, Host


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.option("prompt", "PROMPT", "the text to continue; - reads it from stdin")
    parser.flag("--chat", help="PROMPT is a message; use the model's chat template")
    parser.option("--max-tokens", "N", "at most this many (default: 128)", type=count, default=128)
    serving_options(parser, "generate")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    model = model_name(args.model)
    prompt: str = args.prompt
    if prompt == "-":
        with limited(args, READING), opened("-") as file:
            prompt = whole(file, "stdin").removesuffix("\n").removesuffix("\r")

    async def work(host: Host) -> Generation:
        options = {"max_tokens": args.max_tokens, "chat": args.chat, "lane": args.lane}
        return await watched(host, console, host.generate(model, prompt, **options, deadline=left(args)))

    result = run_host(args, console, {model: args.model}, work)
    counts = {"n_prompt": result.n_prompt, "n_gen": result.n_gen, "finish_reason": result.finish_reason}
    console.document({**served_by(result), "text": result.text, **counts})
    console.line(result.text)
    how = f"{result.n_prompt} tokens in, {result.n_gen} out ({result.finish_reason})"
    console.note(f"{how} from {result.model} on {result.engine}")
    return EXIT_OK
