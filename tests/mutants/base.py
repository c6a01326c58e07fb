"""What a mutant is: one small change of product code that is easily made by mistake, and the tests that must fail by it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


class Stale(Exception):
    """The code that a mutant changes is not there any more, or is there more than once: the mutant must be written anew."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    name: its command-line name. says: what the wrong code does, in words. path: of the file, from the root of the checkout.
    right, wrong: text that is there exactly once, and what takes its place. tests: paths for pytest; each is fast, and one of
    them at least must fail.
    """

    name: str
    says: str
    path: str
    right: str
    wrong: str
    tests: tuple[str, ...]

    def changed(self, root: Path = ROOT) -> str:
        """The file's text with the change. Raises: Stale."""
        text = (root / self.path).read_text()
        if self.right == self.wrong or text.count(self.right) != 1:
            raise Stale(f"{self.name}: {self.path} has {text.count(self.right)} times {self.right!r}; 1 is needed")
        return text.replace(self.right, self.wrong)
