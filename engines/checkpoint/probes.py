"""Probe inputs for reference fixtures: what a model is asked when its numbers are compared with a reference.

At least 256 per task, the same for every model: plain sentences of many topics, other scripts, code, repetition, odd
spacing and characters, and a ladder of lengths. They are made here, by rule, so that nobody has to ship them twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_TOPICS: Final = (
    ("the harbour", "ships", "unload grain before the tide turns"),
    ("a data centre", "engineers", "replace failing disks at night"),
    ("the orchard", "pickers", "sort apples by colour and size"),
    ("an old library", "archivists", "scan letters written in pencil"),
    ("the clinic", "nurses", "measure blood pressure every hour"),
    ("a mountain railway", "drivers", "slow down before every curve"),
    ("the observatory", "astronomers", "wait for clouds to pass"),
    ("a bakery", "apprentices", "fold butter into dough"),
    ("the parliament", "members", "argue about the budget until dawn"),
    ("a violin workshop", "makers", "bend spruce with steam"),
    ("the reef", "divers", "count fish along a rope"),
    ("a small theatre", "actors", "learn two roles each"),
)
_FORMS: Final = (
    "At {0}, {1} {2}.",
    "Why do {1} at {0} {2}?",
    "A report says that {1} at {0} rarely {2}.",
    "{1}, {0}, {2}",
    "How to help {1} {2} at {0}: a short guide for beginners and their teachers.",
    "It is not true that {1} {2} at {0}; the opposite was observed on Tuesday.",
    "Nobody at {0} remembers when {1} began to {2}, but everyone agrees that it costs less than 4.5% of the budget.",
    "TODO: ask {1} at {0} whether they still {2} (see ticket #1042).",
)
_WHEN: Final = ("today", "every other week", "since the war", "without being paid", "in the rain", "as children do")
_WHEN_MORE: Final = ("before breakfast", "by law")
_SCRIPTS: Final = (
    "Im Hafen löschen Schiffe Getreide, bevor die Flut kommt.",
    "Warum falten Lehrlinge Butter in den Teig? Übung macht den Meister.",
    "Les infirmières mesurent la tension artérielle toutes les heures, même à l'aube.",
    "El observatorio espera a que pasen las nubes; mañana habrá más suerte.",
    "Gli attori imparano due ruoli ciascuno nel piccolo teatro.",
    "Os mergulhadores contam peixes ao longo de uma corda no recife.",
    "Dyrektor biblioteki skanuje listy pisane ołówkiem.",
    "Kütüphanede eski mektuplar taranıyor, çünkü kâğıt çok ince.",
    "Машинист замедляет ход перед каждым поворотом горной железной дороги.",
    "Чому майстри згинають ялину парою?",
    "Η βιβλιοθήκη σαρώνει παλιά γράμματα γραμμένα με μολύβι.",
    "港では潮が変わる前に船が穀物を降ろします。",
    "天文学家在等待云层散去，望远镜已经准备好了。",
    "파이를 만들기 전에 반죽에 버터를 접어 넣습니다.",
    "ممرضات العيادة يقسن ضغط الدم كل ساعة.",
    "השחקנים לומדים שני תפקידים כל אחד.",
    "नर्सें हर घंटे रक्तचाप मापती हैं।",
    "ทีมดำน้ำนับปลาตามแนวเชือก",
    "Thuyền dỡ ngũ cốc trước khi thủy triều lên.",
    "Wasafiri wanasubiri mawingu yapite juu ya mlima.",
)
_ODD: Final = (
    "a",
    "I",
    "?",
    "42",
    "yes",
    "no no no no no no no no no no no no",
    "buffalo buffalo Buffalo buffalo buffalo buffalo Buffalo buffalo",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "...---...---...---",
    "🙂🚀🔥 three of them, then 👩‍👩‍👧‍👦 and 🇩🇪🇯🇵",
    "   spaces   between\tand\ttabs\nand lines\r\nand more   ",
    "ＦＵＬＬ ＷＩＤＴＨ ﬁne ligatures, Å and Å, naïve café",
    "[CLS] and [SEP] are text here, <|im_end|> and </s> too",
    "https://example.org/a/b?c=d&e=%20f#g",
    "mail@example.org, +49 (0)30 123456-78, 12:30-14:00, 2026-11-29",
    "3.14159 2.71828 1,000,000 0x1F 1e-9 -0 50% ½ ²",
    "SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name HAVING COUNT(*) > 1;",
    "def add(a: int, b: int) -> int:\n    return a + b",
    "for (int i = 0; i < n; ++i) { sum += x[i] * y[i]; }",
    'fn main() { println!("{}", (1..=10).map(|n| n * n).sum::<u64>()); }',
    '{"name": "toy", "list": [1, 2, {"deep": null}], "ok": true}',
    "<div class=\"row\"><a href='#'>link</a> &amp; text</div>",
    "Traceback (most recent call last): ZeroDivisionError: division by zero",
    "$ git log --oneline | head -n 3 && make test",
    "∀x ∈ ℝ: x² ≥ 0 ∧ √(x²) = |x|",
    "\\begin{equation} e^{i\\pi} + 1 = 0 \\end{equation}",
    "WHY IS EVERYTHING WRITTEN IN CAPITALS TODAY",
    "wHy Is EvErYtHiNg MiXeD",
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "Donaudampfschifffahrtsgesellschaftskapitänsmütze",
)
_PARAGRAPH: Final = (
    "Engines fail in many ways: they run out of memory, meet a shape they never saw, or wait for a device that will "
    "not answer. A supervisor that shares their address space shares their fate, so each one lives in a process of its "
    "own. At the harbour nobody would store grain and sparks in one shed either. Silence for too long means that "
    "something hangs; a closed line means that it died; in both cases whoever asked gets an answer and the next one is "
    "served. "
)
_LADDER: Final = (8, 12, 20, 28, 36, 44, 52, 60, 70, 80, 95, 110, 125, 140, 160, 180, 200, 230, 260, 300, 340, 380)


def texts() -> list[str]:
    """Return the probe texts for embedding, 256 and a few, all different and none empty."""
    found = [form.format(*topic) for topic in _TOPICS for form in _FORMS]
    found += [f"{topic[1].capitalize()} {topic[2]} {when}." for topic in _TOPICS for when in (*_WHEN, *_WHEN_MORE)]
    found += [*_SCRIPTS, *_ODD]
    words = (_PARAGRAPH * 6).split()
    found += [" ".join(words[n % 60 : n % 60 + n]) for n in _LADDER]
    return list(dict.fromkeys(found))


def pairs() -> list[tuple[str, str]]:
    """Return the probe pairs for reranking, 256 and a few: right answers, near misses, other topics, odd ones."""
    found: list[tuple[str, str]] = []
    words = (_PARAGRAPH * 6).split()
    for number, (place, people, deed) in enumerate(_TOPICS):
        query = f"who {deed.split()[0]}s at {place}?" if number % 3 else f"what do {people} do at {place}"
        other = _TOPICS[(number + 5) % len(_TOPICS)]
        documents = [
            f"At {place}, {people} {deed}.",
            f"{people.capitalize()} {deed} every day, in summer and in winter.",
            f"{place} is closed on Mondays.",
            f"At {other[0]}, {other[1]} {other[2]}.",
            query,
            _SCRIPTS[number],
            _ODD[number],
            f"{place} " * 12,
            " ".join(words[number : number + 40]) + f" At {place}, {people} {deed}.",
            f"At {place}, {people} {deed}. " + " ".join(words[number : number + 150]),
            f"Nobody has ever seen {people} at {place}.",
            " ".join(f"{people} {deed} {when}." for when in (*_WHEN, *_WHEN_MORE)),
        ]
        found += [(query, document) for document in documents]
        found += [(_SCRIPTS[number], document) for document in documents[:3]]
        found += [(people, document) for document in documents[:4]]
        found += [(_ODD[number + 12], document) for document in documents[1:4]]
    return found


def prompts() -> list[str]:
    """Return the probe prompts for generation, more than are kept: texts, questions, sentences half said."""
    asked = [f"Question: {form.format(*topic)}\nAnswer:" for topic in _TOPICS for form in (_FORMS[1], _FORMS[4])]
    asked += [f"The most important thing about {place} is that {people}" for place, people, _ in _TOPICS]
    asked += [f"{people.capitalize()} {deed} because" for _, people, deed in _TOPICS]
    asked += [f"{place.capitalize()} is a place where {people} {deed}, and where" for place, people, deed in _TOPICS]
    return [text for text in texts() if len(text) > 1] + asked


def edges(ids: Sequence[int], limit: int) -> list[list[int]]:
    """Return rows of ids that no text gives: lengths 1, 2, limit - 1 and limit, and one id repeated.

    *ids*: ids without special ones, as they occur in texts, two at least.
    """
    endless = [*ids] * (limit // len(ids) + 1)
    word = ids[len(ids) // 2]
    return [endless[:1], endless[:2], endless[: limit - 1], endless[:limit], [word] * min(64, limit)]
