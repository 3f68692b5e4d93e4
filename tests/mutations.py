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
        "offsets = self.seq_lens - self.extend_lens.cumsum()",
        "offsets = self.seq_lens - self.extend_lens.cumsum() + 1",
        "test_stage4.py::test_the_text_does_not_depend_on_budget_regions_and_order",
    ),
    Mutation(
        "the logits of the wrong tokens",
        "stage2_req/req.py",
        "(self.extend_lens.cumsum() - 1)[self.sample_mask]",
        "(self.extend_lens.cumsum() - 1)[: len(self.sampled)]",
        "test_stage4.py::test_the_text_does_not_depend_on_budget_regions_and_order",
    ),
    Mutation(
        "decodes are not first",
        "stage2_req/req.py",
        'order = np.argsort(~is_decode, kind="stable")',
        "order = np.arange(len(reqs))",
        "test_stage4.py::test_the_text_does_not_depend_on_budget_regions_and_order",
    ),
    Mutation(
        "the last token gets a slot",
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
        "two requests have the same uid",
        "stage2_req/scheduler.py",
        "if req.uid in self.reqs:",
        "if False:",
        "test_stage2.py::test_a_uid_that_is_in_use_is_refused_and_nothing_changes",
    ),
    Mutation(
        "noise by what the host has seen",
        "stage2_req/sampling.py",
        "np.array([req.device_len for req in reqs], np.uint64)",
        "np.array([len(req.token_ids) for req in reqs], np.uint64)",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "`out_loc` is off by one",
        "stage4_batch/page_table.py",
        "+ positions % self.page_size",
        "+ (positions + 1) % self.page_size",
        "test_stage5.py::test_the_text_does_not_depend_on_the_page_size",
    ),
    Mutation(
        "the device's page table is stale",
        "stage4_batch/page_table.py",
        "self.device.view(-1).index_copy_(0, both[: -len(pages)].view(torch.int64), both[-len(pages) :])",
        "pass",
        "test_stage5.py::test_a_request_holds_as_many_pages_as_its_positions_need",
    ),
    Mutation(
        "a decode overwrites the slot after its own",
        "stage4_batch/attention.py",
        "Decodes(self.int32(batch.prefix_lens),",
        "Decodes(self.int32(batch.seq_lens),",
        "test_stage4.py::test_the_text_does_not_depend_on_budget_regions_and_order",
    ),
    Mutation(
        "a decode beside a prompt does not see its newest token",
        "stage4_batch/attention.py",
        "Decodes(self.int32(batch.seq_lens[:d]),",
        "Decodes(self.int32(batch.prefix_lens[:d]),",
        "test_stage4.py::test_the_text_does_not_depend_on_budget_regions_and_order",
    ),
    Mutation(
        "a dropped row keeps its pages",
        "stage5_paged/cache.py",
        "pages, self.held[row] = self.page_table.host[row, : self.held[row]].copy(), 0",
        "pages = self.page_table.host[row, : self.held[row]].copy()",
        "test_stage5.py::test_the_oldest_go_on_and_the_text_is_the_same",
    ),
    Mutation(
        "admission leaves no head-room",
        "stage5_paged/cache.py",
        "head_room = len(self.table_idx) * self.pages_for(self.reserve)",
        "head_room = 0",
        "test_stage5.py::test_admission_leaves_head_room_for_running_requests",
    ),
    Mutation(
        "the oldest request is retracted",
        "stage5_paged/scheduler.py",
        "self.running.pop()",
        "self.running.pop(0)",
        "test_stage5.py::test_which_request_gives_way_and_when",
    ),
    Mutation(
        "a retracted request waits at the end",
        "stage5_paged/scheduler.py",
        "self.waiting.appendleft(req)",
        "self.waiting.append(req)",
        "test_stage5.py::test_which_request_gives_way_and_when",
    ),
    Mutation(
        "a retracted request is let in again in the same step",
        "stage5_paged/scheduler.py",
        "self.memory_is_short = True",
        "self.memory_is_short = False",
        "test_stage5.py::test_a_request_retracted_in_a_step_is_not_admitted_in_that_step",
    ),
    Mutation(
        "unseen tokens are not looked up",
        "stage6_cudagraph/overlap.py",
        "return torch.where(ids == UNSEEN, self.tokens[table_idx], ids)",
        "return ids.long()",
        "test_stage6.py::test_the_future_map_gives_what_was_stored",
    ),
    Mutation(
        "new tokens in the wrong place of the future map",
        "stage6_cudagraph/overlap.py",
        "self.tokens.index_put_((table_idx,), tokens)",
        "self.tokens[: len(tokens)] = tokens",
        "test_stage6.py::test_the_future_map_gives_what_was_stored",
    ),
    Mutation(
        "new tokens under the index of another request",
        "stage6_cudagraph/overlap.py",
        "self.futures.store(upload(batch.table_idx[batch.sample_mask], self.device), samples.tokens)",
        "self.futures.store(upload(np.arange(len(batch.sampled)), self.device), samples.tokens)",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "unseen tokens of another request",
        "stage6_cudagraph/overlap.py",
        "upload(np.repeat(batch.table_idx, batch.extend_lens), self.device)",
        "upload(np.zeros(len(host), np.int64), self.device)",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "samples are not copied before the next step draws",
        "stage6_cudagraph/overlap.py",
        "non_blocking=True, copy=True)",
        "non_blocking=True)",
        "test_stage6.py::test_samples_on_the_host_do_not_change_with_the_devices_memory",
    ),
    Mutation(
        "the copy to the host is not waited for",
        "stage6_cudagraph/overlap.py",
        "            self.copied.synchronize()",
        "            pass",
        "test_stage6.py::test_tokens_are_read_after_their_copy_has_run",
    ),
    Mutation(
        "penalties do not wait for the text",
        "stage6_cudagraph/overlap.py",
        "if self.in_flight and any(",
        "if False and any(",
        "test_stage6.py::test_penalties_see_the_whole_text",
    ),
    Mutation(
        "padding is a request",
        "stage6_cudagraph/graph_runner.py",
        "        inputs.table_idx[:] = -1\n",
        "",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "a plain draw in place of a filtered one",
        "stage6_cudagraph/graph_runner.py",
        "        if plain:\n            return HostSamples",
        "        if count:\n            return HostSamples",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "the end of a prompt's chunk is taken for a decode",
        "stage6_cudagraph/graph_runner.py",
        "batch.num_decodes == count and len(batch.sampled) == count and",
        "batch.num_decodes == count and",
        "test_stage6.py::test_retracted_while_a_step_is_under_way",
    ),
    Mutation(
        "padding writes into the first page",
        "stage6_cudagraph/mixed_graphs.py",
        "self.out_loc[:tokens], self.out_loc[tokens:] = slots, padding_slot",
        "self.out_loc[:tokens], self.out_loc[tokens:] = slots, 0",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "the token of padding is that of a request",
        "stage6_cudagraph/mixed_graphs.py",
        "batch.table_idx[batch.sample_mask], -1",
        "batch.table_idx[batch.sample_mask], 0",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "a captured chunk does not see what is before it",
        "stage6_cudagraph/mixed_graphs.py",
        "np.cumsum([0, *batch.seq_lens[d:]])",
        "np.cumsum([0, *batch.extend_lens[d:]])",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "padding decodes",
        "stage6_cudagraph/mixed_graphs.py",
        "self.cache_seqlens[:d] = batch.seq_lens[:d]",
        "self.cache_seqlens[:] = batch.seq_lens.max()",
        "test_stage6.py::test_random_histories",
    ),
    Mutation(
        "padding is in no sequence",
        "stage6_cudagraph/mixed_graphs.py",
        "self.cu_seqlens_q[-1] = tokens, len(self.input_ids)",
        "self.cu_seqlens_q[-1] = tokens, tokens",
        "test_stage6.py::test_padding_keeps_the_pool_finite",
    ),
    Mutation(
        "one sequence too few in a captured step",
        "stage6_cudagraph/mixed_graphs.py",
        "shape.chunks + 2, shape.decodes",
        "shape.chunks + 1, shape.decodes",
        "test_stage6.py::test_steps_of_few_and_of_many_chunks",
    ),
    Mutation(
        "a hit leaves nothing to compute",
        "stage7_radix/cache.py",
        "end = req.device_len - 1",
        "end = req.device_len",
        "test_stage7.py::test_a_hit_is_not_computed_again",
    ),
    Mutation(
        "room is looked for before the lock",
        "stage7_radix/cache.py",
        "        self.tree.lock(node)  # before the look for room: what the request is going to use can't be evicted for it\n        if not self.has_room(pages - len(found)):\n            self.tree.unlock(node)\n            return False\n",
        "        if not self.has_room(pages - len(found)):\n            return False\n        self.tree.lock(node)\n",
        "test_stage7.py::test_what_a_newcomer_is_going_to_use_is_not_evicted_for_it",
    ),
    Mutation(
        "missing unlock",
        "stage7_radix/cache.py",
        "        self.tree.unlock(handle)\n        self.allocator.free(pages[handle.depth : known])",
        "        self.allocator.free(pages[handle.depth : known])",
        "test_stage7.py::test_a_request_that_is_done_leaves_full_pages_and_the_next_finds_them",
    ),
    Mutation(
        "lost tail",
        "stage7_radix/cache.py",
        "        self.allocator.free(pages[full:])\n",
        "",
        "test_stage7.py::test_a_request_that_is_done_leaves_full_pages_and_the_next_finds_them",
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
        'return req.params.cache_salt if isinstance(req.params, RequestParams) else ""',
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
    Mutation(
        "every rank draws for itself in a captured step",
        "stage8_tp/engine.py",
        "return self.ranks.broadcast(self.sampler.draw(logits, inv_temperature, key_low, key_high))",
        "return self.sampler.draw(logits, inv_temperature, key_low, key_high)",
        "test_stage8.py::test_only_rank_0_draws",
    ),
    Mutation(
        "the other ranks choose another uid",
        "stage8_tp/engine.py",
        "  engine.add(prompt_ids, params, uid)",
        "  engine.add(prompt_ids, params)",
        "test_stage8.py::test_all_ranks_know_a_request_by_the_callers_uid",
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
