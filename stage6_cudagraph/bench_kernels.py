"""How near the Triton kernels come to what the card can read: `python stage6_cudagraph/bench_kernels.py [--save]`.

Everything is timed inside CUDA graphs, so launches cost what they cost in the engine, and over inputs that change from
call to call until they fill several L2 caches, so that small sizes are not measured from the cache.
"""

import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice, pairwise, product
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import cli, report
from common.config import UserError
from common.kernels import ops, triton_decode, triton_linear, triton_ops, triton_prefill, triton_sample

SPAN = 2**28  # bytes that the inputs of one measurement span at least: 4 or 5 times the L2 cache of an H200
BATCHES, CONTEXTS, HEADS, HEADS_KV, DIM = (1, 16, 64, 256), (512, 2048, 8192), (16, 32), 8, 128
SHAPES = ((1024, 3072, 16), (4096, 14336, 32))  # hidden size, intermediate size, query heads: Qwen3-0.6B, Llama-3-8B
ROWS = (1, 8, 64, 128, 256)  # of a linear layer's input
TOKENS, VOCAB, DTYPE = (1, 256, 8192), 151936, torch.bfloat16


def seconds(calls: list[Callable[[], object]], replays: int = 7) -> float:
    """Device time of one call: the median over replays of a graph that makes each of the calls, at least 10 in all."""
    calls = list(islice(cycle(calls), max(10, len(calls))))
    calls[0]()  # compiles
    torch.cuda.synchronize()
    graph, events = torch.cuda.CUDAGraph(), [torch.cuda.Event(enable_timing=True) for _ in range(replays + 2)]
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)][1:]
    return statistics.median(times) / 1000 / len(calls)


def copies(bytes_each: int) -> range:
    return range(max(1, min(256, -(-SPAN // bytes_each))))


def row(what: str, size: str, moved: int, calls: list[Callable], plain: list[Callable] | None = None) -> dict:
    """A line of the table: `moved` bytes a call; `plain` is what the calls are to be compared with."""
    t = seconds(calls)
    compared = {"plain_us": 1e6 * seconds(plain)} if plain else {}
    return {"what": what, "size": size, "us": 1e6 * t, "bytes_per_s": moved / t, **compared}


def peak_bandwidth() -> float:
    """Bytes per second: the better of a large sum (reads) and a large copy (reads and writes)."""
    x = torch.ones(2**30, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    size = x.numel() * x.element_size()
    return max(size / seconds([x.sum], 3), 2 * size / seconds([lambda: y.copy_(x)], 3))


def decode_calls(function: Callable, batch: int, context: int, heads: int, page: int) -> tuple[int, list[Callable]]:
    """Bytes of K and V a call, and a call for each of several layers: one block table, as in an engine, many pools."""
    size, width = batch * context * 2 * HEADS_KV * DIM * DTYPE.itemsize, -(-context // page)
    table = torch.randperm(batch * width, device="cuda", dtype=torch.int32).view(batch, width)
    pools = torch.empty(len(copies(size)), 2, batch * width, page, HEADS_KV, DIM, dtype=DTYPE, device="cuda").normal_()
    q = torch.randn(batch, 1, heads, DIM, dtype=DTYPE, device="cuda")
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    return size, [partial(function, q, *kv, cache_seqlens=lens, block_table=table, causal=True) for kv in pools]


def decode_rows() -> Iterator[dict]:
    kernels = [(f"triton, pages of {page}", triton_decode.flash_attn_with_kvcache, page) for page in (1, 16, 256)]
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_with_kvcache

        kernels.append(("flash-attn, pages of 256", flash_attn_with_kvcache, 256))
    for heads, batch, context in product(HEADS, BATCHES, CONTEXTS):
        torch.cuda.empty_cache()
        if 5 * batch * context * HEADS_KV * DIM * DTYPE.itemsize > torch.cuda.mem_get_info()[0]:
            continue
        for name, function, page in kernels:
            size, calls = decode_calls(function, batch, context, heads, page)
            yield row(name, f"{batch} x {context}, {heads}/{HEADS_KV} heads", size, calls)


def prefill_rows() -> Iterator[dict]:
    """(new tokens, with their context) of each request; beside ours flash-attn, which gets the context copied together."""
    cases = {
        "32 prompts of 512": [(512, 512)] * 32,
        "8 prompts of 2,048": [(2048, 2048)] * 8,
        "1 prompt of 8,192": [(8192, 8192)],
        "64 x 128 after 2,048": [(128, 2176)] * 64,
    }
    heads = HEADS[0]
    for name, lens in cases.items():
        new, every = (np.array(x) for x in zip(*lens, strict=True))
        cu_q, cu_k = (torch.tensor([0, *n.cumsum()], dtype=torch.int32, device="cuda") for n in (new, every))
        bounds = (cu_q, cu_k, int(new.max()), int(every.max()))
        q = torch.randn(new.sum(), heads, DIM, dtype=DTYPE, device="cuda")
        pools = torch.randn(2, every.sum(), 1, HEADS_KV, DIM, dtype=DTYPE, device="cuda")
        flat, table = pools[:, :, 0], None
        if every.sum() > new.sum():  # keys lie in pages of one token, here in order
            table = torch.arange(every.sum(), dtype=torch.int32, device="cuda").view(len(lens), -1)
        keys = flat if table is None else pools
        call = partial(triton_prefill.flash_attn_varlen_func, q, *keys, *bounds, causal=True, block_table=table)
        t = seconds([call], 3)
        line = {"what": "prefill", "size": name, "us": 1e6 * t}
        line["flops_per_s"] = float((4 * new * (every - new / 2)).sum() * heads * DIM / t)
        if importlib.util.find_spec("flash_attn"):
            from flash_attn import flash_attn_varlen_func

            rows = torch.arange(len(flat[0]), device="cuda")
            copied = lambda: flat if table is None else [x[rows] for x in flat]  # noqa: E731, B023
            plain = lambda: flash_attn_varlen_func(q, *copied(), *bounds, causal=True)  # noqa: E731, B023
            line["plain_us"] = 1e6 * seconds([plain], 3)
        yield line


def plain_qk_norm_rope(
    heads: Tensor, num_heads: int, num_kv_heads: int, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    qk = torch.cat((ops.rms_norm(q, q_weight, eps), ops.rms_norm(k, k_weight, eps)), 1)
    return *ops.rope(qk, cos, sin).split((num_heads, num_kv_heads), 1), v


def plain_store_kv(k_pool: Tensor, v_pool: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    k_pool[slots], v_pool[slots] = k, v


def op_cases(tokens: int, hidden: int, inner: int, heads: int) -> list[tuple[str, int, Callable, Callable, tuple]]:
    """Name, values read and written, fused and plain version, shapes of the inputs that change from call to call."""
    new = partial(torch.randn, dtype=DTYPE, device="cuda")
    x, gate_up, kv = (tokens, hidden), (tokens, 2 * inner), (tokens, HEADS_KV, DIM)
    norm, head_weight, (cos, sin) = {"weight": new(hidden), "eps": 1e-6}, new(DIM), new(2, tokens, 1, DIM)
    rope = {"num_heads": heads, "num_kv_heads": HEADS_KV, "q_weight": head_weight, "k_weight": head_weight}
    rope |= {"eps": 1e-6, "cos": cos, "sin": sin}
    store = (*new(2, 2**16, HEADS_KV, DIM), torch.randperm(2**16, device="cuda")[:tokens])
    names = {
        "rms_norm": (2 * hidden, partial(triton_ops.rms_norm, **norm), partial(ops.rms_norm, **norm), (x,)),
        "add_rms_norm": (
            4 * hidden,
            partial(triton_ops.add_rms_norm, **norm),
            partial(ops.add_rms_norm, **norm),
            (x, x),
        ),
        "silu_and_mul": (3 * inner, triton_ops.silu_and_mul, ops.silu_and_mul, (gate_up,)),
        "qk_norm_rope": (
            2 * (heads + HEADS_KV + 1) * DIM,
            partial(triton_ops.qk_norm_rope, **rope),
            partial(plain_qk_norm_rope, **rope),
            ((tokens, heads + 2 * HEADS_KV, DIM),),
        ),
        "store_kv": (
            4 * HEADS_KV * DIM,
            partial(triton_ops.store_kv, *store),
            partial(plain_store_kv, *store),
            (kv, kv),
        ),
    }
    return [(name, tokens * values, *rest) for name, (values, *rest) in names.items()]


def op_rows() -> Iterator[dict]:
    for (hidden, inner, heads), tokens in product(SHAPES, TOKENS):
        for name, values, fused, plain, shapes in op_cases(tokens, hidden, inner, heads):
            moved = values * DTYPE.itemsize
            inputs = [[torch.randn(shape, dtype=DTYPE, device="cuda") for shape in shapes] for _ in copies(moved)]
            calls, compared = ([partial(f, *tensors) for tensors in inputs] for f in (fused, plain))
            yield row(name, f"{tokens} tokens, hidden {hidden}", moved, calls, compared)


def sampler_rows() -> Iterator[dict]:
    for batch, heat in product((1, 256), (0.0, 0.6)):
        moved = batch * VOCAB * DTYPE.itemsize
        inverse = torch.full((batch,), 1 / heat if heat else 0.0, device="cuda")
        keys = torch.randint(2**32, (2, batch), device="cuda")
        inputs = [torch.randn(batch, VOCAB, dtype=DTYPE, device="cuda") for _ in copies(moved)]
        calls = [partial(triton_sample.gumbel_argmax, logits, inverse, *keys) for logits in inputs]
        compared = [partial(torch.argmax, logits, -1) for logits in inputs]
        yield row("gumbel_argmax", f"{batch} x {VOCAB}, temperature {heat}", moved, calls, compared)


def linear_rows() -> Iterator[dict]:
    """Each call has a weight of its own, as a model's layers do; beside it cuBLAS."""
    counters = torch.zeros(triton_linear.MAX_COUNTERS, dtype=torch.int32, device="cuda")
    for (hidden, inner, heads), rows in product(SHAPES, ROWS):
        shapes = {
            "qkv": ((heads + 2 * HEADS_KV) * DIM, hidden),
            "o": (hidden, heads * DIM),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        for name, (size, depth) in shapes.items():
            moved = (size * depth + rows * (size + depth)) * DTYPE.itemsize
            x = torch.randn(rows, depth, dtype=DTYPE, device="cuda")
            weights = [torch.randn(size, depth, dtype=DTYPE, device="cuda") for _ in copies(moved)]
            calls = [partial(triton_linear.linear, x, weight, counters=counters) for weight in weights]
            yield row(
                f"linear {name}",
                f"{rows} x {depth} -> {size}",
                moved,
                calls,
                [partial(F.linear, x, w) for w in weights],
            )


def main() -> None:
    args = cli.parser(__doc__, flags=("save",)).parse_args()
    if not torch.cuda.is_available():
        raise UserError("this benchmark compares kernels with what a GPU can do, and needs one")
    peak = peak_bandwidth()
    torch.cuda.empty_cache()
    rows = [*decode_rows(), *prefill_rows(), *op_rows(), *linear_rows(), *sampler_rows()]
    if args.save:
        report.save(__file__, "kernels", args, {"peak_bytes_per_s": peak, "rows": rows})
    print(
        f"{torch.cuda.get_device_name()}: {peak / 1e9:,.0f} GB/s. plain: ops.py, cuBLAS, flash-attn, or argmax beside the sampler"
    )
    print(f"{'what':<26}{'size':<36}{'us':>9}{'GB/s':>8}{'share':>7}{'plain us':>10}")
    for line in rows:
        plain = f"{line['plain_us']:10.1f}" if "plain_us" in line else ""
        rate = f"{line['flops_per_s'] / 1e12:6,.0f} TFLOP/s" if "flops_per_s" in line else ""
        if "bytes_per_s" in line:
            rate = f"{line['bytes_per_s'] / 1e9:8,.0f}{line['bytes_per_s'] / peak:7.0%}"
        print(f"{line['what']:<26}{line['size']:<36}{line['us']:9.1f}{rate}{plain}")


if __name__ == "__main__":
    cli.run(main)
