"""An answer in slices is the answer of one long call, to the bit of every logit, and a slice costs its own tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.llama import sequences
from engines.llama.binding import NativeContext
from engines.llama.model import LlamaModel
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import FinishReason
from engines.runtime.batch import Generation
from engines.runtime.progress import silent

pytestmark = pytest.mark.llama

TOKENS = 24
PROMPTS = [[5, 6, 7, 80], [5, 6, 7, 81], [90] * 70, [9, 8, *range(20, 120)], [11], [90] * 66 + [3]]


class Spy:
    """What a model computed: the digest of every logit row it chose from, and the tokens of each native call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[bytes] = []
        self.calls: list[int] = []
        logits, run_slice = NativeContext.logits, NativeContext.run_slice

        def seen_logits(context: NativeContext) -> Any:
            row = logits(context)
            self.logits.append(hashlib.sha256(row.tobytes()).digest())
            return row

        def seen_run(context: NativeContext, ids: Sequence[int], *, position: int, output: bool) -> None:
            self.calls.append(len(ids))
            run_slice(context, ids, position=position, output=output)

        monkeypatch.setattr(NativeContext, "logits", seen_logits)
        monkeypatch.setattr(NativeContext, "run_slice", seen_run)

    def take(self) -> tuple[list[bytes], list[int]]:
        logits, calls = self.logits[:], self.calls[:]
        self.logits.clear()
        self.calls.clear()
        return logits, calls


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def ask(model: LlamaModel, prompt: Sequence[int], max_tokens: int) -> Generation:
    return model.generate(np.array(prompt, dtype=np.int32), max_tokens=max_tokens, progress=silent())


class Long:
    """What one long call answers to each prompt, from a model that has seen nothing else."""

    def __init__(self, load: Any, spy: Spy, toy: str, prompts: Sequence[Sequence[int]], **config: object) -> None:
        self.prompts, self.answers, self.logits = prompts, [], []
        for prompt in prompts:
            self.answers.append(ask(load(toy, **config), prompt, TOKENS))
            self.logits.append(spy.take()[0])

    def slice(self, model: LlamaModel, spy: Spy, number: int, done: int, count: int) -> tuple[int, list[int]]:
        """Ask for *count* tokens behind the first *done* and compare; return the next *done* and the native calls."""
        answer = self.answers[number]
        if answer.finish_reason is FinishReason.LENGTH:
            count = min(count, answer.n_gen - done)
        part = ask(model, [*self.prompts[number], *answer.generated_token_ids[:done]], count)
        logits, calls = spy.take()
        assert part.generated_token_ids == answer.generated_token_ids[done : done + count]
        assert logits == self.logits[number][done : done + len(logits)], "to the bit"
        return done + part.n_gen, calls


@pytest.mark.parametrize("toy", ["llama-generate:q8_0", "qwen3-generate:f16"])
def test_every_cut_is_exact_and_costs_its_own_tokens(load: Any, spy: Spy, toy: str) -> None:
    long = Long(load, spy, toy, PROMPTS[:1])
    (answer,) = long.answers
    assert answer.n_gen > 12
    for cut in range(1, answer.n_gen):
        model = load(toy)
        done, _ = long.slice(model, spy, 0, 0, cut)
        rest = answer.n_gen - cut
        _, calls = long.slice(model, spy, 0, done, rest)
        assert calls == [1] * rest, "the prompt and the first slice were not computed again"
        _, calls = long.slice(model, spy, 0, cut, rest)
        assert calls == [1] * rest, "the same slice again, after a reply that was lost"


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    """The long answers and the one model of the property test, made at its first example."""
    return {}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), min_size=1, max_size=40), four=st.booleans())
def test_interleaved_answers_are_exact(
    load: Any, spy: Spy, kept: dict[str, Any], turns: list[tuple[int, int]], four: bool
) -> None:
    """Up to four answers at once cost their own tokens only; six take each other's cells and come out the same."""
    config = {"ubatch_size": 32, "ctx_size": 32}
    if not kept:
        kept["long"] = Long(load, spy, "llama-generate:q8_0", PROMPTS, **config)
    long: Long = kept["long"]
    model = load("llama-generate:q8_0", **config)
    done = [0] * len(PROMPTS)
    for number, count in turns:
        number = number % 4 if four else number
        before = done[number]
        if before == long.answers[number].n_gen:
            continue
        done[number], calls = long.slice(model, spy, number, before, count)
        if four and before:
            assert max(calls) == 1 and len(calls) <= count
    model.close()


def test_cells_move_into_a_larger_context_and_do_not_have_to(
    load: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [[5, 6, 7, 8] * 61]  # 244 tokens: the first context has 256
    long = Long(load, spy, "qwen3-generate:f16", prompt, ctx_size=512)
    model = load("qwen3-generate:f16", ctx_size=32)
    done, _ = long.slice(model, spy, 0, 0, 9)
    _, calls = long.slice(model, spy, 0, done, 9)
    assert set(calls) == {1} and len(calls) <= 9, "moved"
    model = load("qwen3-generate:f16", ctx_size=32)
    done, _ = long.slice(model, spy, 0, 0, 9)
    monkeypatch.setattr("engines.llama.binding.free_memory", lambda: 0)
    _, calls = long.slice(model, spy, 0, done, 9)
    assert calls[:9] == [244, *[1] * 8], "computed again, by the calls that made it first"


@pytest.mark.parametrize("fails", ["llama_memory_seq_rm", "llama_memory_seq_pos_min"])
def test_a_memory_that_keeps_no_earlier_state_is_computed_again(
    load: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """As a recurrent model's, or a window's that has moved on. Going on from the very end needs no earlier state."""
    long = Long(load, spy, "llama-generate", PROMPTS[:1])
    model = load("llama-generate")
    done, _ = long.slice(model, spy, 0, 0, 8)
    from llama_cpp import llama_cpp

    monkeypatch.setattr(llama_cpp, fails, lambda *_: 0 if fails.endswith("rm") else 7)
    done, calls = long.slice(model, spy, 0, done, 4)
    assert calls == [1] * 4
    _, calls = long.slice(model, spy, 0, 5, 2)
    assert calls == [4, 1, 1, 1, 1, 1, 1], "nothing of it could be kept"


def test_equal_blocks_of_another_prompt_are_taken_over(load: Any, spy: Spy) -> None:
    prompts = [[90] * 70, [90] * 66 + [3], [90] * 33]
    long = Long(load, spy, "llama-generate:q8_0", prompts, ubatch_size=32)
    model = load("llama-generate:q8_0", ubatch_size=32)
    spent = [long.slice(model, spy, number, 0, 1)[1] for number in (0, 1, 2, 0)]
    assert spent == [[32, 32, 6], [3], [1], [6]]


def test_four_sequences_keep_their_cells_the_least_recent_goes(load: Any, spy: Spy) -> None:
    prompts = [[n, n + 1, n + 2] for n in (5, 15, 25, 35, 45)]
    long = Long(load, spy, "llama-generate:q8_0", prompts)
    model = load("llama-generate:q8_0")
    for number in range(4):
        long.slice(model, spy, number, 0, 2)
    for number, calls in ((0, [1, 1]), (3, [1, 1])):
        assert long.slice(model, spy, number, 2, 2)[1] == calls
    long.slice(model, spy, 4, 0, 2)
    for number, calls in ((0, [1, 1]), (1, [3, 1, 1, 1])):
        assert long.slice(model, spy, number, 4 if number == 0 else 2, 2)[1] == calls, f"{number}"


def test_short_memory_costs_the_cells_of_others_not_the_request(
    load: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = Long(load, spy, "llama-generate", PROMPTS[:3])
    model, fresh = load("llama-generate"), load("llama-generate")
    long.slice(model, spy, 0, 0, 2)
    long.slice(model, spy, 1, 0, 2)
    monkeypatch.setattr("engines.llama.contexts.free_memory", lambda: 1000)
    assert long.slice(model, spy, 2, 0, 2)[1] == [70, 1], "in the context that the first one had to give up"
    assert long.slice(model, spy, 1, 2, 2)[1] == [1, 1]
    with pytest.raises(EngineError) as caught:
        ask(fresh, [5], 1)
    assert caught.value.code is ErrorCode.OOM


def test_a_fault_forgets_its_sequence_alone(load: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    long = Long(load, spy, "llama-generate", PROMPTS[:2])
    model = load("llama-generate")
    for number in (0, 1):
        long.slice(model, spy, number, 0, 4)
    with monkeypatch.context() as patch:
        patch.setattr(NativeContext, "logits", lambda context: np.full(320, np.nan, dtype=np.float32))
        with pytest.raises(EngineError) as caught:
            ask(model, [*PROMPTS[0], *long.answers[0].generated_token_ids[:4]], 4)
    assert caught.value.code is ErrorCode.NONFINITE_OUTPUT
    spy.take()
    assert long.slice(model, spy, 0, 0, 4)[1] == [4, 1, 1, 1]
    assert long.slice(model, spy, 1, 4, 4)[1] == [1] * 4


def test_what_is_remembered_is_bounded(load: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "REMEMBERED", 2)
    prompts = [[5, 6], [7, 8], [9, 10]]
    long = Long(load, spy, "llama-generate", prompts)
    model = load("llama-generate")
    for number in range(3):
        long.slice(model, spy, number, 0, 3)
    assert long.slice(model, spy, 2, 3, 1)[1] == [1] and long.slice(model, spy, 1, 3, 1)[1] == [1]
    ask(model, [5, 6, *long.answers[0].generated_token_ids[:3]], 1)
    assert spy.take()[1] == [5], "a prompt like any other"


def test_a_stop_ends_the_last_slice_as_it_ends_the_long_call(load: Any, spy: Spy) -> None:
    long = Long(load, spy, "qwen3-generate:f16", [[5, 6, 7, 80], [7, 7], [30, 31, 32]])
    model = load("qwen3-generate:f16")
    for number, answer in enumerate(long.answers):
        done = 0
        while done < answer.n_gen:
            done, _ = long.slice(model, spy, number, done, 5)
        if answer.finish_reason is FinishReason.STOP:
            last = ask(model, [*long.prompts[number], *answer.generated_token_ids], 5)
            assert (last.n_gen, last.finish_reason, last.text) == (0, FinishReason.STOP, "")
            spy.take()
