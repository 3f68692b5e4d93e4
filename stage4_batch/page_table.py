"""The page table (vLLM: block table): which pages of the pool a request has, in the order of its positions."""

import numpy as np
import torch

from stage2_req.req import upload


class PageTable:
    """Position p of the request with index i lies in slot `pages[i, p // page_size] * page_size + p % page_size`.

    A copy on the host to account with, `host`, and its mirror to compute with, `device`: both [rows, pages] int32, one
    row for each request that can run.
    """

    def __init__(self, max_running: int, max_pages: int, page_size: int, device: torch.device):
        self.page_size = page_size
        self.host = np.zeros((max_running, max_pages), dtype=np.int32)
        self.device = torch.zeros(self.host.shape, dtype=torch.int32, device=device)

    def slots(self, table_idx: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where positions [N] of the requests table_idx [N] lie, [N] int64."""
        pages = self.host[table_idx, positions // self.page_size].astype(np.int64)
        return pages * self.page_size + positions % self.page_size

    def write(self, table_idx: np.ndarray, columns: np.ndarray, pages: np.ndarray) -> None:
        """Set entries [N] of both copies, pages int32; one upload, whatever their number."""
        self.host[table_idx, columns] = pages
        entries = table_idx * self.host.shape[1] + columns
        # An upload costs the host the same whatever its size: int64 entries go as pairs of int32, with the pages.
        both = upload(np.concatenate((entries.view(np.int32), pages)), self.device.device)
        self.device.view(-1).index_copy_(0, both[: -len(pages)].view(torch.int64), both[-len(pages) :])
