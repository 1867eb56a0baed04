"""The probe texts behind the goldens: short and long, many scripts, code, repetition, odd spacing."""

from __future__ import annotations

TEXTS = [
    "a",
    "?",
    "The cat sat on the mat.",
    "A feline rested on a rug.",
    "Interest rates rose on Tuesday after the central bank's surprise announcement.",
    "def add(a: int, b: int) -> int:\n    return a + b  # trivial",
    "SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name HAVING COUNT(*) > 1;",
    "Die Katze saß auf der Fußmatte und träumte von Übergrößen.",
    "El rápido zorro marrón salta sobre el perro perezoso mañana por la tarde.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "東京は日本の首都であり、世界最大級の都市圏を形成している。",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "नमस्ते दुनिया, आज मौसम कैसा है?",
    "안녕하세요 세계, 오늘 날씨가 어떤가요?",
    "Γειά σου Κόσμε, τι καιρό κάνει σήμερα;",
    "🙂🚀🔥 emoji 👩‍👩‍👧‍👦 family and flags 🇩🇪🇯🇵",
    "https://example.org/path?q=1&lang=en#frag +49 (0)30 123456-78 mail@example.org",
    "the the the the the the the the the the the the the the the the the the the the the the the the",
    "zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz",
    "   leading and   inner    spaces\tand\ttabs\nand newlines   ",
    "Müller café naïve résumé ＦＵＬＬＷＩＤＴＨ ﬁ ligature Å Å",
    "[SEP] is text here, and so are [CLS], [MASK] and <|im_end|>.",
    "3.14159 2.71828 1,000,000 0x1F 1e-9 42%",
    "I",
    "No.",
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows of"
    " outrageous fortune, or to take arms against a sea of troubles and by opposing end them.",
    "Quarterly revenue grew 12% year over year, driven by cloud subscriptions; operating margin narrowed slightly.",
    "Photosynthesis converts light energy into chemical energy stored in glucose, releasing oxygen as a by-product.",
]

PARAGRAPH = (
    "Inference engines fail in many ways: they run out of memory, meet a shape they never saw, or wait for a device "
    "that will not answer. A supervisor that shares their address space shares their fate. So each engine lives in a "
    "process of its own, does one thing at a time, and says what it has finished. Silence for too long means it hangs; "
    "a closed socket means it died; either way the caller gets an answer, and the next request finds a fresh worker. "
)

QUERIES = {
    "How many people live in Berlin?": [
        "Berlin has a population of 3,520,031 registered inhabitants in an area of 891.82 square kilometers.",
        "In 2023 the German capital counted roughly 3.8 million residents.",
        "The population of Germany was about 83 million in 2020.",
        "New York City is famous for the Metropolitan Museum of Art.",
        "How many people live in Berlin?",
        "柏林有三百多万人口。",
        "x",
    ],
    "what is the fastest land animal": [
        "The cheetah is the fastest land animal, reaching speeds of up to 112 kilometres per hour.",
        "The peregrine falcon is the fastest bird; it dives at more than 300 kilometres per hour.",
        "Snails are slow. Tortoises are slow as well.",
        "speed speed speed speed speed speed speed speed animal animal animal animal",
        "🐆",
    ],
    "python list comprehension example": [
        "squares = [n * n for n in range(10) if n % 2 == 0]",
        "A python is a large snake that kills its prey by constriction.",
        "In Python, list comprehensions build lists from iterables: [f(x) for x in xs if cond(x)].",
        "Java streams offer map, filter and collect.",
    ],
    "Wer schrieb Faust?": [
        "Faust ist eine Tragödie von Johann Wolfgang von Goethe.",
        "Die Faust ballte sich vor Wut.",
        "Friedrich Schiller schrieb Die Räuber.",
    ],
}
