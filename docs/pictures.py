"""Draw the pictures of docs/how.md: python docs/pictures.py writes figures/buckets.svg, logits.svg.

In two dimensions, by the rules of the loss: a bucket holds the items with the largest products with
its centre, a hidden state belongs to the nearest centre (coverage), or a bucket takes the hidden
states with the largest products (the paper's rule).
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FIGURES = Path(__file__).parent / "figures"
COLOURS = ["#1f6fb4", "#d1495b", "#2e8b57", "#b8860b"]
GREY, INK, SIZE = "#b4b8bf", "#24292f", 300
Points = NDArray[np.float64]


def _text(x: float, y: float, words: str, size: int = 13) -> str:
    style = f'font-family="sans-serif" font-size="{size}" text-anchor="middle" fill="{INK}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{words}</text>'


def _save(name: str, width: int, height: int, parts: list[str]) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    (FIGURES / name).write_text("\n".join([head, ground, *parts, "</svg>"]) + "\n", "utf-8")


def _panel(left: int, title: str, coverage: bool) -> list[str]:
    """Items as dots, hidden states as squares, centres as arrows; colours are buckets."""
    random = np.random.default_rng(5)
    items, states = random.normal(size=(70, 2)), random.normal(size=(14, 2)) * 0.5 + [0.55, 0.75]
    angles = np.array([0.5, 2.0, 3.7, 5.3])
    centres = np.stack([np.cos(angles), np.sin(angles)], 1)
    places = np.concatenate([items, states])
    middle, scale = np.array([left + SIZE / 2, 40 + SIZE / 2]), SIZE / 6.4

    def at(point: Points) -> Points:
        return middle + point * [scale, -scale]

    chosen = np.argsort(-(items @ centres.T), axis=0)[:12]  # [12, buckets]
    colour = dict.fromkeys(range(len(items)), GREY)
    for bucket, own in enumerate(chosen.T):
        colour |= {int(item): COLOURS[bucket] for item in own}
    parts = [_text(left + SIZE / 2, 24, title, 15)]
    for item in range(len(items)):
        x, y = at(places[item])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour[item]}"/>')
    scores = states @ centres.T
    best = np.argsort(-scores, axis=0)[:4]  # [4, buckets]: the paper's rule
    for state, point in enumerate(states):
        x, y = at(point)
        buckets = [int(scores[state].argmax())] if coverage else np.where((best == state).any(0))[0]
        fill = COLOURS[buckets[-1]] if len(buckets) else "#ffffff"
        parts.append(
            f'<rect x="{x - 6:.1f}" y="{y - 6:.1f}" width="12" height="12" fill="{fill}" '
            f'stroke="{INK}" stroke-width="1.6"/>'
        )
    for bucket, centre in enumerate(centres):
        (x0, y0), (x, y) = at(np.zeros(2)), at(centre * 2.7)
        parts.append(
            f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x:.1f}" y2="{y:.1f}" '
            f'stroke="{COLOURS[bucket]}" stroke-width="2.5"/>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{COLOURS[bucket]}"/>'
        )
    return parts


def draw_buckets() -> None:
    """Both rules beside each other."""
    words = (
        "dots: items · squares: hidden states · lines: centres · colours: buckets · white: in none"
    )
    panels = [
        *_panel(10, "the paper's rule: buckets choose states", coverage=False),
        *_panel(SIZE + 40, "coverage: states choose buckets", coverage=True),
    ]
    _save("buckets.svg", 2 * SIZE + 50, SIZE + 80, [*panels, _text(SIZE + 25, SIZE + 66, words)])


def draw_logits() -> None:
    """Which logits are computed: all of them, or those of the items in a state's bucket."""
    random, parts = np.random.default_rng(1), []
    for left, title in ((10, "exact cross-entropy"), (350, "SCE")):
        fill = COLOURS[1] if left == 10 else "#f0f1f3"
        parts += [
            _text(left + 150, 24, title, 15),
            f'<rect x="{left}" y="40" width="300" height="120" fill="{fill}" stroke="{INK}"/>',
            _text(left + 150, 182, "items of the catalogue →"),
        ]
    buckets = [random.choice(100, 9, replace=False) for _ in COLOURS]
    for state in range(12):
        for item in buckets[state % 4]:
            parts.append(
                f'<rect x="{350 + 3 * item}" y="{40 + 10 * state}" width="3" height="10" '
                f'fill="{COLOURS[state % 4]}"/>'
            )
    words = "rows: hidden states · filled: logits that are computed"
    _save("logits.svg", 660, 220, [*parts, _text(330, 208, words)])


if __name__ == "__main__":
    draw_buckets()
    draw_logits()
