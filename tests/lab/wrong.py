"""Plausible mistakes in the lab's tasks, at least two for each: its tests have to notice them.

Each is a line of the reference and what stands there instead, like the mutations of tests/mutations.py, which break the
engine for the tests of the repository. `python -m common.lab bug` takes its bugs from both lists.
"""

from typing import NamedTuple


class Wrong(NamedTuple):
    what: str
    task: str
    line: str  # occurs once in the task's file
    broken: str


WRONG = [
    Wrong("only the newest token is computed", "1.1", "hidden = model(ids, torch.arange(length, device=device), attention)", "hidden = model(ids[-1:], torch.arange(length, device=device)[-1:], lambda layer, q, k, v: v.repeat_interleave(2, 1))"),
    Wrong("positions see what comes later", "1.1", "causal=True", "causal=False"),
    Wrong("the end token is kept back", "1.1", "        yield int(token)\n        if int(token) in model.config.eos_ids:\n            return\n", "        if int(token) in model.config.eos_ids:\n            return\n        yield int(token)\n"),
    Wrong("the end is not foreseen", "2.1", "self.cached_len if self.device_len < self.max_device_len else 0", "self.cached_len"),
    Wrong("counted from the prompt", "2.1", "return self.device_len - self.cached_len if", "return self.prompt_len - self.cached_len if"),
    Wrong(
        "a token of the caller's is taken for the model's end token",
        "2.2",
        'return "stop_token" if token in self.params.stop_token_ids else "eos"',
        'return "eos"',
    ),
    Wrong("the model's limit is taken for the caller's", "2.2", 'self.params.max_tokens else "length"', 'self.params.max_tokens else "max_tokens"'),
    Wrong("one token too many", "2.2", "if len(self.token_ids) < self.max_device_len:", "if len(self.token_ids) <= self.max_device_len:"),
    Wrong(
        "the token that reaches top_p is ruled out",
        "2.3",
        "keep &= probs.cumsum(-1) - probs < column",
        "keep &= probs.cumsum(-1) < column",
    ),
    Wrong("top_p before temperature", "2.3", "* column([1 / p.temperature for p in params])", "* 1.0"),
    Wrong("top_p sees what top_k ruled out", "2.3", "heated.masked_fill(~keep, -math.inf).softmax(-1)", "heated.softmax(-1)"),
    Wrong("min_p is absolute", "2.3", "keep &= probs >= probs[:, :1] * column", "keep &= probs >= column"),
    Wrong("tokens for all requests of the step", "2.4", "zip(batch.sampled, tokens, strict=True)", "zip(batch.reqs, tokens)"),
    Wrong("a stray token is kept", "2.4", "if req.finish_reason:  # it ended", "if False:  # it ended"),
    Wrong("all log-probabilities for everyone", "2.4", "logprobs[i].top[:wanted]", "logprobs[i].top"),
    Wrong("a request that is done stays", "2.4", "self.finish(req, reason)", "req.finish_reason = reason"),
    Wrong("everybody is let in", "3.1", "            return False\n        self.owner", "            pass\n        self.owner"),
    Wrong("old positions count as cached", "3.1", "self.owner, req.cached_len = req, 0", "self.owner = req"),
    Wrong("only the new positions are cached", "3.1", "zip(batch.reqs, batch.seq_lens.tolist(), strict=True)", "zip(batch.reqs, batch.extend_lens.tolist(), strict=True)"),
    Wrong("the whole prompt is cached after any step", "3.1", "req.cached_len = seq_len", "req.cached_len = req.device_len"),
    Wrong("slots are counted from 0 in every step", "3.2", "upload(batch.positions(), self.device)", "upload(np.arange(batch.num_tokens), self.device)"),
    Wrong("keys are only the new tokens", "3.2", "cu_seqlens_k=cu_seqlens(batch.seq_lens, self.device)", "cu_seqlens_k=cu_seqlens(batch.extend_lens, self.device)"),
    Wrong("lengths of 64 bits", "3.2", "upload(batch.seq_lens.astype(np.int32), self.device)", "upload(batch.seq_lens, self.device)"),
    Wrong("nothing is stored", "3.3", "        self.kernels.ops.store_kv(k_pool, v_pool, m.out_loc, k, v)\n", ""),
    Wrong("only the new keys are seen", "3.3", "        k, v = k_pool[: m.seq_len], v_pool[: m.seq_len]\n", ""),
    Wrong("all layers share a pool", "3.3", "self.pool.k[layer], self.pool.v[layer]", "self.pool.k[0], self.pool.v[0]"),
    Wrong("prompts hold decodes up", "4.1", "picks = [pick for pick in needs if pick[1] == 1]", "picks = [pick for pick in needs if pick[1] == 1][:budget]"),
    Wrong("every prompt gets the whole budget", "4.1", "            picks.append((req, n := min(n, budget)))\n            budget -= n\n", "            picks.append((req, n := min(n, budget)))\n"),
    Wrong("the shortest decode first", "4.1", "key=lambda pick: -pick[0].cached_len", "key=lambda pick: pick[0].cached_len"),
    Wrong("whoever fits comes in", "4.2", "    while budget > 0 and waiting and cache.admit(waiting[0]):\n        req = waiting.popleft()\n", "    for req in list(waiting):\n        if budget <= 0 or not cache.admit(req):\n            continue\n        waiting.remove(req)\n"),
    Wrong("a prompt is never cut", "4.2", "picks.append((req, n := min(req.extend_len, budget)))", "picks.append((req, n := req.extend_len))"),
    Wrong("the order is not asked", "4.2", "(first := order(waiting))", "(first := 0)"),
    Wrong("the request does not run", "4.2", "        running.append(req)\n", ""),
    Wrong("the offset is forgotten", "4.3", "return pages * self.page_size + positions % self.page_size", "return pages * self.page_size + positions * 0"),
    Wrong("the offset is the position", "4.3", "return pages * self.page_size + positions % self.page_size", "return pages * self.page_size + positions"),
    Wrong("32 bits overflow", "4.3", ".astype(np.int64)", ""),
    Wrong("newcomers get the whole budget", "4.4", "left = self.budget - sum(n for _, n in picks)", "left = self.budget"),
    Wrong("newcomers wait until nobody runs", "4.4", "newcomers, their_idx = admit_waiting(self.waiting, self.running, self.cache, left)", "newcomers, their_idx = admit_waiting(self.waiting, self.running, self.cache, 0 if picks else left)"),
    Wrong("table_idx in another order", "4.4", "np.append(table_idx, their_idx)", "np.append(their_idx, table_idx)"),
    Wrong("pages are handed out twice", "5.1", "        self.num_free -= n\n", ""),
    Wrong("a view of the stack", "5.1", "self.stack[self.num_free : self.num_free + n][::-1].copy()", "self.stack[self.num_free : self.num_free + n]"),
    Wrong("some pages instead of an error", "5.1", "if n > self.num_free:", "n = min(n, self.num_free)\n        if n < 0:"),
    Wrong("pages come back in the wrong place", "5.1", "self.stack[self.num_free : self.num_free + len(pages)] = pages[::-1]", "self.stack[: len(pages)] = pages"),
    Wrong("no head-room", "5.2", "head_room = len(self.table_idx) * self.pages_for(self.reserve)", "head_room = 0"),
    Wrong("head-room in tokens", "5.2", "self.pages_for(self.reserve)", "(self.reserve / self.page_size)"),
    Wrong("no look for a free row", "5.2", "return bool(self.free_table_idx) and pages", "return pages"),
    Wrong("pages for new positions, as if the last one were full", "5.3", "need = self.pages_for(seq_lens) - self.held[table_idx]", "need = self.pages_for(np.array([n for _, n in picks]))"),
    Wrong("it is forgotten how many pages a request has", "5.3", "            self.held[idx] += need\n", ""),
    Wrong("pages go to the beginning of the row", "5.3", "np.arange(len(pages)) + np.repeat(first, need)", "np.arange(len(pages)) - np.repeat(need.cumsum() - need, need)"),
    Wrong("only the host's copy is written", "5.3", "self.page_table.write(np.repeat(idx, need), np.arange(len(pages)) + np.repeat(first, need), pages)", "self.page_table.host[np.repeat(idx, need), np.arange(len(pages)) + np.repeat(first, need)] = pages"),
    Wrong("the oldest gives way", "5.4", "req = self.running.pop()", "req = self.running.pop(0)"),
    Wrong("it waits at the end", "5.4", "self.waiting.appendleft(req)", "self.waiting.append(req)"),
    Wrong("it is let in again in the same step", "5.4", "self.memory_is_short = True", "self.memory_is_short = False"),
    Wrong("it keeps its pages", "5.4", "        self.cache.release(req)\n", ""),
    Wrong("half a page counts", "7.1", "agreed = (length if same.all() else int(same.argmin())) // self.page_size", "agreed = -(-(length if same.all() else int(same.argmin())) // self.page_size)"),
    Wrong("only the first node", "7.1", "node, start = child, start + length", "return"),
    Wrong("it looks at the node after the caller has split it", "7.1", "            if not whole:\n", "            if agreed < len(child.pages):\n"),
    Wrong("all salts are one", "7.1", "while child := node.children.get(self.edge(salt, tokens[start:])):", 'while child := node.children.get(self.edge("", tokens[start:])):'),
    Wrong("the upper part has no holders", "7.2", "        upper.locks = node.locks\n", ""),
    Wrong("the upper part is not found", "7.2", "        node.parent.children[self.edge(node.salt, node.key)] = upper\n", ""),
    Wrong("the lower part is not found", "7.2", "        upper.children[self.edge(node.salt, node.key)] = node\n", ""),
    Wrong("the lower part keeps all pages", "7.2", "node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[num_pages:]", "node.parent, node.key = upper, node.key[cut:]"),
    Wrong("only the node itself is locked", "7.3", "            part.locks += 1\n", "            part.locks += 1\n            break\n"),
    Wrong("every holder counts the pages", "7.3", "self.num_locked += len(part.pages) * (part.locks == 0)", "self.num_locked += len(part.pages)"),
    Wrong("no candidate after unlock", "7.3", "        self.enqueue(node)\n\n    def enqueue", "\n    def enqueue"),
    Wrong("what is held is evicted", "7.4", "if node.used == used and not (node.children or node.locks):", "if node.used == used and not node.children:"),
    Wrong("first in, first out", "7.4", "if node.used == used and not (node.children or node.locks):", "if not (node.children or node.locks):"),
    Wrong("the last leaf goes whole", "7.4", "kept = max(0, len(node.pages) - n)", "kept = 0"),
    Wrong("a leaf loses its head", "7.4", "freed.append(node.pages[kept:])", "freed.append(node.pages[: len(node.pages) - kept])"),
    Wrong("the parent is forgotten", "7.4", "node = self.shorten(node, kept)", "self.shorten(node, kept)"),
    Wrong("duplicates are lost", "7.5", "            self.allocator.free(duplicates)\n", ""),
    Wrong("the row keeps its own pages", "7.5", "            self.set_pages(row, handle.depth, self.tree.pages_to(node)[handle.depth : known])\n", ""),
    Wrong("no lock", "7.5", "        self.tree.lock(node)\n        self.tree.unlock(handle)\n        self.handles[req.uid] = node\n", "        self.handles[req.uid] = node\n"),
    Wrong("the handle does not move", "7.5", "        self.handles[req.uid] = node\n", ""),
]  # fmt: skip
