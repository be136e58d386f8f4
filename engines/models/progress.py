"""How a long build tells its caller where it stands."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A callback; called from the building thread, so it must return at once and never raise."""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Report one step.

        Args:
            stage: what is being done, in words for a user; a new text begins a new stage.
            done: units finished in this stage (bytes, tensors or windows, as the stage has them).
            total: units in this stage; None while nobody knows.
        """


def silent(stage: str, done: int, total: int | None) -> None:
    """Report to nobody: the default."""
