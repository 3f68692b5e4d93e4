"""The `offline` workload: 256 prompts at once, 142,827 tokens in, 133,966 out; output tokens a second.

python stage6_cudagraph/bench_offline.py --model dummy:qwen3-0.6b --max-model-len 4096
"""

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from common import cli, report, workload
from common.config import UserError
from common.device import synchronize
from stage2_req.sampling import SamplingParams
from stage6_cudagraph.build import build_engine

ENGINE_FLAGS = (
    *("max_running", "max_batch_tokens", "page_size", "kv_tokens", "memory_fraction"),
    *("graph", "graph_max_batch", "overlap"),
)


def main() -> None:
    parser = cli.parser(__doc__, *ENGINE_FLAGS)
    parser.add_argument("--scale", type=float, default=1.0, help="of lengths and number of requests (default: 1)")
    parser.add_argument("--rounds", type=int, default=2, help="runs; all are shown (default: %(default)s)")
    args = parser.parse_args()
    if not 0 < args.scale <= 1:
        raise UserError("--scale takes a number above 0 and at most 1")
    engine = build_engine(cli.config(args))
    items = workload.offline(args.scale, engine.model.vocab_size)[: max(1, round(256 * args.scale))]
    params = [SamplingParams(temperature=0.6, max_tokens=item.max_tokens, ignore_eos=True) for item in items]
    engine.generate([item.prompt_ids for item in items[:8]], SamplingParams(temperature=0.6, max_tokens=8))  # warm
    rows = []
    for _ in range(args.rounds):
        steps = engine.stats().steps
        synchronize(engine.device)
        start = time.perf_counter()
        engine.generate([item.prompt_ids for item in items], params)
        seconds = time.perf_counter() - start
        tokens = sum(p.max_tokens for p in params)
        rows.append([tokens, round(seconds, 2), round(tokens / seconds), engine.stats().steps - steps])
    columns = ["output tokens", "seconds", "output tokens/s", "steps"]
    report.table(f"{args.model}, {len(items)} requests", columns, rows)
    if args.save:
        report.save(__file__, "offline", args, {"columns": columns, "rows": rows})


if __name__ == "__main__":
    cli.run(main)
