"""The caches of the last prompts, so that the next slice of an answer costs its own tokens only.

Theory of operation. The host asks for a long answer in slices: each is a GENERATE whose prompt is the first one's with
the tokens that were generated since. What llama.cpp computes for a token depends on how many tokens share the call:
products of one column and of several go through different kernels, and with 8-bit activations logits then differ by as
much as 0.6 (SmolLM2 Q4_1), enough for another token to win. They depend neither on threads nor on the size of the
context or of its buffers (measured, 0.3.36). So an answer in slices is exact by construction: a cached cell is used
only where one long call would have made it by the very same calls, which are the prompt in blocks of a fixed size and
each generated token alone, every sequence in a context of its own. Of each of the last prompts a :class:`Sequence`
remembers its tokens and how long the prompt was.

A prompt that is a remembered one and tokens this worker generated behind it is that answer's next slice. Where its
cells are still there they are kept, where not they are made again by the same calls. Any other prompt is a new one; of
the remembered ones it takes the blocks that are the same. The cells of :data:`CACHED` sequences are kept, those used
least recently go first, and earlier where memory is short. A sequence whose request failed is forgotten.

All of this runs on the thread that computes, one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from engines.llama.binding import NativeContext
from engines.protocol.errors import EngineError, ErrorCode

CACHED: Final = 4
"""Sequences whose cells are kept."""
REMEMBERED: Final = 64
"""Sequences whose tokens are remembered, so that an answer stays exact also when its cells had to go."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One prompt and what was generated behind it.

    Attributes:
        ids: the prompt and the generated tokens.
        n_prompt: how many of *ids* are the prompt.
        n_held: how many of *ids* have their cells in *context*.
    """

    ids: list[int]
    n_prompt: int
    context: NativeContext | None = None
    n_held: int = 0

    def calls(self, block: int) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of each native call that is still to be made, as one long call would make it."""
        start = self.n_held
        while start < len(self.ids):
            end = min(start + block, self.n_prompt) if start < self.n_prompt else start + 1
            yield start, end
            start = end

    def compute(self, start: int, end: int) -> None:
        """Make one of those calls; the last one gives logits."""
        assert self.context is not None
        self.context.run_slice(self.ids[start:end], position=start, output=end == len(self.ids))
        self.n_held = end

    def cut(self, length: int) -> None:
        """Keep the cells of the first *length* tokens; none where the model's memory can't drop a part of itself."""
        if self.context is not None and self.n_held > length:
            self.n_held = length if self.context.cut(length) else 0

    def release(self) -> NativeContext | None:
        """Give up the cells and return the context that held them."""
        context, self.context, self.n_held = self.context, None, 0
        return context


class SequenceCache:
    """The remembered sequences of one model, the one used last at the end.

    *make* returns a new context for so many tokens or raises EngineError ``oom``; *block* is the prompt tokens of one
    call.
    """

    def __init__(self, make: Callable[[int], NativeContext], block: int) -> None:
        self._make = make
        self._block = block
        self._sequences: list[Sequence] = []

    def take(self, ids: list[int], *, room: int) -> Sequence:
        """Return the sequence that continues *ids*, in a context with *room* for so many tokens.

        At least the last call is left to be made, since its logits are wanted. Raises EngineError ``oom``.
        """
        known = [s for s in self._sequences if s.n_prompt < len(ids) and s.ids[: len(ids)] == ids]
        if known:
            # The least surplus, so that two answers to one prompt never cut what the other one still continues.
            sequence = min(reversed(known), key=lambda s: len(s.ids))
            self._sequences.remove(sequence)
            sequence.ids = ids
            sequence.cut(len(ids) - 1)
        else:
            sequence = Sequence(ids, len(ids))
        self._sequences.append(sequence)
        if sequence.context is None or sequence.context.shape.n_ctx < room:
            self._move(sequence, room)
        if not sequence.n_held:
            self._share(sequence)
        del self._sequences[:-REMEMBERED]
        return sequence

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence and its context: what its last call left there is in doubt."""
        self._sequences.remove(sequence)
        if (context := sequence.release()) is not None:
            context.close()

    def close(self) -> None:
        """Forget them all; idempotent."""
        while self._sequences:
            self.forget(self._sequences[-1])

    def _move(self, sequence: Sequence, room: int) -> None:
        """Put *sequence* into a context that has *room*; its cells move along where that is possible."""
        context = self._context(sequence, room)
        held, old = sequence.n_held, sequence.release()
        sequence.context = context
        if old is not None:
            sequence.n_held = held if held and context.copy(old) else 0
            old.close()

    def _context(self, sequence: Sequence, room: int) -> NativeContext:
        """Return an empty context for *sequence*: a new one, or that of another one that was not used for longest."""
        while True:
            held = [s for s in self._sequences if s.context is not None]
            if len(held) - (sequence in held) < CACHED:
                try:
                    return self._make(room)
                except EngineError as exc:
                    if exc.code is not ErrorCode.OOM or not held:
                        raise
            context = held[0].release()
            assert context is not None
            if context.shape.n_ctx >= room:
                context.clear()
                return context
            context.close()

    def _share(self, sequence: Sequence) -> None:
        """Copy the cells of the blocks that another sequence's prompt has in common with this one's."""
        assert sequence.context is not None
        best, most = None, 0
        for other in self._sequences[:-1]:
            blocks = min(sequence.n_prompt - 1, other.n_prompt, other.n_held) // self._block * self._block
            while blocks > most and other.ids[:blocks] != sequence.ids[:blocks]:
                blocks -= self._block
            if blocks > most and other.context is not None and other.n_held <= sequence.context.shape.n_ctx:
                best, most = other, blocks
        if best is not None and best.context is not None and sequence.context.copy(best.context):
            sequence.n_held = best.n_held
            sequence.cut(most)
