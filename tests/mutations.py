"""Lines that bear the load, broken one by one: each time the named test must fail.

    python -m tests.mutations            # all of them, in a copy of the repository; some minutes
    python -m tests.mutations locks      # those whose file, line or test has this word

tests/README.md shows the list as a table, which `python -m tests.mutations --table` prints.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    what: str
    file: str
    line: str  # occurs once in the file
    broken: str  # what stands there instead
    test: str  # fails then; a node id, below tests/


MUTATIONS = [
    Mutation(
        "positions are one too high",
        "stage2_req/req.py",
        "np.repeat(self.ends - self.lens.cumsum(), self.lens)",
        "np.repeat(self.ends - self.lens.cumsum() + 1, self.lens)",
        "test_stage4.py::test_the_text_does_not_depend_on_budget_slots_and_order",
    ),
    Mutation(
        "`last_index` of the wrong requests",
        "stage2_req/req.py",
        "(self.lens.cumsum() - 1)[self.samples]",
        "(self.lens.cumsum() - 1)[: len(self.sampled)]",
        "test_stage4.py::test_the_text_does_not_depend_on_budget_slots_and_order",
    ),
    Mutation(
        "the last token gets a row",
        "stage2_req/req.py",
        "if self.device_len < self.max_device_len else 0",
        "if self.device_len <= self.max_device_len else 0",
        "test_stage6.py::test_an_end_by_length_is_foreseen_and_computes_nothing_more",
    ),
    Mutation(
        "a stray token is kept",
        "stage2_req/scheduler.py",
        "if req.finish_reason:  # it ended",
        "if False:  # it ended",
        "test_stage6.py::test_a_stray_token_after_an_unforeseen_end_is_dropped",
    ),
    Mutation(
        "noise by what the host has seen",
        "stage2_req/sampling.py",
        "np.array([req.device_len for req in reqs], np.uint64)",
        "np.array([len(req.token_ids) for req in reqs], np.uint64)",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "`out_loc` of a slot is off by one",
        "stage4_batch/attention.py",
        "rows * self.block_size + positions",
        "rows * self.block_size + positions - 1",
        "test_stage4.py::test_the_text_does_not_depend_on_budget_slots_and_order",
    ),
    Mutation(
        "`out_loc` in a page is off by one",
        "stage5_paged/attention.py",
        "+ positions % self.block_size",
        "+ (positions + 1) % self.block_size",
        "test_stage5.py::test_the_text_does_not_depend_on_the_page_size",
    ),
    Mutation(
        "the device's page table is stale",
        "stage5_paged/cache.py",
        "self.page_table.view(-1).index_copy_(0, both[: -len(pages)].view(torch.int64), both[-len(pages) :])",
        "pass",
        "test_stage5.py::test_a_request_holds_as_many_pages_as_its_rows_need",
    ),
    Mutation(
        "a dropped row keeps its pages",
        "stage5_paged/cache.py",
        "pages, self.held[row] = self.table[row, : self.held[row]].copy(), 0",
        "pages = self.table[row, : self.held[row]].copy()",
        "test_stage5.py::test_the_oldest_go_on_and_the_text_is_the_same",
    ),
    Mutation(
        "admission leaves no head-room",
        "stage5_paged/cache.py",
        "head_room = len(self.rows) * self.pages_for(self.reserve)",
        "head_room = 0",
        "test_stage5.py::test_admission_leaves_head_room_for_those_who_run",
    ),
    Mutation(
        "the oldest gives way",
        "stage5_paged/scheduler.py",
        "self.running.pop()",
        "self.running.pop(0)",
        "test_stage5.py::test_who_gives_way_and_when",
    ),
    Mutation(
        "who gave way waits at the end",
        "stage5_paged/scheduler.py",
        "self.waiting.appendleft(req)",
        "self.waiting.append(req)",
        "test_stage5.py::test_who_gives_way_and_when",
    ),
    Mutation(
        "padding rows are those of a request",
        "stage6_cudagraph/decode_graphs.py",
        "        host[1] = -1\n",
        "",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "draws of another step are taken",
        "stage6_cudagraph/decode_graphs.py",
        "self.drawn = logits if simple else None",
        "self.drawn = logits",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "padding tokens are those of a request",
        "stage6_cudagraph/mixed_graphs.py",
        "        rows[:] = -1\n",
        "",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "a recorded chunk does not see what is before it",
        "stage6_cudagraph/mixed_graphs.py",
        "np.cumsum([0, *batch.ends[decodes:]])",
        "np.cumsum([0, *batch.lens[decodes:]])",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "who is not there decodes all the same",
        "stage6_cudagraph/mixed_graphs.py",
        "lens[:decodes] = batch.ends[:decodes]",
        "lens[:] = batch.ends.max()",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "padding is in no sequence",
        "stage6_cudagraph/mixed_graphs.py",
        "        cu_q[-1] = shape[0]\n",
        "",
        "test_stage6.py::test_padding_keeps_the_pool_finite",
    ),
    Mutation(
        "one sequence too few in a recorded step",
        "stage6_cudagraph/mixed_graphs.py",
        "CHUNKS + 2, CHUNKS + 3, CHUNKS + 3",
        "CHUNKS + 1, CHUNKS + 2, CHUNKS + 2",
        "test_stage6.py::test_as_many_chunks_as_a_graph_takes",
    ),
    Mutation(
        "samples are not copied before the next step draws",
        "stage6_cudagraph/overlap.py",
        "non_blocking=True, copy=True)",
        "non_blocking=True)",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "the copy to the host is not waited for",
        "stage6_cudagraph/overlap.py",
        "            step.copied.synchronize()",
        "            pass",
        "test_stage6.py::test_tokens_are_read_after_their_copy_has_run",
    ),
    Mutation(
        "unseen ids from the wrong request",
        "stage6_cudagraph/overlap.py",
        "sources.append(index[req.uid])",
        "sources.append(len(sources))",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "a step of the same requests is taken for decodes",
        "stage6_cudagraph/overlap.py",
        "== len(batch.reqs) == len(batch.sampled) == len(before)",
        "== len(batch.reqs) == len(before)",
        "test_stage6.py::test_retracted_and_let_in_again_at_once",
    ),
    Mutation(
        "penalties do not wait for the text",
        "stage6_cudagraph/overlap.py",
        "if self.in_flight and any(",
        "if False and any(",
        "test_stage6.py::test_penalties_see_the_whole_text",
    ),
    Mutation(
        "a hit leaves nothing to compute",
        "stage7_radix/cache.py",
        "node, found = self.tree.match_prefix(req.token_ids[: req.device_len - 1], salt(req))",
        "node, found = self.tree.match_prefix(req.token_ids[: req.device_len], salt(req))",
        "test_stage7.py::test_a_hit_is_not_computed_again",
    ),
    Mutation(
        "room is looked for before the lock",
        "stage7_radix/cache.py",
        "        self.tree.lock(node)  # before looking for room: what it is going to use can't be evicted for it\n        if not self.has_room(pages - len(found)):\n            self.tree.unlock(node)\n            return False\n",
        "        if not self.has_room(pages - len(found)):\n            return False\n        self.tree.lock(node)\n",
        "test_stage7.py::test_what_a_newcomer_is_going_to_use_is_not_evicted_for_it",
    ),
    Mutation(
        "missing unlock",
        "stage7_radix/cache.py",
        "        self.tree.unlock(handle)\n        self.allocator.free(pages[handle.depth : known])",
        "        self.allocator.free(pages[handle.depth : known])",
        "test_stage7.py::test_who_is_done_leaves_full_pages_and_the_next_finds_them",
    ),
    Mutation(
        "lost tail",
        "stage7_radix/cache.py",
        "        self.allocator.free(pages[full:])\n",
        "",
        "test_stage7.py::test_who_is_done_leaves_full_pages_and_the_next_finds_them",
    ),
    Mutation(
        "a token that the host has not seen is in the tree",
        "stage7_radix/cache.py",
        "full = min(req.cached_len, len(req.token_ids)) // self.page_size",
        "full = req.cached_len // self.page_size",
        "test_stage7.py::test_a_token_that_the_host_has_not_seen_stays_out_of_the_tree",
    ),
    Mutation(
        "tenants share",
        "stage7_radix/cache.py",
        'return getattr(req.params, "cache_salt", "")',
        'return ""',
        "test_stage7.py::test_salts_keep_tenants_apart",
    ),
    Mutation(
        "a split forgets the locks",
        "stage7_radix/radix_tree.py",
        "        upper.locks = node.locks\n",
        "",
        "test_stage7_tree.py::test_a_split_keeps_locks_and_handles",
    ),
    Mutation(
        "what is locked is evicted",
        "stage7_radix/radix_tree.py",
        "if node.used == used and not (node.children or node.locks):",
        "if node.used == used and not node.children:",
        "test_stage7_tree.py::test_what_was_locked_right_after_its_insertion_stays",
    ),
    Mutation(
        "every rank draws for itself",
        "stage8_tp/engine.py",
        "        self.ranks.broadcast(samples.tokens)\n",
        "",
        "test_stage8.py::test_only_rank_0_draws",
    ),
]


def main() -> int:
    """Returns the number of mutations that no test noticed."""
    words = sys.argv[1:]
    if words == ["--table"]:
        print(table())
        return 0
    chosen = [m for m in MUTATIONS if all(word in " ".join(m) for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "results"))
        survivors = [m for m in chosen if not is_noticed(m, copy)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations were noticed")
    return len(survivors)


def is_noticed(mutation: Mutation, copy: Path) -> bool:
    source, path = (ROOT / mutation.file).read_text(), copy / mutation.file
    path.write_text(source.replace(mutation.line, mutation.broken))
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"tests/{mutation.test}"]
    run = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    path.write_text(source)
    noticed = run.returncode == 1  # a test failed
    print(f"{'noticed ' if noticed else 'SURVIVED'}  {mutation.file}: {mutation.what} ({mutation.test})", flush=True)
    if run.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run: status {run.returncode}\n{run.stdout}")
    return noticed


def table() -> str:
    """The list in Markdown."""

    def code(text: str) -> str:
        return "`" + " ".join(text.split()) + "`" if text.strip() else "(gone)"

    rows = [
        f"| {m.what} | [{m.file}](../{m.file}) | {code(m.line)} | {code(m.broken)} | `{m.test}` |" for m in MUTATIONS
    ]
    return "\n".join(["| What breaks | File | The line | becomes | Test that fails |", "|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    sys.exit(main())
