"""The portable attention functions against a naive float64 softmax, the packed linear layer against F.linear, the small
operations against their formulas, and the errors of those who choose devices and kernels.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.config import UserError
from common.device import DTYPE_VARIABLE, resolve_device, resolve_dtype
from common.kernels import ops, portable, select_kernels
from common.kernels.cpu_linear import HalfBytesLinear, PackedLinear, pack_linears

CPU = torch.device("cpu")
HEADS = [(4, 4), (4, 2), (6, 1)]  # query heads, key and value heads
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def randn(*shape, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def naive(q, k, v, causal: bool) -> torch.Tensor:
    """q [Sq, Hq, D], k and v [Sk, Hkv, D] -> [Sq, Hq, D]; the last query sees all keys."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty_like(q)
    for i in range(len(q)):
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            last = len(k) - len(q) + i + 1 if causal else len(k)
            weights = torch.softmax(k[:last, group] @ q[i, head] / math.sqrt(q.shape[2]), 0)
            out[i, head] = weights @ v[:last, group]
    return out.float()


def cu(lens) -> torch.Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def paged(sequences, page_size: int, seed: int = 0):
    """[S, Hkv, D] tensors scattered over shuffled pages [num_pages, page_size, Hkv, D], and the table [B, P] int32."""
    counts = [-(-len(s) // page_size) for s in sequences]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed))
    pages = torch.full((len(order), page_size, *sequences[0].shape[1:]), 1e3)  # pages without an owner must not matter
    table, used = torch.zeros(len(sequences), max(counts), dtype=torch.int32), 0
    for b, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        mine = order[used : used + count]
        table[b, :count], used = mine, used + count
        for position, row in enumerate(sequence):
            pages[mine[position // page_size], position % page_size] = row
    return pages, table


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lens", [
    [(5, 5)], [(1, 1)], [(1, 9)], [(3, 8), (7, 7), (1, 4), (2, 2), (4, 11)], [(1, 1), (1, 30), (16, 17)],
])  # fmt: skip
def test_varlen(lens, heads, causal):
    """Lengths are (new, all): fewer queries than keys means that the queries are the last positions."""
    q = randn(sum(n for n, _ in lens), heads[0], 8)
    k, v = (randn(sum(n for _, n in lens), heads[1], 8, seed=seed) for seed in (1, 2))
    cu_q, cu_k = cu([n for n, _ in lens]), cu([n for _, n in lens])
    out = portable.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max(n for n, _ in lens), max(n for _, n in lens), causal=causal
    )
    assert out.shape == q.shape
    for b in range(len(lens)):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        torch.testing.assert_close(out[rows], naive(q[rows], k[keys], v[keys], causal), **TOLERANCE)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("heads", HEADS)
def test_varlen_with_a_block_table(heads, page_size):
    lens = [(3, 8), (7, 7), (1, 4), (2, 16), (4, 33)]
    q, cu_q = randn(sum(n for n, _ in lens), heads[0], 8), cu([n for n, _ in lens])
    k, v = ([randn(n, heads[1], 8, seed=seed) for _, n in lens] for seed in (1, 2))
    (k_pages, table), (v_pages, _) = paged(k, page_size), paged(v, page_size)
    out = portable.flash_attn_varlen_func(
        q, k_pages, v_pages, cu_q, cu([n for _, n in lens]), 7, 33, causal=True, block_table=table
    )
    for b in range(len(lens)):
        rows = slice(*cu_q[b : b + 2])
        torch.testing.assert_close(out[rows], naive(q[rows], k[b], v[b], True), **TOLERANCE)


def test_a_query_without_keys_gets_zeros():
    """As a captured step relies on, for its padding."""
    q, (k, v) = randn(9, 4, 8), randn(2, 5, 3, 2, 8)  # 5 pages of 3
    table = torch.arange(5, dtype=torch.int32).expand(3, -1)
    out = portable.flash_attn_varlen_func(q, k, v, cu([2, 4, 3]), cu([0, 5, 0]), 4, 5, causal=True, block_table=table)
    assert not out[:2].any() and out[2:6].any(2).all() and not out[6:].any()
    lens = torch.tensor([0, 4, 0], dtype=torch.int32)
    out = portable.flash_attn_with_kvcache(q[:3, None], k, v, cache_seqlens=lens, block_table=table, causal=True)
    assert not out[0].any() and out[1].any() and not out[2].any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", ["regions", "batch_idx", "page 1", "page 4", "page 16"])
@pytest.mark.parametrize("lens", [[6], [5, 17, 3, 16], [12, 12]], ids=str)
def test_kvcache(lens, layout, heads, new, causal):
    q = randn(len(lens), new, heads[0], 8)
    k, v = ([randn(n, heads[1], 8, seed=seed) for n in lens] for seed in (1, 2))
    where = {}
    if layout.startswith("page"):
        (k_cache, table), (v_cache, _) = (paged(x, int(layout.split()[1])) for x in (k, v))
        where["block_table"] = table
    else:
        regions = list(range(len(lens)))
        if layout == "batch_idx":
            regions = [2 * b + 1 for b in reversed(regions)]
            where["cache_batch_idx"] = torch.tensor(regions, dtype=torch.int32)
        length = max(lens) if layout == "regions" else 20
        k_cache, v_cache = (torch.full((max(regions) + 1, length, heads[1], 8), 1e3) for _ in range(2))
        for b, region in enumerate(regions):
            k_cache[region, : lens[b]], v_cache[region, : lens[b]] = k[b], v[b]
    seqlens = torch.tensor(lens, dtype=torch.int32)
    out = portable.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens, causal=causal, **where)
    assert out.shape == q.shape
    for b in range(len(lens)):
        torch.testing.assert_close(out[b], naive(q[b], k[b], v[b], causal), **TOLERANCE)
    if min(lens) >= new:  # the new tokens' K and V taken away, and given to the function to store
        fresh, stored = ([x[b][-new:] for b in range(len(lens))] for x in (k, v)), (k_cache.clone(), v_cache.clone())
        for b, n in enumerate(lens):
            for position in range(n - new, n):
                if "block_table" in where:
                    at = where["block_table"][b, position // k_cache.shape[1]], position % k_cache.shape[1]
                else:
                    at = regions[b], position
                k_cache[at] = v_cache[at] = 1e3
        fresh = (torch.stack(x) for x in fresh)
        again = portable.flash_attn_with_kvcache(
            q, k_cache, v_cache, *fresh, cache_seqlens=seqlens - new, causal=causal, **where
        )
        assert torch.equal(again, out)
        assert torch.equal(k_cache, stored[0]) and torch.equal(v_cache, stored[1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["portable", "flash"])
@pytest.mark.parametrize("page_size", [None, 256])
def test_kernels_on_a_gpu(name, page_size):
    kernels = select_kernels(name, torch.device("cuda"), torch.bfloat16, 64)
    lens = [(3, 8), (7, 7), (1, 300), (20, 600)]
    q, cu_q = randn(sum(n for n, _ in lens), 4, 64), cu([n for n, _ in lens])
    k, v = ([randn(n, 2, 64, seed=seed) for _, n in lens] for seed in (1, 2))
    k_in, v_in, table = torch.cat(k), torch.cat(v), None
    if page_size:
        (k_in, table), (v_in, _) = paged(k, page_size), paged(v, page_size)
        table = table.cuda()
    moved = [x.cuda().bfloat16() for x in (q, k_in, v_in)]
    cu_k = cu([n for _, n in lens]).cuda()
    out = kernels.flash_attn_varlen_func(*moved, cu_q.cuda(), cu_k, 20, 600, causal=True, block_table=table)
    for b in range(len(lens)):
        rows = slice(*cu_q[b : b + 2])
        torch.testing.assert_close(out[rows].float().cpu(), naive(q[rows], k[b], v[b], True), rtol=0.05, atol=0.02)


# --- linear layers and small operations -------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_linear_is_a_linear(rows, bias):
    linear = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    x = randn(rows, 48)
    torch.testing.assert_close(PackedLinear(linear)(x), F.linear(x, linear.weight, linear.bias), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="needs FBGEMM")
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_half_the_bytes_lose_nothing_of_a_bfloat16_weight(rows, bias):
    """Float32 arithmetic on float16 weights: as far from float64 as plain float32 is."""
    linear = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    linear.weight.copy_(linear.weight.bfloat16())
    x, exact = randn(rows, 48), linear.weight.double()
    expected = F.linear(x.double(), exact, linear.bias.double() if bias else None).float()
    torch.testing.assert_close(HalfBytesLinear(linear)(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="needs FBGEMM")
def test_only_weights_that_float16_holds_are_kept_in_it():
    fits, finer, larger = (nn.Linear(8, 8, bias=False).requires_grad_(False) for _ in range(3))
    fits.weight.copy_(fits.weight.bfloat16())
    finer.weight.fill_(1 + 2.0**-12)
    larger.weight.fill_(1e6)
    module = nn.Sequential(fits, finer, larger)
    pack_linears(module, "portable")
    assert [isinstance(child, HalfBytesLinear) for child in module] == [True, False, False]


def test_every_linear_of_a_module_is_packed():
    module = nn.Sequential(
        nn.Linear(8, 8), nn.ModuleDict({"inner": nn.Linear(8, 4)}), nn.Embedding(3, 8)
    ).requires_grad_(False)
    expected = F.linear(
        F.linear(torch.ones(2, 8), module[0].weight, module[0].bias), module[1]["inner"].weight, module[1]["inner"].bias
    )
    pack_linears(module, "portable")
    torch.testing.assert_close(module[1]["inner"](module[0](torch.ones(2, 8))), expected, rtol=1e-5, atol=1e-5)
    assert isinstance(module[2], nn.Embedding)
    if torch.backends.mkldnn.is_available():
        assert not any(isinstance(child, nn.Linear) for child in module.modules())


def test_rms_norm():
    x, weight = 3 * randn(5, 4, 16), randn(16)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-2), expected)
    delta = randn(5, 4, 16, seed=1)
    total, normed = ops.add_rms_norm(x, delta, weight, 1e-2)
    torch.testing.assert_close(total, x + delta)
    torch.testing.assert_close(normed, ops.rms_norm(x + delta, weight, 1e-2))


def test_rope_turns_pairs_by_the_angle():
    """Dimension d and d + D/2 are a point in the plane; the same turn as multiplying complex numbers."""
    x, angles = randn(6, 3, 8), torch.rand(6, 1, 4) * 6
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(ops.rope(x, cos, sin), torch.cat([turned.real, turned.imag], -1))


def test_silu_and_mul():
    x = randn(7, 24)
    gate, up = x[:, :12].clone(), x[:, 12:].clone()
    torch.testing.assert_close(ops.silu_and_mul(x), gate / (1 + (-gate).exp()) * up)


# --- choices ----------------------------------------------------------------------------------------------------


def test_select_kernels():
    assert select_kernels("portable", CPU, torch.bfloat16, 64).flash_attn_varlen_func is portable.flash_attn_varlen_func
    with pytest.raises(UserError, match="a GPU"):
        select_kernels("flash", CPU, torch.float32, 64)
    with pytest.raises(UserError, match="float16 or bfloat16"):
        select_kernels("flash", torch.device("cuda"), torch.float32, 64)
    with pytest.raises(UserError, match=r"'nonesuch' is unknown; use .*portable"):
        select_kernels("nonesuch", CPU, torch.float32, 64)


def test_resolve_device():
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("cuda:99", "tpu", "", "cuda:x", "meta"):
        with pytest.raises(UserError, match=name.split(":")[0] or "device"):
            resolve_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu():
    with pytest.raises(UserError, match="--device cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("machine", "avx512_bf16", "amx", "onednn", "expected"),
    [
        ("x86_64", False, False, True, torch.float32),  # AVX-512 without bf16: oneDNN emulates, and says yes
        ("x86_64", True, False, True, torch.bfloat16),
        ("x86_64", False, True, True, torch.bfloat16),
        ("x86_64", False, False, False, torch.float32),
        ("aarch64", False, False, True, torch.bfloat16),
        ("arm64", False, False, False, torch.float32),
    ],
)
def test_auto_is_bfloat16_where_the_cpu_multiplies_it(machine, avx512_bf16, amx, onednn, expected, monkeypatch):
    monkeypatch.delenv(DTYPE_VARIABLE, raising=False)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    assert resolve_dtype("auto", CPU) == expected


def test_resolve_dtype(monkeypatch):
    monkeypatch.setenv(DTYPE_VARIABLE, "bfloat16")
    assert resolve_dtype("auto", CPU) == torch.bfloat16
    assert resolve_dtype("float32", CPU) == torch.float32
    monkeypatch.delenv(DTYPE_VARIABLE)
    assert resolve_dtype("float16", CPU) == torch.float16
    assert resolve_dtype("auto", CPU) in (torch.float32, torch.bfloat16)
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    with pytest.raises(UserError, match="int8"):
        resolve_dtype("int8", CPU)
