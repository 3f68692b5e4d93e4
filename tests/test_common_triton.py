"""The Triton kernels against the plain versions: float32 in Triton's interpreter on the CPU, bfloat16 on a GPU.

Triton decides at import whether it interprets, so the CPU's share runs in a process of its own, which the first test
starts on this same file.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRET:  # this Triton's interpreter takes int() of arrays of one element, which NumPy no longer allows
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index

from common.kernels import ops, portable, triton_decode, triton_linear, triton_ops, triton_prefill, triton_sample

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu"] if INTERPRET else [pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
everywhere = pytest.mark.parametrize("device", DEVICES)
EPS = 1e-6


@pytest.mark.skipif(INTERPRET or torch.cuda.is_available(), reason="the tests below run here themselves")
def test_all_of_these_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def dtype_of(device):
    return torch.float32 if device == "cpu" else torch.bfloat16


def close(got, want, device):
    """Equal up to the rounding of float32, or of one bfloat16 result; `want` was computed in float32 or better."""
    assert got.isfinite().all()
    assert got.dtype == dtype_of(device)
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < (1e-6 if device == "cpu" else 4e-3), f"relative error {error:.1e}"


def random(*shape, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype_of(device))


def decode_case(lens, page, dim, groups, heads_kv, device, width=None):
    """A pool of shuffled pages. Unused entries of the block table name no page: reading them would crash."""
    batch, widest = len(lens), width or max(1, -(-max(lens) // page))
    used = [-(-n // page) for n in lens]
    num_pages = sum(used) + 1
    k, v = random(2, num_pages, page, heads_kv, dim, device=device)
    order, table = iter(np.random.default_rng(0).permutation(num_pages)), np.full((batch, widest), 2**30, np.int32)
    for row, n in zip(table, used, strict=True):
        row[:n] = [next(order) for _ in range(n)]
    heads = random(batch, (groups + 2) * heads_kv, dim, device=device, seed=1)
    q = heads[:, : groups * heads_kv][:, None]  # a view of the fused projection
    return q, k, v, torch.tensor(lens, dtype=torch.int32, device=device), torch.from_numpy(table).to(device)


def decode(q, k, v, lens, table):
    return triton_decode.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, block_table=table, causal=True)


def decode_reference(q, k, v, lens, table):
    """One request at a time in float64; zeros for an empty one."""
    page, out = k.shape[1], torch.zeros(q.shape, dtype=torch.float64)
    for b, n in enumerate(lens.tolist()):
        if n:
            pages = table[b, : -(-n // page)]
            keys_values = [cache[pages].flatten(0, 1)[None, :n].double().cpu() for cache in (k, v)]
            out[b] = portable.flash_attn_with_kvcache(
                q[b : b + 1].double().cpu(), *keys_values, cache_seqlens=lens[b : b + 1].cpu()
            )[0]
    return out.to(q.device)


@everywhere
@pytest.mark.parametrize("dim, groups", [(64, 1), (128, 2), (64, 8), (128, 4)])
@pytest.mark.parametrize("page", [1, 16, 64, 256])
def test_decode_reads_the_right_slots(page, dim, groups, device):
    case = decode_case([1, 0, page, page + 1, 90], page, dim, groups, 1 if device == "cpu" else 2, device)
    close(decode(*case), decode_reference(*case), device)


@everywhere
@pytest.mark.parametrize("dim, groups", [(16, 3), (80, 1), (32, 20)])
def test_decode_of_odd_shapes(dim, groups, device):
    """Head sizes that are no power of two, and groups that fill no block of the matrix unit or more than one."""
    case = decode_case([33, 1, 130], 3, dim, groups, 2, device)
    close(decode(*case), decode_reference(*case), device)


@everywhere
@pytest.mark.parametrize("per_sm", [1, 16])
def test_decode_does_not_depend_on_the_number_of_splits(per_sm, device, monkeypatch):
    monkeypatch.setattr(triton_decode, "FEW", (per_sm, 64))
    monkeypatch.setattr(triton_decode, "MANY", (per_sm, 64))
    case = decode_case([1000, 0, 129, 128, 17], 16, 64, 2, 1, device, width=400)
    close(decode(*case), decode_reference(*case), device)


@everywhere
def test_decode_from_fixed_regions(device):
    k, v = random(2, 4, 200, 2, 64, device=device)
    q, lens = random(3, 1, 4, 64, device=device, seed=1), torch.tensor([200, 1, 77], dtype=torch.int32, device=device)
    for regions in (torch.tensor([3, 0, 2], device=device), None):
        got = triton_decode.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, cache_batch_idx=regions)
        theirs = [t.float()[[0, 1, 2] if regions is None else regions] for t in (k, v)]
        close(got, portable.flash_attn_with_kvcache(q.float(), *theirs, cache_seqlens=lens), device)


@everywhere
@pytest.mark.parametrize("per_sm", [4, 16])
@pytest.mark.parametrize("page, dim, groups", [(1, 64, 4), (16, 128, 2), (3, 80, 1), (256, 16, 3)])
def test_decode_appends_the_new_token(page, dim, groups, per_sm, device, monkeypatch):
    """Given K and V of the new token it stores them, and the answer is as if they had been there."""
    monkeypatch.setattr(triton_decode, "FEW", (per_sm, 64))
    monkeypatch.setattr(triton_decode, "MANY", (per_sm, 64))
    q, k, v, lens, table = decode_case([1, page, page + 1, 90, 400], page, dim, groups, 2, device)
    expected, stored = decode_reference(q, k, v, lens, table), (k.clone(), v.clone())
    heads = random(len(lens), 6, dim, device=device, seed=2)
    new = heads[:, 2:4, None].transpose(1, 2), heads[:, 4:, None].transpose(1, 2)  # views of a fused projection
    for b, n in enumerate(lens.tolist()):
        at = table[b, (n - 1) // page], (n - 1) % page
        for cache, fresh in zip((k, v), new, strict=True):
            fresh[b, 0] = cache[at]
            cache[at] = 1e3
    got = triton_decode.flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=lens - 1, block_table=table, causal=True)
    close(got, expected, device)
    assert torch.equal(k, stored[0]) and torch.equal(v, stored[1])


@pytest.mark.gpu
@NO_GPU
def test_decode_in_a_graph_follows_lengths_and_pages():
    q, k, v, lens, table = decode_case([700, 300, 5, 1], 16, 128, 2, 8, "cuda")
    static_lens, static_table = torch.zeros_like(lens), torch.zeros_like(table)
    decode(q, k, v, static_lens, static_table)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(q, k, v, static_lens, static_table)
    for shift in range(4):
        static_lens.copy_(lens.roll(shift))
        static_table.copy_(table.roll(shift, 0))
        graph.replay()
        close(out, decode_reference(q, k, v, static_lens, static_table), "cuda")


@pytest.mark.gpu
@NO_GPU
def test_decode_from_a_pool_beyond_32_bits():
    slots = 2**31 // 1024 + 1000  # of 8 heads x 128 values: the last pages start past element 2 ** 31
    k = torch.empty(slots, 1, 8, 128, dtype=torch.bfloat16, device="cuda")
    last = random(500, 1, 8, 128, device="cuda")
    k[-500:] = last
    q, lens = random(2, 1, 16, 128, device="cuda", seed=1), torch.tensor([500, 499], dtype=torch.int32, device="cuda")
    table = torch.arange(slots - 500, slots, dtype=torch.int32, device="cuda").expand(2, -1)
    close(decode(q, k, k, lens, table), decode_reference(q, last, last, lens, table - (slots - 500)), "cuda")


@everywhere
@pytest.mark.parametrize("page, causal", [(None, True), (None, False), (1, True), (16, False), (256, True)])
@pytest.mark.parametrize("dim, groups, even", [(64, 3, False), (128, 1, False), (80, 2, True)])
def test_prefill(dim, groups, even, page, causal, device):
    """Whole prompts, chunks with context before them, and single tokens, laid end to end; keys from pages or flat."""
    lens = [(1, 1), (5, 5), (70, 70), (3, 90), (1, 40), (33, 200), (150, 151)]  # (new, all)
    lens += [(2, 9)] * (24 if device == "cuda" else 0)  # there tiles are larger; uneven enough for programs to search
    if even:
        lens = [(70, 70), (33, 200), (40, 151)]
    new, every = zip(*lens, strict=True)
    q = random(sum(new), (groups + 2) * 2, dim, device=device, seed=1)[
        :, : groups * 2
    ]  # a view of the fused projection
    cu_q, cu_k = (torch.tensor([0, *n], device=device).cumsum(0, dtype=torch.int32) for n in (new, every))
    if page is None:
        keys, table = random(2, sum(every), 2, dim, device=device), None
        sequences = [keys[:, begin:end] for begin, end in zip(cu_k[:-1].tolist(), cu_k[1:].tolist(), strict=True)]
    else:
        _, *keys, _, table = decode_case(every, page, dim, groups, 2, device)
        used = [-(-n // page) for n in every]
        sequences = [
            [x[table[b, :count]].flatten(0, 1)[:n] for x in keys]
            for b, (count, n) in enumerate(zip(used, every, strict=True))
        ]
    got = triton_prefill.flash_attn_varlen_func(q, *keys, cu_q, cu_k, max(new), max(every), causal, table)
    want = [
        portable.attend(q[begin:end].double().cpu(), *(x.double().cpu() for x in sequence), causal)
        for sequence, begin, end in zip(sequences, cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True)
    ]
    close(got, torch.cat(want).to(device), device)


@everywhere
@pytest.mark.parametrize("page", [None, 1])
def test_prefill_of_more_sequences_than_a_program_looks_at_together(page, device):
    """Most of them have no queries, and two have no keys: a query without keys gets zeros."""
    new, every = [0] * 140, [0] * 140
    new[0], new[70], new[139] = 40, 260, 30
    every[70] = 280
    q, keys = random(330, 2, 64, device=device, seed=1), random(2, 280, 1, 64, device=device)
    bounds = [torch.tensor([0, *n], device=device).cumsum(0, dtype=torch.int32) for n in (new, every)]
    pages, table = keys, None
    if page:
        order = torch.randperm(280, generator=torch.Generator().manual_seed(2)).to(device)
        pages, table = torch.empty_like(keys), torch.zeros(140, 280, dtype=torch.int32, device=device)
        pages[:, order], table[70] = keys, order.int()
        pages = pages[:, :, None]
    got = triton_prefill.flash_attn_varlen_func(q, *pages, *bounds, 260, 280, True, table)
    want = torch.zeros(q.shape, dtype=torch.double)
    want[40:300] = portable.attend(q[40:300].double().cpu(), *keys.double().cpu(), True)
    close(got, want.to(device), device)


@everywhere
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (3, 1000), (2, 3, 128), (9, 4096)])
def test_norms(shape, device):
    (x, delta), weight = random(2, *shape, device=device), random(shape[-1], device=device, seed=1)
    close(triton_ops.rms_norm(x, weight, EPS), ops.rms_norm(x.float(), weight.float(), EPS), device)
    total, norm = triton_ops.add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(total, x + delta)
    close(norm, ops.rms_norm((x + delta).float(), weight.float(), EPS), device)


@everywhere
@pytest.mark.parametrize("tokens, size", [(1, 96), (7, 1536), (33, 3072)])
def test_silu_and_mul(tokens, size, device):
    gate_up = random(tokens, 2 * size, device=device)
    close(triton_ops.silu_and_mul(gate_up), ops.silu_and_mul(gate_up.float()), device)


@everywhere
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads_q, heads_kv, dim", [(9, 3, 64), (4, 2, 128), (14, 2, 80), (16, 8, 128)])
def test_qk_norm_rope(heads_q, heads_kv, dim, norm, device):
    heads = random(6, heads_q + 2 * heads_kv, dim, device=device)
    q_weight, k_weight = random(2, dim, device=device, seed=1) if norm else (None, None)
    angles = torch.arange(6 * dim // 2, device=device).view(6, 1, -1)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(heads.dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(heads.dtype)

    q, k, v = heads.float().split((heads_q, heads_kv, heads_kv), 1)
    if norm:
        q, k = ops.rms_norm(q, q_weight.float(), EPS), ops.rms_norm(k, k_weight.float(), EPS)
    want = ops.rope(q, cos.float(), sin.float()), ops.rope(k, cos.float(), sin.float()), v.clone()
    got = triton_ops.qk_norm_rope(heads, heads_q, heads_kv, q_weight, k_weight, EPS, cos, sin)
    for part, expected in zip(got, want, strict=True):
        assert part.data_ptr() >= heads.data_ptr() and part.stride(0) == heads.stride(0)  # views, not copies
        close(part, expected, device)


@everywhere
@pytest.mark.parametrize("heads_kv, dim", [(3, 64), (8, 128)])
def test_store_kv(heads_kv, dim, device):
    heads = random(5, 4 * heads_kv, dim, device=device)
    k, v = heads.split(heads_kv, 1)[2:]
    pools = random(2, 20, heads_kv, dim, device=device, seed=1)
    slots = torch.tensor([3, -1, 0, 19, 7], device=device)
    want = pools.clone()
    want[:, slots[slots >= 0]] = torch.stack((k, v))[:, slots >= 0]
    triton_ops.store_kv(*pools, slots, k, v)
    assert torch.equal(pools, want)


TILES = [
    triton_linear.Config(16, 32, 64, 1),
    triton_linear.Config(32, 32, 64, 4, swap=True),
    triton_linear.Config(64, 64, 128, 2),
]


@everywhere
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("rows", [1, 16, 70])
def test_linear(rows, tiles, device):
    x, weight = random(rows, 512, device=device), random(128, 512, device=device, seed=1)
    bias, counters = random(128, device=device, seed=2), torch.zeros(16, dtype=torch.int32, device=device)
    wait_for(device)
    for b in (bias, None, bias):
        got = triton_linear.launch(tiles, x, weight, b, counters)
        close(got, linear_reference(x, weight, b), device)
        assert not counters.any()  # ready for the next call


@everywhere
@pytest.mark.parametrize("depth", [1024, 2048, 3072])
def test_linear_of_one_row(depth, device):
    x, weight, bias = (random(*s, device=device, seed=len(s)) for s in ((1, depth), (24, depth), (24,)))
    wait_for(device)
    for b in (bias, None):
        close(triton_linear.launch_row(x, weight, b), linear_reference(x, weight, b), device)


def wait_for(device):
    """Weights have to be there before the kernel that is launched ahead of a linear."""
    if device == "cuda":
        torch.cuda.synchronize()


def linear_reference(x, weight, bias):
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("rows", [1, 2, 8, 24, 64, 100, 128, 136, 200, 256, 300])
def test_linears_of_a_model_in_a_graph(rows):
    """Of Qwen3-0.6B and Llama-3-8B, and of no model: whatever tiles are chosen, the product is right at every replay."""
    from torch import nn

    shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (4096, 4096), (4096, 14336), (96, 1024), (90, 64)]
    model = nn.ModuleList(nn.Linear(k, n, bias=n < k, device="cuda", dtype=torch.bfloat16) for n, k in shapes)
    weights = [m.weight for m in model]
    triton_linear.speed_up_linears(model)
    assert all(m.weight is w for m, w in zip(model, weights, strict=True))
    inputs = [random(rows, k, device="cuda") for _, k in shapes]
    with torch.inference_mode():
        want = [linear_reference(x, m.weight, m.bias) for x, m in zip(inputs, model, strict=True)]
        torch.cuda.synchronize()
        first = [m(x) for m, x in zip(model, inputs, strict=True)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = [m(x) for m, x in zip(model, inputs, strict=True)]
        for _ in range(3):
            for y in got:
                y.fill_(torch.nan)
            graph.replay()
            for y, f, w in zip(got, first, want, strict=True):
                close(y, w, "cuda")
                assert torch.equal(y, f)


@pytest.mark.skipif(not INTERPRET, reason="on a GPU the tests above show it")
def test_linear_elsewhere_is_that_of_pytorch():
    x, weight = random(3, 1024, device="cpu"), random(64, 1024, device="cpu", seed=1)
    assert torch.equal(triton_linear.linear(x, weight), torch.nn.functional.linear(x, weight))


def row_keys(rows, device):
    """Keys as `noise_keys` gives them: [2, rows] int32, the halves of 64 bits."""
    halves = np.random.default_rng(rows).integers(2**32, size=(2, rows)).astype(np.uint32)
    halves[:, 0] = (0, 2**32 - 1)
    return torch.from_numpy(halves.view(np.int32)).to(device)


@everywhere
def test_noise_is_that_of_the_plain_sampler(device):
    """Seen through equal logits: the winner is the largest noise, block by block."""
    low, high = row_keys(20, device)
    noise = ops.gumbel(1500, low, high)
    ones = torch.ones(20, device=device)
    for vocab in (1, 2, 100, 1024, 1500):
        got = triton_sample.gumbel_argmax(torch.zeros(20, vocab, device=device), ones, low, high)
        assert torch.equal(got, noise[:, :vocab].argmax(-1))


@everywhere
@pytest.mark.parametrize("rows, vocab", [(1, 9000), (4, 5000), (17, 1000), (20, 12000)])
def test_draws_and_greedy_rows(rows, vocab, device):
    inv = torch.tensor([(1.0, 0.0, 2.5, 0.3)[i % 4] for i in range(rows)], device=device)
    for scale in (0.3, 4.0):  # many candidates, or few: blocks with one need no logarithm
        inputs = scale * random(rows, vocab, device=device), inv, *row_keys(rows, device)
        assert torch.equal(triton_sample.gumbel_argmax(*inputs), ops.gumbel_argmax(*inputs))


@everywhere
def test_of_equal_logits_the_first_wins(device):
    logits = torch.zeros(3, 9000, device=device)
    logits[1, [8999, 5000, 4097]] = 1
    logits[2] = -torch.inf
    zeros = torch.zeros(3, dtype=torch.int32, device=device)
    got = triton_sample.gumbel_argmax(logits, zeros.float(), zeros, zeros)
    assert got.tolist() == [0, 4097, 0]


@everywhere
def test_a_draw_among_few_tokens_that_are_left(device):
    logits = torch.full((20, 9000), -torch.inf, device=device)
    logits[:, [17, 5000, 8999]] = torch.tensor([0.5, -1.0, 0.0], device=device)
    ones = torch.ones(20, device=device)
    inputs = logits, ones, *row_keys(20, device)
    assert torch.equal(triton_sample.gumbel_argmax(*inputs), ops.gumbel_argmax(*inputs))
