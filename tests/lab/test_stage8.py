"""The lab, chapter 8: tensor parallelism."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

from common.checkpoint import load_config
from common.config import UserError
from stage7_radix.params import RequestParams
from stage8_tp.engine import TPEngine, decode
from stage8_tp.ranks import Alone
from stage8_tp.shard import RowParallel, Shard, VocabParallelEmbedding
from tests.lab.learner import expect, expect_close
from tests.ranks import on_ranks


def shards(world: int, heads: int, kv_heads: int) -> list[Shard]:
    whole = replace(load_config("dummy:tiny")[0], num_heads=heads, num_kv_heads=kv_heads, intermediate_size=64)
    return [Shard(whole, rank, world) for rank in range(world)]


class Test_8_1:
    """kv_heads"""

    def test_the_heads_are_divided(self):
        heads = [list(shard.kv_heads) for shard in shards(2, 8, 4)]
        expect("4 KV heads on 2 ranks", heads, [[0, 1], [2, 3]])

    def test_as_evenly_as_can_be_and_each_once(self):
        heads = [list(shard.kv_heads) for shard in shards(2, 9, 3)]
        expect("3 KV heads on 2 ranks: all, in order", [head for part in heads for head in part], [0, 1, 2])
        expect("how many each has, sorted", sorted(map(len, heads)), [1, 2])

    def test_one_rank_has_all(self):
        expect("4 KV heads on 1 rank", list(shards(1, 8, 4)[0].kv_heads), [0, 1, 2, 3])

    def test_with_more_ranks_than_heads_several_have_the_same(self):
        heads = [list(shard.kv_heads) for shard in shards(8, 8, 4)]
        expect("4 KV heads on 8 ranks", heads, [[0], [0], [1], [1], [2], [2], [3], [3]])

    def test_queries_are_where_their_keys_are(self):
        found = [{head // 2 for head in shard.heads} == set(shard.kv_heads) for shard in shards(2, 8, 4)]
        expect("8 query heads, 4 KV heads, 2 ranks: has each rank the KV heads of its queries?", found, [True, True])


def linear(weight: torch.Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return made


def row_parallel() -> tuple[list[torch.Tensor], torch.Tensor]:
    """What both ranks get for x [3, 8] times a weight [5, 8], 4 columns each; and what one process gets."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 8), torch.randn(5, 8)

    def work(ranks):
        part = slice(4 * ranks.rank, 4 * ranks.rank + 4)
        return RowParallel(linear(weight[:, part]), ranks)(x[:, part])

    return on_ranks(2, work), x @ weight.T


class Test_8_2:
    """RowParallel.forward"""

    def test_the_products_of_the_parts_add_up(self):
        parts, whole = row_parallel()
        expect_close("rank 0's result", parts[0], whole)

    def test_every_rank_has_the_sum(self):
        parts, whole = row_parallel()
        expect_close("rank 1's result", parts[1], whole)

    def test_alone_it_is_the_layer_itself(self):
        x, weight = torch.ones(2, 4), torch.arange(12.0).view(3, 4)
        out = RowParallel(linear(weight), Alone(torch.device("cpu")))(x)
        expect("ones times a weight with rows 0..3, 4..7, 8..11", out, [[6.0, 22.0, 38.0]] * 2)


def embedded(*ids: int) -> list[torch.Tensor]:
    """What both ranks get; rank 0 has tokens 0 to 3, rank 1 has 4 to 7, and token t's row is [t, t + 0.5]."""

    def work(ranks):
        first = 4 * ranks.rank
        rows = torch.arange(first, first + 4).float()
        table = nn.Embedding.from_pretrained(torch.stack((rows, rows + 0.5), 1))
        return VocabParallelEmbedding(table, first, ranks)(torch.tensor(ids))

    return on_ranks(2, work)


class Test_8_3:
    """VocabParallelEmbedding.forward"""

    def test_rows_of_the_first_rank(self):
        expect("rows of tokens 1 and 3, on rank 1", embedded(1, 3)[1], [[1, 1.5], [3, 3.5]])

    def test_rows_of_the_second_rank(self):
        expect("rows of tokens 4 and 7, on rank 0", embedded(4, 7)[0], [[4, 4.5], [7, 7.5]])

    def test_both_in_one_step(self):
        expect("rows of tokens 7, 0, 4", embedded(7, 0, 4)[0], [[7, 7.5], [0, 0.5], [4, 4.5]])


class Worker:
    """Stands for a rank's engine, and notes what it is asked for."""

    model = device = scheduler = cache = runner = None

    def __init__(self, refuses: bool = False):
        self.calls, self.waiting, self.refuses = [], 0, refuses

    def add(self, prompt_ids, params, uid=None):
        self.calls.append(("add", list(prompt_ids), uid or 7))
        self.waiting += 1
        return uid or 7

    def abort(self, uid):
        self.calls.append(("abort", uid))
        return True

    def step(self):
        self.calls.append("step")
        return ["a token"]

    def generate(self, prompts, params, progress=False):
        self.calls.append("generate")
        if self.refuses:
            raise UserError("no")
        return []

    def has_work(self):
        return self.waiting > 0


def rank_0() -> tuple[TPEngine, Worker, list[bytes]]:
    """Its engine, and the messages that it sends."""
    worker, sent = Worker(), []
    return TPEngine(worker, SimpleNamespace(rank=0, world=2, broadcast_bytes=sent.append)), worker, sent


def followed(sent: list[bytes], refuses: bool = False) -> list:
    """What another rank does when it gets these messages."""
    worker, messages = Worker(refuses), iter(sent)
    TPEngine(worker, SimpleNamespace(rank=1, world=2, broadcast_bytes=lambda message=b"": next(messages))).follow()
    return worker.calls


class Test_8_4:
    """step and follow"""

    def test_the_others_do_the_same_in_the_same_order(self):
        engine, worker, sent = rank_0()
        uid = engine.add([1, 2], RequestParams(), 42)
        engine.step()
        engine.abort(uid)
        engine.step()
        engine.close()
        expect("calls on rank 1, as on rank 0", followed(sent), worker.calls)

    def test_what_was_asked_for_travels_with_the_next_step(self):
        engine, _, sent = rank_0()
        engine.add([1, 2], RequestParams())
        engine.step()
        kinds = [[type(call).__name__ for call in decode(message)] for message in sent]
        expect("messages after add and step", kinds, [["AddCall", "StepCall"]])

    def test_a_step_returns_its_tokens(self):
        engine, _, _ = rank_0()
        engine.add([1, 2], RequestParams())
        expect("step() with work", engine.step(), ["a token"])

    def test_without_work_nothing_is_sent(self):
        engine, worker, sent = rank_0()
        expect("step() without work", engine.step(), [])
        expect("messages, calls", [sent, worker.calls], [[], []])

    def test_what_is_refused_on_all_ranks_ends_none(self):
        engine, _, sent = rank_0()
        engine.generate([[1]], RequestParams())
        engine.generate([[1]], RequestParams())
        engine.close()
        expect("calls on a rank whose engine refuses both", followed(sent, refuses=True), ["generate", "generate"])
