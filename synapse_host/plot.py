"""Small plots as inline SVG: points, lines of threshold, bars. Coordinates and labels only; colours are the page's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 460
HEIGHT: Final = 270
LEFT: Final = 62
RIGHT: Final = 14
TOP: Final = 14
BOTTOM: Final = 42


@dataclass(frozen=True, slots=True)
class Line:
    """A horizontal line at *value* with its words."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; ``note`` shows above it."""

    label: str
    value: float
    note: str = ""


def ticks(low: float, high: float) -> list[float]:
    """Return about five round values from *low* to *high*."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    found = []
    while first * step <= high + step * 1e-9:
        found.append(first * step)
        first += 1
    return found


def scatter(
    title: str,
    points: Sequence[tuple[float, float]],
    *,
    x: str,
    y: str,
    log_y: bool = False,
    line: Line | None = None,
    diagonal: bool = False,
) -> str:
    """Return a figure with one dot a point; *diagonal* draws where both axes are equal."""
    if not points:
        return _figure(title, f'<text x="{LEFT}" y="{HEIGHT // 2}" fill="currentColor">nothing finite to show</text>')
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    heights = [*ys, *([line.value] if line else [])]
    x_low, x_high = _padded(min(xs), max(xs))
    if log_y:
        exponents = [math.log10(value) for value in heights if value > 0]
        y_low, y_high = float(math.floor(min(exponents) - 1e-9)), float(math.ceil(max(exponents) + 1e-9))
    else:
        y_low, y_high = _padded(0.0 if min(heights) >= 0 and not diagonal else min(heights), max(heights))
    if diagonal:
        x_low = y_low = min(x_low, y_low)
        x_high = y_high = max(x_high, y_high)

    def at_x(value: float) -> float:
        return LEFT + (value - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def at_y(value: float) -> float:
        height = math.log10(value) if log_y else value
        return HEIGHT - BOTTOM - (height - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    y_ticks = [10.0**n for n in range(int(y_low), int(y_high) + 1)] if log_y else ticks(y_low, y_high)
    parts = [_axes(ticks(x_low, x_high), y_ticks, at_x, at_y, x, y)]
    if diagonal:
        parts.append(_stroke(at_x(x_low), at_y(y_low), at_x(x_high), at_y(y_high), "var(--soft)"))
    if line:
        parts.append(_threshold(line, at_y(line.value)))
    parts += [
        f'<circle cx="{at_x(a):.1f}" cy="{at_y(b):.1f}" r="2.6" fill="var(--dot)" fill-opacity=".6"/>'
        for a, b in points
    ]
    return _figure(title, "".join(parts))


def bars(title: str, values: Sequence[Bar], *, line: Line | None = None) -> str:
    """Return a figure with one bar a share, from 0 to 1."""
    room = (WIDTH - LEFT - RIGHT) / max(1, len(values))

    def at_x(value: float) -> float:
        return LEFT + value * room

    def at_y(value: float) -> float:
        return HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM)

    parts = [_axes([], ticks(0, 1), at_x, at_y, "", "share")]
    small = len(values) > 10
    for number, bar in enumerate(values):
        middle = at_x(number + 0.5)
        height = at_y(0) - at_y(min(1, bar.value))
        parts.append(
            f'<rect x="{middle - room * 0.36:.1f}" y="{at_y(0) - height:.1f}" width="{room * 0.72:.1f}" '
            f'height="{height:.1f}" rx="2" fill="var(--dot)" fill-opacity=".75"/>'
            f"{_text(middle, HEIGHT - BOTTOM + 16, bar.label, 'middle', 9 if small else 11)}"
        )
        if bar.note and not small:
            parts.append(_text(middle, at_y(0) - 6, bar.note, "middle", 9, "var(--ink)"))
    if line:
        parts.append(_threshold(line, at_y(line.value)))
    return _figure(title, "".join(parts))


def _padded(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.04 or max(1e-9, abs(high) * 0.1) or 1.0
    return (low if low == 0 else low - room), high + room


def _axes(
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
    x: str,
    y: str,
) -> str:
    base, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in y_ticks:
        parts.append(
            f'<line x1="{LEFT}" x2="{right}" y1="{at_y(value):.1f}" y2="{at_y(value):.1f}" stroke="var(--line)"/>'
        )
        parts.append(_text(LEFT - 7, at_y(value) + 4, _short(value), "end"))
    for value in x_ticks:
        parts.append(_text(at_x(value), base + 16, _short(value), "middle"))
    parts.append(_stroke(LEFT, base, right, base, "var(--soft)", dash=""))
    middle = (TOP + base) / 2
    parts.append(_text((LEFT + right) / 2, HEIGHT - 6, x, "middle"))
    parts.append(
        f'<text transform="translate(13 {middle:.0f}) rotate(-90)" text-anchor="middle" font-size="11" '
        f'fill="var(--soft)">{escape(y)}</text>'
    )
    return "".join(parts)


def _threshold(line: Line, at: float) -> str:
    above = at - 5 if at > TOP + 14 else at + 13
    # The words may lie on bars: a rim of the background keeps them readable.
    rim = '<g paint-order="stroke" stroke="var(--card)" stroke-width="3">'
    return (
        _stroke(LEFT, at, WIDTH - RIGHT, at, "var(--bad)")
        + rim
        + _text(WIDTH - RIGHT - 2, above, line.label, "end", 11, "var(--bad)")
        + "</g>"
    )


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "5 4") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'


def _text(x: float, y: float, words: str, anchor: str, size: int = 11, colour: str = "var(--soft)") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}">{escape(words)}</text>'


def _short(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.0e}".replace("e-0", "e-") if abs(value) < 1e-3 else f"{value:.4g}"


def _figure(title: str, inner: str) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{inner}</svg></figure>'
    )
