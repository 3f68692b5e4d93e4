"""Solutions of the lab's tasks that differ from the reference and work: its tests must let them pass.

Task (and what is special about it) -> function -> body, written from the chapter and the signatures.
"""

from textwrap import dedent, indent


def function(text: str) -> str:
    return indent(dedent(text).strip("\n") + "\n", " " * 4)


def method(text: str) -> str:
    return indent(function(text), " " * 4)


OTHERWISE = {
    "2.2": {
        "Req.reason_to_stop": method("""
            if token in self.params.stop_token_ids:
                return "stop_token"
            if token in self.stop_ids:
                return "eos"
            if len(self.output_ids) >= self.params.max_tokens:
                return "max_tokens"
            if len(self.token_ids) >= self.max_device_len:
                return "length"
            return None
        """),
    },
    "2.4": {
        "FCFSScheduler.update": method("""
            outputs = []
            if prompt_logprobs:
                book(batch, prompt_logprobs)
            for i, (req, token) in enumerate(zip(batch.sampled, tokens, strict=True)):
                if req.finish_reason is not None:
                    continue
                req.token_ids.append(token)
                scored = None
                if not req.first_token_at:
                    req.first_token_at = time.perf_counter()
                    if req.params.prompt_logprobs is not None:
                        scored = req.prompt_logprobs
                lp = None
                if logprobs and req.params.logprobs is not None:
                    lp = logprobs[i]._replace(top=logprobs[i].top[: req.params.logprobs])
                    req.logprobs.append(lp)
                reason = req.reason_to_stop(token)
                if reason:
                    self.finish(req, reason)
                outputs.append(Output(req, token, reason, lp, scored))
            return outputs
        """),
    },
    "2.3": {
        "keep_likeliest": function("""
            out = logits.clone()
            for row, p in zip(out, params, strict=True):
                values, order = row.sort(descending=True)
                keep = torch.ones(len(row), dtype=torch.bool, device=row.device)
                if p.top_k > 0:
                    keep[p.top_k :] = False
                probs = (values / p.temperature).masked_fill(~keep, -math.inf).softmax(-1)
                if p.top_p < 1:
                    keep &= probs.cumsum(-1) - probs < p.top_p
                keep &= probs >= p.min_p * probs[0]
                keep[0] = True
                row[order[~keep]] = -math.inf
            return out
        """),
    },
    "5.1": {
        "PageAllocator.alloc": method("""
            if n > self.num_free:
                raise OutOfPages
            self.num_free -= n
            return self.stack[self.num_free : self.num_free + n].copy()
        """),
        "PageAllocator.free": method("""
            self.stack[self.num_free : self.num_free + len(pages)] = pages
            self.num_free += len(pages)
        """),
    },
    "5.3": {
        "PagedCacheManager.allocate": method("""
            rows = np.array([self.table_idx[req.uid] for req, _ in picks], np.int64)
            ends = np.array([req.cached_len + n for req, n in picks], np.int64)
            need = np.maximum(self.pages_for(ends) - self.held[rows], 0)
            if need.sum():
                pages = self.take(int(need.sum()))
                columns = np.concatenate([np.arange(h, h + k) for h, k in zip(self.held[rows], need, strict=True)])
                self.page_table.write(np.repeat(rows, need), columns, pages)
                self.held[rows] += need
            return rows
        """),
    },
    "7.1": {
        "RadixTree.walk": method("""
            node, start = self.root, 0
            while (child := node.children.get(self.edge(salt, tokens[start:]))) is not None:
                rest = tokens[start : start + len(child.key)]
                same = child.key[: len(rest)] == rest
                agreed = (len(rest) if same.all() else int(same.argmin())) // self.page_size
                last, start, node = agreed < len(child.pages), start + len(child.key), child
                yield child, agreed
                if last:
                    break
        """),
    },
    "7.2": {
        "RadixTree.split": method("""
            size = num_pages * self.page_size
            upper = Node(node.parent, node.salt, node.key[:size], node.pages[:num_pages], node.used)
            upper.locks = node.locks
            upper.parent.children[self.edge(upper.salt, upper.key)] = upper
            node.parent, node.key, node.pages = upper, node.key[size:], node.pages[num_pages:]
            upper.children[self.edge(node.salt, node.key)] = node
            return upper
        """),
    },
    "7.3": {
        "RadixTree.lock": method("""
            for part in self.path(node):
                if not part.locks:
                    self.num_locked += len(part.pages)
                part.locks += 1
        """),
        "RadixTree.unlock": method("""
            for part in self.path(node):
                part.locks -= 1
                if not part.locks:
                    self.num_locked -= len(part.pages)
                    self.enqueue(part)
        """),
    },
    "7.4": {
        "RadixTree.evict": method("""
            out, left = [NO_PAGES], n
            while left > 0 and self.heap:
                used, _, node = heapq.heappop(self.heap)
                node.queued = False
                if node.children or node.locks:
                    continue
                if node.used != used:
                    self.enqueue(node)
                    continue
                kept = max(0, len(node.pages) - left)
                gone = node.pages[kept:]
                out.append(gone)
                left -= len(gone)
                self.num_pages -= len(gone)
                self.enqueue(self.shorten(node, kept))
            return np.concatenate(out)
        """),
    },
    "7.5": {
        "RadixCacheManager.share": method("""
            row, handle = self.table_idx[req.uid], self.handles[req.uid]
            pages = self.page_table.host[row, : self.held[row]].copy()
            node, known, full = self.insert(req, pages)
            if known > handle.depth:
                self.set_pages(row, handle.depth, self.tree.pages_to(node)[handle.depth : known])
                self.allocator.free(pages[handle.depth : known])
            self.tree.lock(node)
            self.tree.unlock(handle)
            self.handles[req.uid] = node
        """),
    },
    "1.1": {
        "generate": function("""
            text = list(prompt_ids)
            device = model.norm.weight.device
            while len(text) - len(prompt_ids) < max_tokens:
                n = len(text)
                cu = torch.tensor([0, n], device=device).int()
                hidden = model(
                    torch.as_tensor(text, device=device),
                    torch.arange(n, device=device),
                    lambda _, q, k, v: kernels.flash_attn_varlen_func(q, k, v, cu, cu, n, n, True),
                )
                text.append(model.head(hidden)[-1].argmax().item())
                yield text[-1]
                if text[-1] in model.config.eos_ids:
                    break
        """),
    },
    "2.1": {
        "Req.extend_len": method("""
            if self.device_len >= self.max_device_len:
                return 0
            return self.device_len - self.cached_len
        """),
    },
    "3.1": {
        "SingleCacheManager.admit": method("""
            if not self.owner:
                self.owner = req
                req.cached_len = 0
            return self.owner is req
        """),
        "SingleCacheManager.commit": method("""
            for req, n in zip(batch.reqs, batch.extend_lens, strict=True):
                req.cached_len += int(n)
        """),
    },
    "3.2": {
        "CachedAttention.plan": method("""
            (start,), (n,) = batch.prefix_lens.tolist(), batch.extend_lens.tolist()
            place = {"device": self.device, "dtype": torch.int32}
            end = torch.tensor([0, start + n], **place)
            slots = torch.arange(start, start + n, device=self.device)
            return CachedMetadata(slots, n, start + n, torch.tensor([0, n], **place), end, end[1:])
        """),
    },
    "3.3": {
        "CachedAttention.__call__": method("""
            keys, values = self.pool.k[layer], self.pool.v[layer]
            keys[metadata.out_loc] = k
            values[metadata.out_loc] = v
            return self.kernels.flash_attn_varlen_func(
                q, keys[: metadata.seq_len], values[: metadata.seq_len], metadata.cu_seqlens_q, metadata.cu_seqlens_k,
                metadata.extend_len, metadata.seq_len, causal=True,
            )
        """),
    },
    "4.1": {
        "pick_running": function("""
            decodes = [req for req in running if req.extend_len == 1]
            decodes = sorted(decodes, key=lambda req: req.device_len, reverse=True)
            picks, left = [(req, 1) for req in decodes], max(0, budget - len(decodes))
            for req in running:
                n = min(left, req.extend_len)
                if req.extend_len > 1 and n:
                    picks.append((req, n))
                    left -= n
            return picks
        """),
    },
    "4.2": {
        "admit_waiting": function("""
            picks, rows = [], [np.empty(0, np.int64)]
            place = order(waiting) if waiting and budget > 0 else 0
            while waiting and budget > 0:
                req = waiting[place]
                if not cache.admit(req):
                    break
                del waiting[place]
                place = 0
                if not req.admitted_at:
                    req.admitted_at = time.perf_counter()
                running.append(req)
                picks.append((req, min(budget, req.extend_len)))
                budget -= picks[-1][1]
                rows.append(cache.allocate([picks[-1]]))
            return picks, np.concatenate(rows)
        """),
    },
    "4.3": {
        "PageTable.slots": method("""
            columns, offsets = np.divmod(positions, self.page_size)
            pages = self.host.ravel()[table_idx * self.host.shape[1] + columns]
            return np.multiply(pages, self.page_size, dtype=np.int64) + offsets
        """),
    },
    "4.4": {
        "BatchScheduler.schedule": method("""
            mine = pick_running(self.running, self.budget)
            rows = self.cache.allocate(mine)
            used = 0
            for _, n in mine:
                used += n
            theirs, new_rows = admit_waiting(self.waiting, self.running, self.cache, max(0, self.budget - used))
            if not mine and not theirs:
                return None
            return Batch.build([*mine, *theirs], np.concatenate([rows, new_rows]))
        """),
    },
    "5.1 the lowest page first": {
        "PageAllocator.alloc": method("""
            free = np.sort(self.stack[: self.num_free])
            if len(free) < n:
                raise OutOfPages(f"no {n} pages")
            self.num_free -= n
            self.stack[: self.num_free] = free[n:]
            return free[:n]
        """),
        "PageAllocator.free": method("""
            for page in pages:
                self.stack[self.num_free] = page
                self.num_free += 1
        """),
    },
    "5.2": {
        "PagedCacheManager.has_room": method("""
            if len(self.free_table_idx) == 0:
                return False
            for _ in self.table_idx:
                pages += self.pages_for(self.reserve)
            return self.available() >= pages
        """),
    },
    "5.4": {
        "PagedScheduler.retract": method("""
            youngest = self.running[-1]
            self.waiting.insert(0, youngest)
            self.running.remove(youngest)
            self.cache.release(youngest)
            self.memory_is_short = True
            self.num_retracted = self.num_retracted + 1
        """),
    },
    "6.1": {
        "FutureMap.resolve": method("""
            known = (ids != UNSEEN).long()
            return ids * known + self.tokens[table_idx] * (1 - known)
        """),
        "FutureMap.store": method("""
            self.tokens[table_idx] = tokens
        """),
    },
    "6.2": {
        "OverlapEngine.step": method("""
            outputs = []
            before, self.in_flight = self.in_flight, None
            if before and any(req.params.needs_text for req in before[0].sampled):
                outputs, before = self.collect(*before), None
            batch = self.scheduler.schedule()
            if batch is not None:
                self.in_flight = batch, self.launch(batch)
            if before:
                outputs = self.collect(*before)
            return outputs
        """),
    },
    "6.3": {
        "graph_sizes": function("""
            sizes, size = [], 1
            while size < max_batch:
                sizes.append(size)
                size += size if size < 8 else 8
            return [*sizes, max_batch]
        """),
    },
    "6.4": {
        "DecodeGraphs.fill": method("""
            n, to = len(batch.reqs), DecodeInputs(*self.buffer(size))
            self.buffer(size).zero_()
            to.table_idx.fill_(-1)
            low, high = noise_keys(batch.reqs)
            temperatures = inv_temperatures(batch.reqs).view(np.int32)
            for target, numbers in (
                (to.input_ids, known_ids(batch)), (to.positions, batch.seq_lens - 1), (to.table_idx, batch.table_idx),
                (to.inv_temperature, temperatures), (to.key_low, low), (to.key_high, high),
            ):
                target[:n].copy_(torch.tensor(np.asarray(numbers)))
        """),
    },
    "6.5": {
        "DecodeGraphs.forward": method("""
            n, plain = len(batch.reqs), True
            for req in batch.reqs:
                plain = plain and req.params.plain
            size = next(size for size in self.sizes if size >= n)
            self.fill(batch, size, plain)
            self.replays[size]()
            if not plain:
                return self.eager.sample(self.outputs[size][0][:n], batch)
            return HostSamples.copy(Samples(self.outputs[size][1][:n]))
        """),
    },
    "8.1": {
        "Shard.kv_heads": method("""
            total, ranks = self.whole.num_kv_heads, self.world
            first = self.rank * total // ranks
            return range(first, max(first + 1, (self.rank + 1) * total // ranks))
        """),
    },
    "8.2": {
        "RowParallel.forward": method("""
            out = self.linear(x)
            out = self.ranks.all_reduce(out)
            return out
        """),
    },
    "8.3": {
        "VocabParallelEmbedding.forward": method("""
            mine = (ids >= self.first) & (ids < self.first + self.embedding.num_embeddings)
            rows = self.embedding(torch.where(mine, ids - self.first, 0))
            return self.ranks.all_reduce(rows * mine.unsqueeze(-1).to(rows.dtype))
        """),
    },
    "8.4": {
        "TPEngine.step": method("""
            outputs = []
            if self.engine.has_work():
                self.broadcast(StepCall())
                outputs = self.engine.step()
            return outputs
        """),
        "TPEngine.follow": method("""
            while True:
                for call in decode(self.ranks.broadcast_bytes()):
                    if isinstance(call, CloseCall):
                        return
                    if isinstance(call, StepCall):
                        self.engine.step()
                    elif isinstance(call, AddCall):
                        self.engine.add(call.prompt_ids, call.params, call.uid)
                    elif isinstance(call, AbortCall):
                        self.engine.abort(call.uid)
                    else:
                        try:
                            self.engine.generate(call.prompts, call.params)
                        except UserError:
                            pass
        """),
    },
    "9.1": {
        "StopStrings.push": method("""
            text = self.held + text
            for end in range(1, len(text) + 1):
                hits = [stop for stop in self.stop if text[:end].endswith(stop)]
                if hits:
                    longest = max(map(len, hits))
                    return text[: end if self.include else end - longest], True
            starts = [stop[:n] for stop in self.stop for n in range(1, len(stop))]
            held = max((len(start) for start in starts if text.endswith(start)), default=0)
            text, self.held = text[: len(text) - held], text[len(text) - held :]
            return text, False
        """),
    },
    "9.2": {
        "IncrementalDecoder.push": method("""
            bytes_of = self.tokenizer.token_bytes
            data = bytes_of(token, skip_special=self.skip_special)
            if self.at_start and len(data) > 0:
                self.at_start = False
                data = bytes_of(token, skip_special=self.skip_special, first=True)
            text = ""
            for i in range(len(data)):
                text += self.utf8.decode(data[i : i + 1], final=False)
            return text
        """),
        "IncrementalDecoder.flush": method("""
            rest = self.utf8.decode(b"", final=True)
            self.utf8.reset()
            return rest
        """),
    },
    "9.3": {
        "Hub.stream": method("""
            queue = asyncio.Queue()
            taken = {uid: False for call in calls for uid in call.uids}
            still_open, kept = set(taken), []
            try:
                for call in calls:
                    await self.submit(call, queue, generates=True)
                while still_open:
                    answer = await queue.get()
                    while True:
                        match answer:
                            case Failed():
                                still_open -= set(answer.uids)
                                raise RequestFailed(answer.status, answer.message)
                            case Piece():
                                taken[answer.uid] = True
                                kept.append(answer)
                            case Accepted():
                                taken |= dict.fromkeys(answer.uids, True)
                        try:
                            answer = queue.get_nowait()
                        except asyncio.QueueEmpty:
                            break
                    if all(taken.values()):
                        still_open -= {piece.uid for piece in kept if piece.finish_reason}
                        ready, kept = kept, []
                        yield messages.merged(ready)
            finally:
                self.abort(still_open)
        """),
    },
}
