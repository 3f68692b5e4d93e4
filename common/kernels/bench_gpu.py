"""How near the Triton kernels come to what the card can read: `python -m common.kernels.bench_gpu [--json PATH]`.

Everything is timed inside CUDA graphs, so launches cost what they cost in the engine, and over inputs that change from
call to call until they fill several L2 caches, so that small sizes are not measured from the cache.
"""

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable, Iterator
from itertools import cycle, islice, pairwise, product

import torch
import triton
from torch import Tensor

from common.kernels import ops, triton_decode, triton_ops, triton_sample

SPAN = 2**28  # bytes that the inputs of one measurement span at least: 4 or 5 times the L2 cache of an H200
BATCHES, CONTEXTS, HEADS, HEADS_KV, DIM = (1, 16, 64, 256), (512, 2048, 8192), (16, 32), 8, 128
SHAPES = ((1024, 3072, 16), (4096, 14336, 32))  # hidden size, intermediate size, query heads: Qwen3-0.6B, Llama-3-8B
DTYPE = torch.bfloat16


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


def peak_bandwidth() -> float:
    """Bytes a second: the better of a large sum (reads) and a large copy (reads and writes)."""
    x = torch.ones(2**30, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    size = x.numel() * x.element_size()
    return max(size / seconds([x.sum], 3), 2 * size / seconds([lambda: y.copy_(x)], 3))


def decode_inputs(batch: int, context: int, heads: int, page: int) -> tuple[int, list[tuple]]:
    """Bytes of K and V a call, and arguments for several calls, each on its own random pages of one pool."""
    size = batch * context * 2 * HEADS_KV * DIM * DTYPE.itemsize
    n, width = len(copies(size)), -(-context // page)
    pages = torch.randperm(n * batch * width, device="cuda", dtype=torch.int32).view(n, batch, width)
    k, v = (torch.empty(pages.numel(), page, HEADS_KV, DIM, dtype=DTYPE, device="cuda").normal_() for _ in "kv")
    q = torch.randn(batch, 1, heads, DIM, dtype=DTYPE, device="cuda")
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    return size, [(q, k, v, lens, None, table) for table in pages]


def time_decode(function: Callable, batch: int, context: int, heads: int, page: int) -> tuple[float, float]:
    """(seconds, bytes a second) of one call."""
    size, inputs = decode_inputs(batch, context, heads, page)

    def call(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, slots: None, table: Tensor) -> Callable[[], Tensor]:
        return lambda: function(q, k, v, cache_seqlens=lens, block_table=table, causal=True)

    t = seconds([call(*args) for args in inputs])
    return t, size / t


def decode_rows() -> Iterator[dict]:
    kernels = [(f"triton, pages of {page}", triton_decode.flash_attn_with_kvcache, page) for page in (1, 16, 256)]
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_with_kvcache

        kernels.append(("flash-attn, pages of 256", flash_attn_with_kvcache, 256))
    for heads, batch, context in product(HEADS, BATCHES, CONTEXTS):
        if 4 * batch * context * HEADS_KV * DIM * DTYPE.itemsize < torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved():
            for name, function, page in kernels:
                t, rate = time_decode(function, batch, context, heads, page)
                yield {"what": name, "size": f"{batch} x {context}, {heads}/{HEADS_KV} heads", "us": 1e6 * t, "rate": rate}


def op_cases(tokens: int, hidden: int, inner: int, heads: int) -> Iterator[tuple[str, int, Callable, Callable, tuple]]:
    """(name, bytes moved, fused, plain, shapes of the inputs that change from call to call)."""
    new = {"dtype": DTYPE, "device": "cuda"}
    weight, head_weight = torch.ones(hidden, **new), torch.ones(DIM, **new)
    cos, sin = torch.randn(2, tokens, 1, DIM, **new)
    pools = torch.zeros(2, 2**16, HEADS_KV, DIM, **new)
    rows = torch.randperm(2**16, device="cuda")[:tokens]

    def plain_rope(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.split((heads, HEADS_KV, HEADS_KV), 1)
        qk = torch.cat((ops.rms_norm(q, head_weight, 1e-6), ops.rms_norm(k, head_weight, 1e-6)), 1)
        return *ops.rope(qk, cos, sin).split((heads, HEADS_KV), 1), v

    def plain_store(k: Tensor, v: Tensor) -> None:
        pools[0][rows], pools[1][rows] = k, v

    row, kv, qkv = tokens * hidden, (tokens, HEADS_KV, DIM), (tokens, heads + 2 * HEADS_KV, DIM)
    yield "rms_norm", 2 * row, lambda x: triton_ops.rms_norm(x, weight, 1e-6), lambda x: ops.rms_norm(x, weight, 1e-6), (
        (tokens, hidden),
    )
    yield (
        "add_rms_norm", 4 * row, lambda x, d: triton_ops.add_rms_norm(x, d, weight, 1e-6),
        lambda x, d: ops.add_rms_norm(x, d, weight, 1e-6), ((tokens, hidden),) * 2,
    )  # fmt: skip
    yield "silu_and_mul", 3 * tokens * inner, triton_ops.silu_and_mul, ops.silu_and_mul, ((tokens, 2 * inner),)
    yield (
        "qk_norm_rope", 2 * tokens * (heads + HEADS_KV + 1) * DIM,
        lambda x: triton_ops.qk_norm_rope(x, heads, HEADS_KV, head_weight, head_weight, 1e-6, cos, sin), plain_rope, (qkv,),
    )  # fmt: skip
    yield "store_kv", 4 * tokens * HEADS_KV * DIM, lambda k, v: triton_ops.store_kv(*pools, rows, k, v), plain_store, (kv, kv)


def op_rows() -> Iterator[dict]:
    for (hidden, inner, heads), tokens in product(SHAPES, (1, 256, 8192)):
        for name, values, fused, plain, shapes in op_cases(tokens, hidden, inner, heads):
            size = values * DTYPE.itemsize
            inputs = [[torch.randn(shape, dtype=DTYPE, device="cuda") for shape in shapes] for _ in copies(size)]
            t, before = (seconds([lambda f=f, args=args: f(*args) for args in inputs]) for f in (fused, plain))
            yield {"what": name, "size": f"{tokens} x {hidden}", "us": 1e6 * t, "rate": size / t, "plain_us": 1e6 * before}


def sampler_rows() -> Iterator[dict]:
    vocab = 151936
    for batch, greedy in product((1, 256), (False, True)):
        heat = torch.full((batch,), 0.0 if greedy else 1.6, device="cuda")
        low, high = torch.randint(2**32, (2, batch), device="cuda")
        size = batch * vocab * DTYPE.itemsize
        inputs = [torch.randn(batch, vocab, dtype=DTYPE, device="cuda") for _ in copies(size)]
        t = seconds([lambda x=x: triton_sample.gumbel_argmax(x, heat, low, high) for x in inputs])
        before = seconds([lambda x=x: x.argmax(-1) for x in inputs])
        size_text = f"{batch} x {vocab}, {'greedy' if greedy else 'sampled'}"
        yield {"what": "gumbel_argmax", "size": size_text, "us": 1e6 * t, "rate": size / t, "plain_us": 1e6 * before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the measurements to this file")
    args = parser.parse_args()
    peak = peak_bandwidth()
    rows = [*decode_rows(), *op_rows(), *sampler_rows()]
    if args.json:
        versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
        record = {"device": torch.cuda.get_device_name(), "versions": versions, "peak_bytes_per_s": peak, "rows": rows}
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)
    print(f"{torch.cuda.get_device_name()}: {peak / 1e9:,.0f} GB/s; plain: PyTorch's own operations, argmax for the sampler")
    print(f"{'what':<26}{'size':<28}{'us':>9}{'GB/s':>8}{'share':>7}{'plain us':>10}")
    for row in rows:
        plain = f"{row['plain_us']:10.1f}" if "plain_us" in row else ""
        print(f"{row['what']:<26}{row['size']:<28}{row['us']:9.1f}{row['rate'] / 1e9:8,.0f}{row['rate'] / peak:7.0%}{plain}")


if __name__ == "__main__":
    main()
