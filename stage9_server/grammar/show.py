"""The mask, step by step, for a small schema: python -m stage9_server.grammar.show (draws results/grammar.png with --save)"""

import argparse
import json

from llguidance import LLMatcher

from common import cli, report
from stage9_server.grammar.compiler import Compiler, Vocabulary, translated
from stage9_server.grammar.vocabulary import vocabulary

MODEL = "smollm2-135m"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "hot": {"type": "boolean"}},
    "required": ["city", "hot"],
    "additionalProperties": False,
}
TEXT = b'{"city": "Paris", "hot": true}'
SHOWN = [
    '{"',
    "city",
    "hot",
    '":',
    ' "',
    " Paris",
    "Paris",
    "Par",
    "Os",
    "lo",
    '",',
    " true",
    " false",
    "42",
    "}",
    "the",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="draw the figure")
    args = parser.parse_args()
    tokens, special = vocabulary(MODEL)
    eos = frozenset({special[0]})
    known = Vocabulary.build(tokens, special, eos, len(tokens))
    compiler = Compiler(lambda: known, eos)
    matcher = LLMatcher(compiler.tokenizer, translated("json:" + json.dumps(SCHEMA)))
    ids = {text: known.ids[text.encode()] for text in SHOWN if text.encode() in known.ids}
    columns, path, rows = [*ids, "end"], [*known(TEXT), min(eos)], []
    for token in path:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(len(tokens)) if mask[i // 8] >> i % 8 & 1]
        name = "end" if token in eos else tokens[token].decode()
        rows.append((name, len(allowed), [i in allowed for i in (*ids.values(), min(eos))]))
        matcher.consume_token(token)
    marks = [[f"{name!r}", count, *("■" if yes else "" for yes in row)] for name, count, row in rows]
    report.table(f"{json.dumps(SCHEMA['properties'])}", ["token", "of 49,152", *map(repr, columns)], marks)
    if args.save:
        draw(columns, rows)


def draw(columns: list[str], rows: list[tuple[str, int, list[bool]]]) -> None:
    """A row for each step, from above: which tokens may come, and, framed, the one that does."""
    with report.plot(__file__.replace("grammar/show", "show"), "grammar", "", "", "") as axes:
        axes.figure.set_size_inches(9, 0.36 * len(rows) + 1.6)
        for y, (name, _, allowed) in enumerate(rows):
            for x, yes in enumerate(allowed):
                face = report.COLOURS[2] if yes else "#eeeeee"
                edge = "black" if yes and columns[x] == name else "white"
                axes.add_patch(_square(x, y, face, edge))
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
        axes.set_xticks(range(len(columns)), [repr(c) if c != "end" else c for c in columns], rotation=60, ha="left")
        axes.set_yticks(range(len(rows)), [f"{name!r}" if name != "end" else name for name, _, _ in rows])
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(len(rows)), [f"{count:,}" for _, count, _ in rows])
        axes.xaxis.tick_top()
        axes.grid(False)
        axes.tick_params(length=0)
        for spine in (*axes.spines.values(), *right.spines.values()):
            spine.set_visible(False)


def _square(x: int, y: int, face: str, edge: str):
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.45, y - 0.42), 0.9, 0.84, facecolor=face, edgecolor=edge, linewidth=1.6)


if __name__ == "__main__":
    cli.run(main)
