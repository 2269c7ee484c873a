"""Draws the diagrams of the documentation, for light and dark pages: `python docs/diagrams.py` writes docs/*.svg."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

STYLE = """.bg{fill:#ffffff}.t{fill:#1f2328}.s{fill:#59636e}.b{fill:#f0f3f6;stroke:#afb8c1}.l{stroke:#59636e;fill:none}
.c0{fill:#ddf4ff;stroke:#54aeff}.c1{fill:#dafbe1;stroke:#4ac26b}.c2{fill:#fff1e5;stroke:#e16f24}.c3{fill:#fbefff;stroke:#a475f9}
@media (prefers-color-scheme: dark){.bg{fill:#0d1117}.t{fill:#e6edf3}.s{fill:#9198a1}.b{fill:#151b23;stroke:#3d444d}
.l{stroke:#9198a1}.c0{fill:#0c2d6b;stroke:#388bfd}.c1{fill:#0f3d20;stroke:#3fb950}.c2{fill:#5a2a0a;stroke:#f0883e}
.c3{fill:#3c1e70;stroke:#a371f7}}"""
# Of the type. A phone shows these pictures at 0.4 of their size.
SIZE = 16
ARROW = '<marker id="m" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
ARROW += '<path class="s" d="M0 0L8 4L0 8z"/></marker>'


def text(x: float, y: float, words: str, style: str = "t", anchor: str = "middle", size: int = SIZE) -> str:
    return f'<text class="{style}" x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, words: str = "", style: str = "b", size: int = SIZE) -> str:
    """A rectangle with its words in the middle, a line for each line of them."""
    lines = words.split("\n")
    top = y + height / 2 + size * 0.36 - (len(lines) - 1) * size * 0.65
    return f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>' + "".join(
        text(x + width / 2, top + i * size * 1.3, line, size=size) for i, line in enumerate(lines)
    )


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path class="l" d="M{x} {y}L{to_x} {to_y}" marker-end="url(#m)"/>'


def save(name: str, label: str, width: float, height: float, parts: Sequence[str]) -> None:
    """Writes docs/NAME.svg. label: what a reader without the picture is told."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}"'
    head += f' font-family="system-ui, sans-serif">\n<style>{STYLE}</style><defs>{ARROW}</defs>\n'
    head += f'<rect class="bg" width="{width}" height="{height}" rx="8"/>\n'
    Path(__file__).parent.joinpath(f"{name}.svg").write_text(head + "\n".join(parts) + "\n</svg>\n")


# What ranks 0, 1 and 2 have before and after the call: a cell for each part, coloured by the part's place.
WHOLE = ["a0 a1 a2", "b0 b1 b2", "c0 c1 c2"]
SUMS = "Σ0 Σ1 Σ2"
COLLECTIVES = {
    "broadcast, root 0": (["a0 a1 a2", "", ""], ["a0 a1 a2"] * 3),
    "all_reduce": (WHOLE, [SUMS] * 3),
    "reduce, root 0": (WHOLE, [SUMS, "", ""]),
    "reduce_scatter": (WHOLE, ["Σ0", "Σ1", "Σ2"]),
    "gather, root 0": (["a0", "b1", "c2"], ["a0 b1 c2", "", ""]),
    "all_gather": (["a0", "b1", "c2"], ["a0 b1 c2"] * 3),
    "scatter, root 0": (["a0 a1 a2", "", ""], ["a0", "a1", "a2"]),
    "all_to_all": (WHOLE, ["a0 b0 c0", "a1 b1 c1", "a2 b2 c2"]),
}


def cells(x: float, y: float, ranks: Sequence[str]) -> list[str]:
    parts = []
    for rank, row in enumerate(ranks):
        for place in range(3):
            word = dict(enumerate(row.split())).get(place, "")
            parts.append(box(x + 38 * place, y + 30 * rank, 36, 26, word, f"c{word[1]}" if word else "b"))
    return parts


def collectives() -> None:
    parts = []
    for number, (name, (before, after)) in enumerate(COLLECTIVES.items()):
        x, y = 30 + 440 * (number % 2), 24 + 138 * (number // 2)
        parts += [text(x, y + 8, name, anchor="start", size=18)]
        parts += [text(x + 18, y + 38 + 30 * rank, f"rank {rank}", "s") for rank in range(3)]
        parts += [
            *cells(x + 50, y + 20, before),
            arrow(x + 176, y + 63, x + 212, y + 63),
            *cells(x + 224, y + 20, after),
        ]
    save("collectives", "What three ranks have before and after each collective", 880, 572, parts)


def overlap() -> None:
    parts = [text(20, y, words, "s", "start") for y, words in ((52, "compute"), (112, "all-reduce"))]
    start = 110
    for words, width, style in (
        ("forward", 140, "b"),
        ("backward 4", 120, "c0"),
        ("3", 90, "c0"),
        ("2", 90, "c1"),
        ("1", 90, "c2"),
    ):
        parts.append(box(start, 32, width - 3, 32, words, style))
        start += width
    parts.append(box(750, 32, 90, 32, "step"))
    for x, width, words, style in (
        (254, 76, "control", "b"),
        (460, 110, "bucket 0", "c0"),
        (572, 80, "bucket 1", "c1"),
        (654, 92, "bucket 2", "c2"),
    ):
        parts.append(box(x, 92, width, 32, words, style))
    parts += [arrow(x, 66, to_x, 90) for x, to_x in ((462, 462), (576, 576), (636, 658))]
    parts += [text(694, 150, "exposed", "s"), '<path class="l" d="M640 134H746M640 130v8M746 130v8"/>']
    parts.append(text(20, 176, "A bucket leaves as soon as backward has completed its last gradient.", "s", "start"))
    save("overlap", "All-reduces of buckets run while backward computes the next gradients", 860, 194, parts)


def launch() -> None:
    parts = [box(320, 18, 220, 48, "ddp-launch -n 2 train.py\nsupervisor", "c3")]
    for rank, x in enumerate((130, 530)):
        parts += [
            arrow(430 - 60 + 120 * rank, 66, x + 100, 110),
            box(x, 112, 200, 48, f"agent of rank {rank}\nforks it, watches it", "c0"),
            arrow(x + 100, 162, x + 100, 204),
            box(x, 206, 200, 48, f"rank {rank}: python train.py", "c1"),
        ]
    parts += [
        text(430, 100, "output, heartbeats, exit status", "s"),
        text(430, 224, "memory that both map", "s"),
        arrow(400, 236, 334, 236),
        arrow(460, 236, 526, 236),
        text(430, 254, "or MPI, NCCL", "s"),
        text(430, 142, "signals, standard input", "s"),
    ]
    save("launch", "ddp-launch starts an agent for each rank, and the agent forks the rank", 860, 276, parts)


def commit() -> None:
    parts = []
    stages = (
        ("every rank writes its part", ".step-300.TOKEN.tmp/\nrank-0000.safetensors\nrank-0001.safetensors", "c0"),
        ("all agree; rank 0 writes", ".step-300.TOKEN.tmp/\nmanifest.json", "c2"),
        ("rank 0 renames", "step-300/", "c1"),
    )
    for number, (words, files, style) in enumerate(stages):
        x = 20 + 280 * number
        parts += [text(x + 115, 30, f"{number + 1}. {words}"), box(x, 44, 230, 74, files, style)]
        if number:
            parts.append(arrow(x - 48, 81, x - 6, 81))
    parts.append(box(20, 134, 510, 30, "killed here: the checkpoint before is the newest"))
    parts.append(box(580, 134, 230, 30, "killed here: this one is"))
    save("commit", "A checkpoint is written under another name and renamed when it is whole", 830, 184, parts)


def micro_batches() -> None:
    ranks = [0, 0, 0, 1, 1, 1, 2, 2]  # of three, who computes each of 8
    parts = [text(240 + 80 * number, 28, f"rank {rank}", "s") for rank, number in ((0, 1), (1, 4), (2, 6.5))]
    for level, length in enumerate((1, 2, 4, 8)):
        y = 42 + 62 * level
        for start in range(0, 8, length):
            middle = 240 + 80 * (start + (length - 1) / 2)
            owners = set(ranks[start : start + length])
            words = str(start) if length == 1 else f"{start} to {start + length - 1}"
            parts.append(box(middle - 34, y, 68, 32, words, f"c{owners.pop()}" if len(owners) == 1 else "b"))
            if level:
                parts += [arrow(middle + side * 20 * length, y - 28, middle + side * 20, y - 2) for side in (-1, 1)]
    parts += [text(20, 64 + 62 * level, words, "s", "start") for level, words in ((0, "micro-batches"), (3, "one sum"))]
    caption = "In colour: added on the rank that computed it. Grey: added after the exchange, each part on one rank."
    parts.append(text(20, 282, caption, "s", "start"))
    save("micro_batches", "Eight micro-batches on three ranks are added in one binary tree", 860, 300, parts)


def favicon() -> None:
    bars = [box(2 + 10 * place, y, 8, 32 - 2 * y, style=f"c{place}") for place, y in enumerate((10, 6, 2))]
    save("_static/favicon", "ddp-runtime", 32, 32, bars)


if __name__ == "__main__":
    collectives()
    overlap()
    launch()
    commit()
    micro_batches()
    favicon()
