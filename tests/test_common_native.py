"""The kernels compiled from native.c against PyTorch's operations; and what happens where they can't be compiled."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.config import UserError
from common.kernels import native, ops, portable, select_kernels
from common.kernels.cpu_linear import pack_linears

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def randn(*shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, want, dtype):
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got, want, **tolerance)


def test_auto_takes_the_compiled_kernels():
    assert select_kernels("auto", CPU, torch.float32, 64).name == "native"
    assert select_kernels("auto", CPU, torch.float16, 64).name == "portable"


@pytest.mark.parametrize("way", ["no compiler", "one that fails"])
def test_without_them_portable_serves(way, tmp_path, monkeypatch):
    compiler = None
    if way == "one that fails":
        compiler = tmp_path / "gcc"
        compiler.write_text("#!/bin/sh\nexit 1\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("SGLANG_ZERO_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "load", native.load.__wrapped__)
    monkeypatch.setattr(shutil, "which", lambda _: compiler and str(compiler))
    assert select_kernels("auto", CPU, torch.float32, 64).name == "portable"
    with pytest.raises(UserError, match=r"--attn native needs a C compiler .*; use --attn portable"):
        select_kernels("native", CPU, torch.float32, 64)


@dtypes
@pytest.mark.parametrize("rows, size", [(1, 24), (5, 576), (40, 1000)])
def test_small_operations(rows, size, dtype):
    x, delta, weight = (randn(rows, size, dtype=dtype, seed=i) for i in range(3))
    close(native.rms_norm(x, weight[0], 1e-5), ops.rms_norm(x, weight[0], 1e-5), dtype)
    for got, want in zip(*(m.add_rms_norm(x, delta, weight[0], 1e-5) for m in (native, ops)), strict=True):
        close(got, want, dtype)
    gate_up = torch.cat((10 * x, delta), -1)
    close(native.silu_and_mul(gate_up), ops.silu_and_mul(gate_up), dtype)


@dtypes
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("tokens, heads, heads_kv, dim", [(1, 9, 3, 64), (7, 4, 2, 8), (40, 14, 2, 80)])
def test_qk_norm_rope(tokens, heads, heads_kv, dim, norm, dtype):
    x = randn(tokens, heads + 2 * heads_kv, dim, dtype=dtype)
    weights = [randn(dim, dtype=dtype, seed=i) for i in (1, 2)] if norm else [None, None]
    angles = randn(tokens, 1, dim // 2, seed=3)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    want = ops.qk_norm_rope(x.clone(), heads, heads_kv, *weights, 1e-5, cos, sin)
    for got, expected in zip(native.qk_norm_rope(x, heads, heads_kv, *weights, 1e-5, cos, sin), want, strict=True):
        close(got, expected, dtype)


@dtypes
@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, None])
@pytest.mark.parametrize("heads, heads_kv, dim", [(9, 3, 64), (4, 2, 8), (6, 6, 128), (14, 2, 80)])
def test_decode_attention(heads, heads_kv, dim, page_size, append, dtype):
    """Of requests of 1 to 100 tokens, and of an unused place of a padded batch; queries as a view of a wider tensor."""
    lens = torch.tensor([0, 1, 31, 32, 33, 100], dtype=torch.int32)
    batch, regions = len(lens), page_size is None
    size = 128 if regions else page_size
    per_request = -(-128 // size)
    caches = [randn(batch * per_request, size, heads_kv, dim, dtype=dtype, seed=i) for i in (1, 2)]
    table = torch.randperm(batch * per_request, generator=torch.Generator().manual_seed(3)).int().view(batch, -1)
    where = {"cache_batch_idx": table[:, 0]} if regions else {"block_table": table}
    fused = randn(batch, heads + 2 * heads_kv, dim, dtype=dtype, seed=4)
    q, k, v = fused.split((heads, heads_kv, heads_kv), 1)
    new = [k[:, None], v[:, None]] if append else []
    results = []
    for kernels in (portable, native):
        copies = [cache.clone() for cache in caches]
        out = kernels.flash_attn_with_kvcache(q[:, None], *copies, *new, cache_seqlens=lens, causal=True, **where)
        results.append((out, *copies))
    for got, want in zip(*results[::-1], strict=True):
        close(got, want, dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inside, outside", [(48, 80), (576, 100), (33, 7)])
def test_linear(inside, outside, bias):
    """As far from float64 as plain float32 is; and each row is the same, to the bit, whatever the others are."""
    linear = nn.Linear(inside, outside, bias=bias).requires_grad_(False)
    linear.weight.copy_(linear.weight.bfloat16())
    module = nn.Sequential(linear)
    pack_linears(module, "native")
    assert isinstance(module[0], native.NativeLinear)
    x = randn(200, inside)
    alone = torch.cat([module(row[None]) for row in x])
    for rows in (1, 2, 5, 6, 7, 13, 96, 97, 200):
        got = module(x[:rows])
        want = F.linear(x[:rows].double(), linear.weight.double(), linear.bias.double() if bias else None)
        torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
        assert torch.equal(got, alone[:rows])
    assert module(x[:0]).shape == (0, outside)
    columns = torch.cat((x, x), 1)[:, :inside]  # not contiguous
    assert torch.equal(module(columns), alone)
    close(module(x.bfloat16()), F.linear(x, linear.weight, linear.bias).bfloat16(), torch.bfloat16)
