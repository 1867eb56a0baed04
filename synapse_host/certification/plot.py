"""A scatter plot as inline SVG: points, two axes, a line of threshold. Colours are the page's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

WIDTH: Final = 460
HEIGHT: Final = 270
LEFT: Final = 62
RIGHT: Final = WIDTH - 14
TOP: Final = 14
BASE: Final = HEIGHT - 42


class Axis(NamedTuple):
    """One axis from *low* to *high* (exponents of ten where *log*), drawn from pixel *start* to *end*."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        place = math.log10(value) if self.log else value
        return self.start + (place - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values along it: powers of ten, or about five steps of 1, 2 or 5."""
        if self.log:
            return [10.0**n for n in range(int(self.low), int(self.high) + 1)]
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def scatter(
    title: str,
    points: Sequence[tuple[float, float]],
    *,
    x: str,
    y: str,
    log_y: bool = False,
    allowed: float | None = None,
    diagonal: bool = False,
) -> str:
    """Return a figure with one dot a point; *allowed* draws that height, *diagonal* where both axes are equal."""
    if not points:
        return _figure(title, _text(LEFT, HEIGHT / 2, "nothing finite to show", "start"))
    heights = [b for _, b in points] + ([allowed] if allowed else [])
    across = _padded([a for a, _ in points])
    if log_y:
        tens = [math.log10(value) for value in heights if value > 0]
        up = (float(math.floor(min(tens) - 1e-9)), float(math.ceil(max(tens) + 1e-9)))
    else:
        up = _padded(heights if diagonal else [0.0, *heights])
    if diagonal:
        across = up = (min(across[0], up[0]), max(across[1], up[1]))
    h, v = Axis(*across, LEFT, RIGHT), Axis(*up, BASE, TOP, log_y)
    parts = [_line(LEFT, v.at(tick), RIGHT, v.at(tick), "line") for tick in v.ticks()]
    parts += [_text(LEFT - 7, v.at(tick) + 4, _short(tick), "end") for tick in v.ticks()]
    parts += [_text(h.at(tick), BASE + 16, _short(tick), "middle") for tick in h.ticks()]
    parts += [_text((LEFT + RIGHT) / 2, HEIGHT - 6, x, "middle"), _text(LEFT, TOP - 3, y, "start")]
    if diagonal:
        parts.append(_line(h.at(across[0]), v.at(up[0]), h.at(across[1]), v.at(up[1]), "soft"))
    if allowed:
        height = v.at(allowed)
        parts += [_line(LEFT, height, RIGHT, height, "bad"), _text(RIGHT, height - 5, f"allowed: {allowed:g}", "end")]
    parts += [f'<circle cx="{h.at(a):.1f}" cy="{v.at(b):.1f}" r="2.6"/>' for a, b in points]
    return _figure(title, "".join(parts))


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * 0.04 or max(1e-9, abs(high) * 0.1)
    return (low if low == 0 else low - room), high + room


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="var(--{colour})"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _short(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-") if 0 < abs(value) < 1e-3 else f"{value:.4g}"


def _figure(title: str, inner: str) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{inner}</svg></figure>'
    )
