"""Solutions of the lab's tasks that differ from the reference and work: its tests must let them pass.

Task -> function -> body, written by someone who had only the chapter and the signatures.
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
            for i, (req, token) in enumerate(zip(batch.sampled, tokens, strict=True)):
                if req.finish_reason is not None:
                    continue
                req.token_ids.append(token)
                if not req.first_token_at:
                    req.first_token_at = time.perf_counter()
                lp = None
                if req.params.logprobs is not None:
                    lp = logprobs[i]._replace(top=logprobs[i].top[: req.params.logprobs])
                    req.logprobs.append(lp)
                reason = req.reason_to_stop(token)
                if reason:
                    self.finish(req, reason)
                outputs.append(Output(req, token, reason, lp))
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
}
