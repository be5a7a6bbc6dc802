"""How far training is: a bar where tqdm is installed, otherwise lines of text."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from typing import Any

SECONDS = 10.0
"""Between two lines of text."""


class Progress:
    """Shows updates and the last loss on standard error."""

    def __init__(self, *, shown: bool, done: int, total: int | None) -> None:
        self._done = done
        self._total = total
        self._shown = shown
        self._bar: Any = None
        self._loss = ""
        self._told = time.monotonic()
        if shown and importlib.util.find_spec("tqdm") is not None:
            tqdm = importlib.import_module("tqdm.auto").tqdm
            self._bar = tqdm(total=total, initial=done, unit="step", desc="training")

    def advance(self) -> None:
        """One more update."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        elif self._shown and time.monotonic() - self._told >= SECONDS:
            self._tell()

    def loss(self, total: float) -> None:
        """The mean of the total since this was last told."""
        self._loss = f"{total:.4g}"
        if self._bar is not None:
            self._bar.set_postfix(loss=self._loss)

    def close(self) -> None:
        """Nothing more to come."""
        if self._bar is not None:
            self._bar.close()
        elif self._shown:
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        of = f"/{self._total}" if self._total is not None else ""
        loss = f", loss {self._loss}" if self._loss else ""
        sys.stderr.write(f"training: {self._done}{of} steps{loss}\n")
