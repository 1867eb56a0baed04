"""Patterns of real models pass, and take their time in proportion to the text; what may take longer is refused."""

from __future__ import annotations

import time

import pytest

from synapse_host.text import split_pattern

TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HAN_UPPER, HAN_LOWER = f"{UPPER[:-1]}&&[^\\p{{Han}}]]", f"{LOWER[:-1]}&&[^\\p{{Han}}]]"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REAL = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt-2, shorter": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
    "llama 3": SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL,
    "qwen": SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL,
    "qwen with marks": SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + TAIL,
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORT}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL,
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL,
    "kimi": rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{HAN_UPPER}*{HAN_LOWER}+{SHORT}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{HAN_UPPER}+{HAN_LOWER}*{SHORT}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*" + TAIL,
    "deepseek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + TAIL,
    "deepseek, digits": r"\p{N}{1,3}",
    "deepseek, scripts": r"[一-龥぀-ゟ゠-ヿ]+",
    "deepseek, letters": r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+",
    "clip": r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "falcon": r"[0-9][0-9][0-9]",
    "spaces of xlm-r": r" {2,}",
    "spaces of clip": r"\s+",
    "a line's end": r"\n",
}


WORST = ["a" * 50_000 + "!", "A" * 50_000, " " * 50_000 + "a", "\u3400" * 50_000, "1" * 50_000, "\n " * 25_000]


@pytest.mark.parametrize("pattern", REAL.values(), ids=REAL)
def test_patterns_of_real_models_are_accepted_and_take_time_in_proportion_to_the_text(pattern: str) -> None:
    from tokenizers import Regex, pre_tokenizers

    split_pattern.check(pattern)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    started = time.process_time()
    for text in WORST:
        split.pre_tokenize_str(text)
    # Quadratic time is 10 s and more for each of them.
    assert time.process_time() - started < 6


@pytest.mark.parametrize(
    "pattern",
    [r"(a+)+$", r"(a+)+b", r"(a|a)*b", r"(?:a|a){20}b", r"a*a+b", r"a+b", r"\s*[\r\n]+", r"\s*\S|\S+", r"x*y+z|x+",
     r"a?a?a?aaa", r"(.)\1", r"a**", r"a{1,3}+", r"a{0,999}", r"(?i)a", r"a$", r"\ba", r"\s+(?=\S)", r"(?<=a)b", r"\Ga",
     r"[a", r"(a", r"a\\"[:-1], "", "a||b", "a*", "a?|b", "a" * 5000],
)  # fmt: skip
def test_what_may_take_long_or_is_unknown_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        split_pattern.check(pattern)


@pytest.mark.parametrize(("longest", "more"), [("a" * 4096, "a" * 4097), ("a{1,32}", "a{1,33}"), ("b{32}", "b{33}")])
def test_how_long_a_pattern_and_its_repeats_may_be(longest: str, more: str) -> None:
    split_pattern.check(longest)
    with pytest.raises(ValueError, match=r"at most 4096|more than 32 times"):
        split_pattern.check(more)
