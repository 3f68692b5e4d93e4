"""Which pages are free. A page is `page_size` neighbouring slots of the pool; here it is just a number."""

import numpy as np


class OutOfPages(Exception):
    """More pages were asked for than are free; nothing has been taken."""


class PageAllocator:
    """A stack of page numbers: what was freed last, and may still be in a processor's cache, is handed out first."""

    def __init__(self, num_pages: int):
        self.num_pages = self.num_free = num_pages
        self.stack = np.arange(num_pages, dtype=np.int32)[::-1].copy()

    def alloc(self, n: int) -> np.ndarray:
        """n page numbers, int32; a copy. Raises OutOfPages."""
        if n > self.num_free:
            raise OutOfPages(f"{n} pages wanted, {self.num_free} free")
        self.num_free -= n
        return self.stack[self.num_free : self.num_free + n][::-1].copy()

    def free(self, pages: np.ndarray) -> None:
        self.stack[self.num_free : self.num_free + len(pages)] = pages[::-1]
        self.num_free += len(pages)

    def free_pages(self) -> np.ndarray:
        return self.stack[: self.num_free]
