"""Greedy generation on a lane, slice by slice.

A worker is asked for a few tokens at a time, and for the next few with the prompt and what it has generated so far. So
callers of a lane take turns, a caller who leaves blocks it for one slice at most, and text comes out while it is made.
The worker keeps what it has computed of its last prompts, which makes a slice cost its own tokens only.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET

from engines.protocol.messages import ITEM_BYTES, U32_MAX, FinishReason, Generate, Text
from synapse_host.errors import InvalidRequest, SequenceTooLong, SynapseError
from synapse_host.requests.parts import buffer
from synapse_host.results import Generation, Piece
from synapse_host.text.encoders import encoded, in_thread
from synapse_host.text.validate import id_rows

if TYPE_CHECKING:
    from synapse_host.arrays import IntArray
    from synapse_host.lanes import Lanes
    from synapse_host.placement.assignment import Assignment
    from synapse_host.text.chat import Renderer
    from synapse_host.text.tokenizer import TextTokenizer
    from synapse_host.worker.exchange import Build

MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
CEILING: Final = "microllm_max_tokens"
"""The key of ``runtime_config`` that limits a generation on a lane."""


def request(ids: IntArray, max_tokens: int) -> Build:
    """Return the GENERATE of a prompt."""

    def build(req_id: str, model_ref: str) -> tuple[Generate, memoryview]:
        return Generate(req_id=req_id, model_ref=model_ref, max_tokens=max_tokens), buffer(ids)

    return build


class Spoken:
    """The ids and the text of a generation so far.

    *spell* gives the bytes of an id; without it a text is taken as the worker writes it, which is right for a whole one
    only. *stop* comes from a caller: InvalidRequest where it isn't a text or a few of them. ``text`` ends before what
    may be the beginning of a stop string, or of a character.
    """

    def __init__(self, spell: Callable[[int], bytes] | None, stop: Any) -> None:
        self.sliceable = spell is not None
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False
        """A stop string was found; text and ids end there."""
        self._spell = spell
        self._stop = stops(stop)
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, text: str, ids: Sequence[int], *, last: bool) -> str:
        """Take in what a worker has answered, and return the text that is certain now."""
        before = self._decoder.getstate()
        # Most slices end with a whole character, and the worker's text is right. Else its last bytes are lost in it.
        if self._spell is not None and (before[0] or (ids and text.endswith("\ufffd"))):
            text = self._decoder.decode(b"".join(map(self._spell, ids)), last)
        held = self._held + text
        # The one that is complete first: how the text is cut into slices makes no difference.
        found = [(held.find(stop) + len(stop), held.find(stop)) for stop in self._stop if stop in held]
        if found:
            self.stopped = True
            end, start = min(found)
            new, self._held = held[:start], ""
            ids = ids[: self._count(ids, before, len(text) - len(held) + end)]
        else:
            kept = 0 if last else max((_overlap(held, stop) for stop in self._stop), default=0)
            new, self._held = held[: len(held) - kept], held[len(held) - kept :]
        self.ids += ids
        self.text += new
        return new

    def _count(self, ids: Sequence[int], before: tuple[bytes, int], characters: int) -> int:
        """Return how many of *ids* it takes to spell the first *characters* of a slice."""
        if self._spell is None:
            return len(ids)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.setstate(before)
        for n, id in enumerate(ids, 1):
            characters -= len(decoder.decode(self._spell(id)))
            if characters <= 0:
                return n
        return len(ids)


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of *text* are the beginning of *stop*."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


async def prompt_ids(
    assignment: Assignment, tokenizer: TextTokenizer, renderer: Renderer | None, prompt: Any, until: float | None
) -> Any:
    """Return the ids of a prompt; with *renderer* it is a message, or a list of them, for the model's chat template."""
    if renderer is not None:
        from synapse_host.text.chat import chat_ids

        # A template is the bundle's own program: it runs in a process of its own, which a thread waits for.
        return await in_thread(lambda: chat_ids(assignment.bundle, tokenizer, renderer, prompt), until)
    if not isinstance(prompt, str):
        raise InvalidRequest("a list of messages needs chat=True")
    return (await encoded([prompt], until, lambda: tokenizer.prompt(prompt))).ids


async def pieces(
    lanes: Lanes,
    assignment: Assignment,
    ids: Any,
    max_tokens: int | None,
    until: float | None,
    *,
    spoken: Spoken,
) -> AsyncGenerator[Piece, None]:
    """Continue a prompt of token ids by at most *max_tokens*; None: as far as the context reaches.

    Raises InvalidRequest, SequenceTooLong, and what a lane answers: its details have the ``text`` and ``n_gen`` so far.
    """
    import numpy as np

    prompt, wanted = _checked(lanes, assignment, ids, max_tokens)
    supervisor = lanes.supervisor(assignment)
    size = lanes.config.slice if spoken.sliceable else wanted
    with supervisor.counters.call("generate"):
        while True:
            asked = min(size, wanted - len(spoken.ids))
            # A worker's ids go back to it as it gave them: it knows whether they are ids.
            row = np.concatenate([prompt, np.array(spoken.ids, np.uint32).view(np.int32)])
            try:
                reply, _ = await supervisor.exchange(
                    request(row, asked), deadline=until, stage="generate", again=bool(spoken.ids)
                )
            except SynapseError as exc:
                if not spoken.ids:
                    raise
                raise exc.with_details(text=spoken.text, n_gen=len(spoken.ids)) from exc
            assert isinstance(reply, Text)
            new = [] if reply.generated_token_ids is UNSET else reply.generated_token_ids
            if reply.n_gen and not new and size < wanted:
                # A foreign worker that tells no ids can't be asked for a continuation: once more, and whole.
                size = wanted
                continue
            last = reply.finish_reason is FinishReason.STOP or not new or len(spoken.ids) + len(new) >= wanted
            text = spoken.add(reply.text, new, last=last)
            n_gen = len(spoken.ids) or reply.n_gen
            if last or spoken.stopped:
                reason = FinishReason.STOP if spoken.stopped else reply.finish_reason
                yield Piece(text, len(prompt), n_gen, str(reason))
                return
            yield Piece(text, len(prompt), n_gen)


async def generate(
    lanes: Lanes,
    assignment: Assignment,
    ids: Any,
    max_tokens: int | None,
    until: float | None,
    *,
    spoken: Spoken,
) -> Generation:
    """Return a generation when it is finished; arguments and errors as :func:`pieces`."""
    async with aclosing(pieces(lanes, assignment, ids, max_tokens, until, spoken=spoken)) as stream:
        async for piece in stream:
            last = piece
    reason = str(last.finish_reason)
    return Generation(spoken.text, last.n_prompt, last.n_gen, reason, tuple(spoken.ids), *assignment.served_by())


def stops(stop: Any) -> tuple[str, ...]:
    """Return a caller's stop strings; InvalidRequest for what isn't a text or a few of them."""
    found = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else None
    if found is None or len(found) > MAX_STOPS or not all(isinstance(one, str) for one in found):
        raise InvalidRequest(f"stop must be a text, or a list of at most {MAX_STOPS} texts")
    if not all(1 <= len(one) <= MAX_STOP_CHARACTERS for one in found):
        raise InvalidRequest(f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters")
    return found


def _checked(lanes: Lanes, assignment: Assignment, ids: Any, max_tokens: int | None) -> tuple[IntArray, int]:
    """Return the prompt's row and how many tokens may follow; InvalidRequest, SequenceTooLong."""
    whole_number = isinstance(max_tokens, int) and not isinstance(max_tokens, bool) and 1 <= max_tokens <= U32_MAX
    if max_tokens is not None and not whole_number:
        raise InvalidRequest(f"max_tokens is {max_tokens!r}, must be a whole number from 1")
    limit = assignment.bundle.manifest.max_tokens
    row = id_rows([ids], max_tokens=limit, model=assignment.model, noun="prompt").ids
    ceiling = assignment.require().load.number(CEILING, U32_MAX)
    wanted = min(limit - len(row), ceiling) if max_tokens is None else max_tokens
    if wanted > ceiling:
        raise InvalidRequest(
            f"max_tokens is {wanted}, this lane gives at most {ceiling} (runtime_config {CEILING} in the matrix)"
        )
    if len(row) + max(1, wanted) > limit:
        raise SequenceTooLong(
            f"the prompt has {len(row)} tokens and {max(1, wanted)} are to follow, {assignment.model} takes {limit} "
            "for both. Shorten it or ask for fewer",
            details={"index": 0, "tokens": len(row), "max_tokens": limit},
        )
    if ITEM_BYTES * (len(row) + wanted) > lanes.config.max_frame:
        raise InvalidRequest(
            f"the prompt and {wanted} tokens more do not fit a frame of {lanes.config.max_frame} bytes"
        )
    return row, wanted
