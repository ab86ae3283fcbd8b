"""The pool of KV pages, and that of state slots: which ids exist, how many hold each, which are free. Owns no tensor, no policy.

One id spans all attention layers. A page has one writer at most, the lease that took it; everybody else only reads rows below
the token count they matched, so a partly filled page may be held by the tree while its writer goes on behind that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.prefix.base import OutOfPages


class PagePool:
    """Reference counts over ids [0, most), `total` of which are in use; the others are retired until it grows."""

    def __init__(self, total: int, most: int | None = None, what: str = "KV pages") -> None:
        self.total, self._what = total, what
        self.most = total if most is None else most
        self._refs = [0] * self.most
        self._free = list(range(total - 1, -1, -1))  # popped from the end: low ids first, so small runs touch little memory
        self._retired = list(range(self.most - 1, total - 1, -1))
        self._touched: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def touched(self) -> int:
        """Pages in use that were ever written: the others take no memory yet."""
        return len(self._touched)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def take(self, count: int) -> list[int]:
        """`count` free pages, each held once. Raises OutOfPages (and takes none) when fewer are free."""
        if count > len(self._free):
            raise OutOfPages(f"{count} {self._what} wanted, {len(self._free)} of {self.total} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        self._touched.update(pages)
        return pages

    def resize(self, count: int, give_back: Callable[[list[int]], None]) -> None:
        """Have `count` ids in use. `give_back` is told which free ones go: the highest, so that what stays lies together.

        Raises OutOfPages, with everything as it was, when too few are free or there is no room for so many.
        """
        fewer = self.total - count
        if fewer > len(self._free):
            held = self.total - len(self._free)
            raise OutOfPages(f"{count} {self._what} are to remain, {held} of {self.total} are in use")
        if -fewer > len(self._retired):
            raise OutOfPages(f"{count} {self._what} wanted, there is room for {self.most}")
        if fewer > 0:
            gone = sorted(self._free)[len(self._free) - fewer :]
            give_back(gone)
            self._free = [i for i in self._free if i < gone[0]]
            self._retired += reversed(gone)
            self._retired.sort(reverse=True)
            self._touched -= set(gone)
        elif fewer < 0:
            back = [self._retired.pop() for _ in range(-fewer)]
            self._free = [*reversed(back), *self._free]  # taken last: what is warm goes first
        self.total = count

    def give_back(self, give_back: Callable[[list[int]], None]) -> int:
        """Return the memory of free ids, which stay in use; returns how many were written before."""
        idle = [i for i in self._free if i in self._touched]
        give_back(idle)
        self._touched.difference_update(idle)
        return len(idle)

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each page."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is held by nobody"
            self._refs[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One holder less for each page; pages nobody holds become free."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} dropped twice"
            self._refs[page] -= 1
            if not self._refs[page]:
                self._free.append(page)
