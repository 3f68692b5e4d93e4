"""The weights of two ranks, in true proportion: python stage8_tp/figures/draw.py"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.config import DUMMY_MODELS
from common.draw import Drawing, write
from stage8_tp.shard import Shard

PARTS = (
    ("green", ("embeddings, tied to the head", "词嵌入，与 head 共用")),
    ("blue", ("attention", "attention")),
    ("orange", ("MLP", "MLP")),
)
LEFT, WIDTH = 110, 690


def weights(lang: int) -> Drawing:
    """SmolLM2-135M whole, and on two ranks: parameters as lengths."""
    d = Drawing(830, 240)
    whole = DUMMY_MODELS["smollm2-135m"]
    models = [whole, *(Shard(whole, rank, 2).config for rank in range(2))]
    names = (("whole", "整个模型"), ("rank 0", "rank 0"), ("rank 1", "rank 1"))
    unit = WIDTH / sum(parameters(whole))
    for i, (kind, label) in enumerate(PARTS):
        d.box(LEFT + 240 * i, 14, 16, 16, kind=kind)
        d.text(LEFT + 22 + 240 * i, 22, label[lang], "start")
    for row, (model, name) in enumerate(zip(models, names, strict=True)):
        x, y = LEFT, 52 + 62 * row
        d.text(LEFT - 10, y + 22, name[lang], "end")
        for (kind, _), count in zip(PARTS, parameters(model), strict=True):
            d.box(round(x, 1), y, round(unit * count, 1), 44, f"{count / 1e6:.1f} M", kind)
            x += unit * count
    return d


def parameters(m) -> tuple[int, int, int]:
    """Of embeddings, attention and MLP."""
    heads = m.num_heads + 2 * m.num_kv_heads
    attention = m.num_layers * m.hidden_size * m.head_dim * (heads + m.num_heads)
    return m.vocab_size * m.hidden_size, attention, m.num_layers * 3 * m.hidden_size * m.intermediate_size


FIGURES = {"weights": weights}

if __name__ == "__main__":
    write(__file__, FIGURES)
