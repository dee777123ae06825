"""Draw the figures of docs/explanations/ as SVG files in docs/figures/.

    python -m scripts.draw_docs_figures [--out FOLDER]

The files follow the light or dark mode of the reader: colors are CSS variables with two values. Text stays text, so it
can be searched and is read aloud; the font is the reader's.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from niels_gpt.model.rope import rope_cache
from niels_gpt.splice import SpliceDocumentDataset

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
COLORS = {  # name: (light, dark)
    "page": ("#fbfbfa", "#20242c"),
    "ink": ("#23272e", "#e4e7ec"),
    "muted": ("#5f6875", "#a3acba"),
    "line": ("#b9c0c9", "#4b5361"),
    "cell": ("#eceef1", "#2b313b"),
    "blue": ("#2f6fb5", "#7fb4ee"),
    "blue_cell": ("#b9d5f3", "#28456a"),
    "green": ("#1d7f64", "#6fd0b1"),
    "green_cell": ("#cdebe0", "#1d5145"),
    "orange": ("#b4570d", "#f2a766"),
    "orange_cell": ("#fae0c6", "#69401d"),
}
PAGE, INK, MUTED, LINE, CELL, BLUE, BLUE_CELL, GREEN, GREEN_CELL, ORANGE, ORANGE_CELL = (
    light for light, _ in COLORS.values()
)
WIDTH = 5.4
"""Inches; a phone shows it at about two thirds of its size, so texts have at least 10 points."""


def canvas(height: float, columns: float, rows: float) -> tuple[Figure, Axes]:
    """A figure with one axis from (0, 0) at the top left to (columns, rows)."""
    figure = plt.figure(figsize=(WIDTH, height), facecolor=PAGE)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    return figure, axes


def label(axes: Axes, x: float, y: float, text: str, color: str = INK, size: float = 11, align: str = "center") -> None:
    axes.text(x, y, text, color=color, fontsize=size, ha=align, va="center")


def box(axes: Axes, x: float, y: float, width: float, height: float, fill: str, edge: str) -> None:
    """A rounded box around the center (x, y)."""
    corner = (x - width / 2, y - height / 2)
    shape = FancyBboxPatch(corner, width, height, boxstyle="round,pad=0,rounding_size=0.12", fc=fill, ec=edge, lw=1.2)
    axes.add_patch(shape)


def arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], color: str = MUTED) -> None:
    axes.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=11, color=color, lw=1.2))


def cells(axes: Axes, x: float, y: float, colors: Sequence[Sequence[str]], size: float = 1.0) -> None:
    """A grid of cells, one color each, from (x, y) on."""
    for i, row in enumerate(colors):
        for j, color in enumerate(row):
            axes.add_patch(Rectangle((x + j * size, y + i * size), size, size, fc=color, ec=PAGE, lw=1.5))


def attention_shapes() -> Figure:
    """Draw the shapes of one attention module, top to bottom."""
    figure, axes = canvas(6.2, 10.8, 12.4)
    for y, name, shape in ((0.7, "x", "(B, n, C)"), (2.5, "qkv(x)", "(B, n, (H + 2 G) · D)")):
        box(axes, 5.4, y, 5.4, 0.95, CELL, LINE)
        label(axes, 5.4, y, f"{name}   {shape}")
    arrow(axes, (5.4, 1.2), (5.4, 2.0))
    label(axes, 5.65, 1.6, "qkv: Linear", MUTED, 10, "left")
    columns = (1.9, BLUE_CELL, BLUE, "q  (B, H, n, D)"), (5.4, GREEN_CELL, GREEN, "k  (B, G, n, D)")
    for x, fill, edge, text in (*columns, (8.9, ORANGE_CELL, ORANGE, "v  (B, G, n, D)")):
        arrow(axes, (5.4 + (x - 5.4) * 0.5, 3.0), (x, 3.9))
        box(axes, x, 4.4, 3.3, 0.95, fill, edge)
        label(axes, x, 4.4, text, size=10.5)
    label(axes, 8.0, 3.25, "split, transpose", MUTED, 10, "left")
    for x in (1.9, 5.4):
        arrow(axes, (x, 4.9), (x, 5.6))
        box(axes, x, 6.1, 3.3, 0.95, CELL, LINE)
        label(axes, x, 6.1, "RoPE: rotate")
        arrow(axes, (x, 6.6), (3.65 + (x - 3.65) * 0.4, 7.35))
    box(axes, 3.65, 7.85, 6.8, 0.95, CELL, LINE)
    label(axes, 3.65, 7.85, "q kᵀ / √D + causal mask   (B, H, n, n)", size=10.5)
    arrow(axes, (3.65, 8.35), (3.65, 9.05))
    box(axes, 3.65, 9.55, 6.8, 0.95, CELL, LINE)
    label(axes, 3.65, 9.55, "softmax: rows sum to 1   (B, H, n, n)", size=10.5)
    arrow(axes, (3.65, 10.05), (4.9, 11.1))
    arrow(axes, (8.9, 4.9), (6.6, 11.1))
    label(axes, 8.3, 8.7, "weighted\nmean of v", MUTED, 10, "left")
    box(axes, 5.4, 11.6, 7.6, 0.95, CELL, LINE)
    label(axes, 5.4, 11.6, "heads side by side (B, n, H · D = C), then out: Linear", size=10)
    return figure


def rope_rotation() -> Figure:
    """Draw three pairs of a vector at positions 0 to 3, with the angles of `rope_cache`."""
    figure = plt.figure(figsize=(WIDTH, 2.3), facecolor=PAGE)
    sin, cos = rope_cache(8, 8, theta=100.0)
    start = np.array([0.95, 0.2])
    for panel, (pair, title) in enumerate(((0, "pair 0: fast"), (1, "pair 1: slower"), (2, "pair 2: slow"))):
        axes = figure.add_axes((0.01 + panel * 0.33, 0.0, 0.32, 0.86))
        axes.set_axis_off()
        axes.set_aspect("equal")
        axes.set_xlim(-1.35, 1.35)
        axes.set_ylim(-1.35, 1.35)
        axes.add_patch(plt.Circle((0, 0), 1.0, fc="none", ec=LINE, lw=1))
        for position in range(4):
            s, c = float(sin[0, 0, position, pair]), float(cos[0, 0, position, pair])
            end = np.array([start[0] * c - start[1] * s, start[0] * s + start[1] * c])
            axes.plot([0, end[0]], [0, end[1]], color=BLUE if position else ORANGE, lw=1.8, solid_capstyle="round")
            far = 1.2 * end / np.linalg.norm(end)
            if pair < 2 or position in (0, 3):  # the others would overlap
                label(axes, far[0], far[1], str(position), BLUE if position else ORANGE, 10)
        figure.text(0.17 + panel * 0.33, 0.9, title, color=INK, fontsize=10.5, ha="center")
    return figure


def rope_distance() -> Figure:
    """Draw the score of one query and one key by their distance, at two positions of the query."""
    figure = plt.figure(figsize=(WIDTH, 2.9), facecolor=PAGE)
    axes = figure.add_axes((0.12, 0.2, 0.84, 0.66), facecolor=PAGE)
    T, D = 256, 64
    sin, cos = (table[0, 0].double() for table in rope_cache(T, D))
    q = k = torch.view_as_complex(torch.ones(D // 2, 2, dtype=torch.float64))
    turn = torch.complex(cos, sin)

    def score(at: int, distance: int) -> float:
        rotated = (torch.view_as_real(vector).flatten() for vector in (q * turn[at], k * turn[at - distance]))
        return float(torch.dot(*rotated)) / math.sqrt(D)

    for position, color, style, width in ((100, BLUE_CELL, "-", 6.0), (250, BLUE, "-", 1.6)):
        scores = [score(position, distance) for distance in range(100)]
        axes.plot(scores, style, color=color, lw=width, label=f"query at position {position}")
    axes.set_xlabel("distance between query and key", color=INK, fontsize=10.5)
    axes.set_title("score q · k / √D of two vectors of ones", color=INK, fontsize=11)
    axes.tick_params(colors=MUTED, labelsize=10)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LINE)
    axes.legend(frameon=False, labelcolor=INK, fontsize=10)
    return figure


def causal_mask() -> Figure:
    """Draw which position sees which."""
    figure, axes = canvas(3.5, 13.6, 8.8)
    text = "a note"
    n = len(text)
    cells(axes, 2.2, 1.9, [[BLUE_CELL if j <= i else CELL for j in range(n)] for i in range(n)])
    for i, character in enumerate(text.replace(" ", "␣")):
        label(axes, 2.7 + i, 1.45, character)
        label(axes, 1.8, 2.4 + i, character)
    label(axes, 5.2, 0.6, "is read (keys)", MUTED, 10)
    axes.text(0.7, 4.9, "reads (queries)", color=MUTED, fontsize=10, rotation=90, ha="center", va="center")
    for i, target in enumerate("␣note"):
        label(axes, 9.0, 2.4 + i, f"→ predicts  {target}", INK, 11, "left")
    label(axes, 9.0, 7.4, "→ predicts the next", INK, 11, "left")
    cells(axes, 2.2, 8.15, [[BLUE_CELL]], 0.5)
    label(axes, 2.9, 8.4, "seen", MUTED, 10, "left")
    cells(axes, 4.6, 8.15, [[CELL]], 0.5)
    label(axes, 5.3, 8.4, "masked: weight 0", MUTED, 10, "left")
    return figure


def loss_mask() -> Figure:
    """Draw the inputs and targets of one conversation."""
    figure, axes = canvas(2.75, 15.2, 7.4)
    tokens = ["<usr>", "where", "?", "<eot>", "<asst>", "in", "bed", "<eot>", "<eot>", "<eot>"]
    supervised = range(5, 8)
    for y, name, shown, marked in (
        (1.0, "x", tokens[:-1], ()),
        (3.0, "y", tokens[1:], ()),
        (5.0, "y_masked", [t if i + 1 in supervised else "-100" for i, t in enumerate(tokens[1:])], supervised),
    ):
        label(axes, 2.3, y, name, INK, 10.5, "right")
        for i, token in enumerate(shown):
            counted = i + 1 in marked
            box(axes, 3.15 + i * 1.36, y, 1.28, 1.1, ORANGE_CELL if counted else CELL, ORANGE if counted else LINE)
            label(axes, 3.15 + i * 1.36, y, token, INK if counted or token != "-100" else MUTED, 9)
    label(axes, 2.5, 6.6, "orange: carries the loss; the last two <eot> of y are padding", MUTED, 10, "left")
    return figure


def segment_mask() -> Figure:
    """Draw a splice frame: its tokens, loss mask and segments, and which position sees which."""
    figure, axes = canvas(4.9, 15.2, 13.8)
    dataset = SpliceDocumentDataset(
        S=8, doc_tokens=np.array([11, 12, 13, 14], dtype=np.int32), pad_token_id=0, content_length=4,
        content_start_mode="anchor_start", offset_bound="tight",
    )  # fmt: skip
    frame = next(dataset[i] for i in range(len(dataset)) if dataset[i].origin.s == 3)
    names = {0: "·", 11: "the", 12: "text", 13: "of", 14: "it"}
    segment_colors = {0: CELL, 1: GREEN_CELL}
    for y, title, values, colors in (
        (0.9, "tokens", [names[int(t)] for t in frame.tokens], [segment_colors[int(s)] for s in frame.segment_ids]),
        (2.1, "loss_mask", frame.loss_mask, [ORANGE_CELL if m else CELL for m in frame.loss_mask]),
        (3.3, "segment_ids", frame.segment_ids, [segment_colors[int(s)] for s in frame.segment_ids]),
    ):
        label(axes, 3.5, y, title, INK, 10.5, "right")
        for i, (value, color) in enumerate(zip(values, colors, strict=True)):
            box(axes, 4.6 + i * 1.2, y, 1.12, 0.95, color, LINE)
            label(axes, 4.6 + i * 1.2, y, str(value), INK, 10)
    ids = frame.segment_ids
    size = 0.95
    seen = [[j <= i and ids[i] == ids[j] for j in range(8)] for i in range(8)]
    grid = [[(GREEN if ids[i] else LINE) if seen[i][j] else CELL for j in range(8)] for i in range(8)]
    axes.add_patch(Rectangle((4.04, 4.9), 8 * size, 8 * size, fc=PAGE, ec=LINE, lw=1.2))
    cells(axes, 4.04, 4.9, grid, size)
    axes.text(3.4, 8.7, "reads", color=MUTED, fontsize=10, rotation=90, ha="center", va="center")
    label(axes, 7.8, 13.1, "is read", MUTED, 10)
    label(axes, 12.0, 6.0, "filler sees\nfiller", MUTED, 10, "left")
    label(axes, 12.0, 9.8, "the span and\nwhat follows\nsee the span,\nnot the filler\nbefore it", MUTED, 10, "left")
    return figure


def batch_function() -> Figure:
    """Draw how the rows of a step follow from the seed and the step."""
    figure, axes = canvas(4.3, 10.8, 8.6)
    steps = (
        (0.75, "seed 42, “batch”, step 7", CELL, LINE),
        (2.35, "hash → 63-bit seed", BLUE_CELL, BLUE),
        (3.95, "plan: source and offset of each row", BLUE_CELL, BLUE),
        (5.55, "gather: copy the tokens of those rows", GREEN_CELL, GREEN),
        (7.15, "x, y  (B, T)", CELL, LINE),
    )
    for i, (y, text, fill, edge) in enumerate(steps):
        box(axes, 3.9, y, 6.6, 0.95, fill, edge)
        label(axes, 3.9, y, text, size=10.5)
        if i:
            arrow(axes, (3.9, steps[i - 1][0] + 0.5), (3.9, y - 0.55))
    box(axes, 9.2, 5.55, 2.5, 1.6, ORANGE_CELL, ORANGE)
    label(axes, 9.2, 5.55, "streams or\ncaches, with\nsha256", size=10)
    arrow(axes, (7.95, 5.55), (7.25, 5.55), ORANGE)
    label(axes, 3.9, 8.15, "nothing here depends on the steps before", MUTED, 10)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "attention-shapes": attention_shapes,
    "rope-rotation": rope_rotation,
    "rope-distance": rope_distance,
    "causal-mask": causal_mask,
    "loss-mask": loss_mask,
    "segment-mask": segment_mask,
    "batch-function": batch_function,
}


def with_color_scheme(svg: str) -> str:
    """Return an SVG whose light colors are CSS variables with a dark value, and whose font is the reader's."""
    for name, (light, _) in COLORS.items():
        svg = svg.replace(light, f"var(--{name.replace('_', '-')}, {light})")
    light, dark = (" ".join(f"--{name.replace('_', '-')}: {pair[i]};" for name, pair in COLORS.items()) for i in (0, 1))
    style = f"<style>:root {{ {light} }} @media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}</style>"
    svg = svg.replace("font-family: 'DejaVu Sans'", "font-family: system-ui, 'DejaVu Sans', sans-serif")
    return re.sub(r"(<svg [^>]*>)", lambda match: f"{match[1]}\n {style}", svg, count=1)


def draw(folder: Path) -> list[Path]:
    """Write every figure; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "niels-gpt", "font.family": "DejaVu Sans"}):
        for name, figure_of in FIGURES.items():
            figure, path = figure_of(), folder / f"{name}.svg"
            figure.savefig(path, format="svg", facecolor=PAGE, metadata={"Date": None, "Creator": None})
            plt.close(figure)
            path.write_text(with_color_scheme(path.read_text(encoding="utf-8")), encoding="utf-8")
            written.append(path)
    return written


def main() -> None:
    """Write the figures into a folder."""
    parser = argparse.ArgumentParser(prog="draw_docs_figures", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    for path in draw(parser.parse_args().out):
        print(path)


if __name__ == "__main__":
    main()
