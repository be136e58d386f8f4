"""Reuse within a worker's scheduler process: what is known of every request, from its arrival to its last chunk."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.rows import BLOCK, Rows, rows_at
from crossfill_kernels.slots import as_slots
from engines.reuse.chunk import Chunk, Part
from engines.reuse.layers import Layers
from engines.reuse.map_sender import CapturedMaps
from engines.reuse.plan import Plan, dense_run, runs_of
from engines.reuse.provenance import Provenance
from engines.reuse.receiver import Patience, Pending, namespace_of
from engines.reuse.refusal import Refusal
from engines.reuse.sender import Captured, is_wanted
from engines.reuse.settings import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cache_store.client.fetch import Fetch, Fetcher, LayerRecords
    from engines.reuse.asked import Asked
    from engines.reuse.map_reader import MapReader
    from engines.reuse.map_sender import MapSender
    from engines.reuse.metrics import ReuseMetrics
    from engines.reuse.plan import Run
    from engines.reuse.receiver import Receiver
    from engines.reuse.sender import Sender
    from engines.reuse.settings import ReuseSettings

_log = logging.getLogger("crossfill.reuse")

# Most that is waited for the first layer once the store has told that there is something worth it.
_LAYER_WAIT_S = 1.0
# Rows of the first two row blocks look at the first block and at their own, which is everywhere they can.
_EXACT = 2 * BLOCK
# Requests that are known and have not been prefilled; beyond, the one that arrived first is prefilled densely.
_MOST_KNOWN = 4096


@dataclass
class _Known:
    """What is known of a request that arrived."""

    asked: Asked | None
    tokens: Sequence[int]
    taken: Pending | Refusal
    stored: Fetch[LayerRecords] | None
    plan: Plan | None = None
    outcome: str = "none"
    planned: bool = False


class ReuseEngine:
    """Plans every prefill and collects what it leaves.

    All methods run on the scheduler's thread; none waits but `admit` and, for requests that require reuse, `preview`.
    `layers` computes; `uses_maps` if maps of others may.

    Args:
        slots: of the KV pool.
        maps: reads the block pool; None if this worker has none.
        packer: packs maps into it; None if nobody wants any of this worker.
    """

    def __init__(
        self,
        settings: ReuseSettings,
        fetcher: Fetcher,
        receiver: Receiver,
        sender: Sender | None,
        metrics: ReuseMetrics,
        *,
        slots: int,
        maps: MapReader | None = None,
        packer: MapSender | None = None,
    ) -> None:
        self._settings = settings
        self._fetcher = fetcher
        self._receiver = receiver
        self._sender = sender
        self._metrics = metrics
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._publish = frozenset(settings.publish)
        self._stopped: Refusal | None = None
        self._batch_s = time.monotonic()
        self._packer = packer
        self.uses_maps = maps is not None and settings.takes_maps
        self.layers = Layers(settings.publish, metrics, maps, pack=packer.layers if packer else ())
        self.provenance = Provenance(slots)

    def arrive(self, request_id: str, asked: Asked | None, tokens: Sequence[int], *, supported: bool = True) -> None:
        """A request came; ask the store what there is for it.

        Args:
            request_id: SGLang's.
            asked: the router's word, if there is any.
            tokens: of the prompt.
            supported: False if more than its tokens decides what it computes (images, adapters).
        """
        if request_id in self._known:
            self.forget(request_id)
        refusal = self._stopped or (None if supported else Refusal.UNSUPPORTED)
        taken = refusal or self._receiver.begin(request_id, asked, tokens)
        stored = None
        if refusal is None and asked is not None and self._sender is not None and len(tokens) >= BLOCK:
            own = namespace_of(self._settings.model, asked)
            stored = self._fetcher.start(request_id, own, tokens, (), self._settings.store.fetch_deadline_s)
        self._known[request_id] = _Known(asked, tokens, taken, stored)
        while len(self._known) > _MOST_KNOWN:
            self.forget(next(iter(self._known)))

    def preview(self, request_id: str) -> Refusal | None:
        """Why a request that has just arrived will surely not be guided; None if it may be. Waits as `admit` does."""
        known = self._known[request_id]
        if isinstance(known.taken, Pending):
            self.begin_batch()
            patience = self._patience(0, len(known.tokens))
            refusal = self._receiver.preview(known.taken, len(known.tokens), patience.answer_s)
            if refusal is None:
                return None
            known.taken.end()
            known.taken = refusal
        return known.taken

    def begin_batch(self) -> None:
        """Requests that are admitted from now on wait together no longer than one alone."""
        self._batch_s = time.monotonic()

    def is_new(self, request_id: str) -> bool:
        """Whether nothing was decided for a request yet."""
        known = self._known.get(request_id)
        return known is None or not known.planned

    def admit(self, request_id: str, start: int, total: int, *, hops: int = 0) -> Refusal | None:
        """The next chunk of a request will be computed: decide how, if it is the first.

        Args:
            request_id: that arrived.
            start: tokens that are in this worker's own cache.
            total: tokens that are prefilled in all.
            hops: of what is in the cache.

        Returns:
            Why the request is not guided; None if it is.
        """
        known = self._known.get(request_id)
        if known is None:
            self._metrics.count_refused("none", Refusal.RETRACTED, _blocks(start, total))
            return Refusal.RETRACTED
        if len(known.tokens) != total:
            # SGLang refuses the request, and puts a dummy in the place of its prompt.
            if isinstance(known.taken, Pending):
                known.taken.end()
                known.taken = Refusal.UNSUPPORTED
            known.tokens, known.stored = known.tokens[:total], None
        if not known.planned:
            known.planned = True
            taken = known.taken
            found = (
                taken
                if isinstance(taken, Refusal)
                else self._receiver.decide(taken, start, total, self._patience(start, total))
            )
            self._note(known, found, start, total)
            if hops:
                known.outcome += f"; prefix_hops={hops}"
        return None if known.plan else known.taken if isinstance(known.taken, Refusal) else Refusal.FAILED

    def outcome(self, request_id: str) -> str:
        """What the response header says of a request whose first chunk was admitted."""
        known = self._known.get(request_id)
        return known.outcome if known else f"none; reason={Refusal.RETRACTED.value}"

    def chunk(self, request_id: str, rows: Rows, slots: torch.Tensor) -> Chunk:
        """How the newest rows of a request are computed; notes what their slots will hold.

        Args:
            rows: that follow one another, at least one; on the host.
            slots: of all positions up to the last of them; their device is where the chunk is computed.
        """
        device = slots.device
        stop = slots.numel()
        start = stop - rows.count
        known = self._known.get(request_id)
        plan = known.plan if known else None
        runs = runs_of(start, stop, plan.pages, plan.mapped) if plan else dense_run(start, stop)
        before = self.provenance.hops_of(slots[:start].long().cpu())
        self.provenance.extend(slots[start:stop].long().cpu(), before, _approximate_from(runs, start))
        is_last = known is None or stop >= len(known.tokens)
        stored = known.stored if known is not None and before == 0 and not runs[0].guided else None
        # Whether maps that were packed are still in the pool is found out beside the computation.
        wanted = stored is not None and (
            self._packer is not None or is_wanted(runs[0].start, runs[0].stop, is_last, self._publish, stored)
        )
        parts = tuple(
            Part(run, rows_at(range(run.start, run.stop)).to(device), captured=wanted and index == 0)
            for index, run in enumerate(runs)
        )
        return Chunk(request_id, rows.to(device), as_slots(slots), parts, plan, is_last)

    def note_decode(self, req_to_token: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor) -> None:
        """Each request computes one row more, which is as exact as the row before it.

        Args:
            req_to_token: SGLang's table of slots [requests, positions].
            requests: [n], rows of the table.
            lengths: [n], positions of each with the new one; on the host.
        """
        last = lengths.to(requests.device) - 1
        new, before = req_to_token[requests, last], req_to_token[requests, (last - 1).clamp(min=0)]
        self.provenance.decode(new.cpu().long(), before.cpu().long())

    def computed(self, chunk: Chunk) -> None:
        """All layers of a chunk are computed: publish its masses; forget the request after its last chunk."""
        known = self._known.get(chunk.request_id)
        if known is None:
            return
        if chunk.masses and self._sender is not None and known.stored is not None and known.asked is not None:
            run, own = chunk.parts[0].run, namespace_of(self._settings.model, known.asked)
            of_chunk = chunk.request_id, own, known.tokens, run.start, run.stop
            if self._packer is not None and chunk.copies:
                self._packer.offer(CapturedMaps(*of_chunk, chunk.copies, known.stored))
            self._sender.offer(
                Captured(
                    *of_chunk,
                    # After the first guided row nothing is exact, so no row block goes on.
                    chunk.is_last or len(chunk.parts) > 1,
                    {layer: _on_host(mass) for layer, mass in chunk.masses.items()},
                    known.stored,
                )
            )
            known.stored = None if chunk.is_last else known.stored
        if chunk.is_last:
            self.forget(chunk.request_id)

    def stop(self, reason: Refusal) -> None:
        """From now on nothing is taken and nothing is left, not even of requests that are known."""
        self._stopped = reason
        for known in self._known.values():
            known.stored = None
            if known.plan is None and isinstance(known.taken, Pending):
                known.taken.end()
                known.taken = reason
        _log.warning("reuse stops until this worker is started again: %s", reason.value)

    def forget(self, request_id: str) -> None:
        """The request is gone, or needs nothing more."""
        known = self._known.pop(request_id, None)
        if known is None:
            return
        if known.plan:
            known.plan.end()
        if isinstance(known.taken, Pending):
            known.taken.end()

    def sender_of(self, request_id: str) -> str | None:
        """Who guides a request whose first chunk was admitted; None if nobody does."""
        known = self._known.get(request_id)
        return known.plan.pair.sender.name if known and known.plan else None

    def exclude(self, sender: str, reason: Refusal) -> None:
        """From now on nothing is taken from a sender, but by requests that have been planned."""
        self._receiver.exclude(sender, reason)

    def count_failure(self, hook: str) -> None:
        """A hook failed, so a request goes on without reuse."""
        self._metrics.count_hook_failure(hook)

    def forget_all(self, prefix: str) -> None:
        """Requests whose ids begin so are gone."""
        for request_id in [one for one in self._known if one.startswith(prefix)]:
            self.forget(request_id)

    def _patience(self, start: int, total: int) -> Patience:
        """What is left of the time that this batch may wait, which is bounded by what the request may save."""
        share_s = float("inf")
        if self.layers.pace_s is not None and self._settings.pairs:
            layers = max(len(pair.guided) for pair in self._settings.pairs)
            # At the density of .5 that is usual of short prompts, about half of the dense time is saved.
            share_s = self._settings.wait_share * layers * self.layers.pace_s * (total**2 - start**2) / 4
        answer_s = min(self._settings.wait_s, share_s)
        layer_s = answer_s if self.layers.pace_s is None else min(_LAYER_WAIT_S, share_s)
        spent_s = time.monotonic() - self._batch_s
        return Patience(max(0.0, answer_s - spent_s), max(0.0, max(answer_s, layer_s) - spent_s))

    def _note(self, known: _Known, found: Plan | Refusal, start: int, total: int) -> None:
        blocks = _blocks(start, total)
        if isinstance(found, Plan):
            known.plan = found
            self._metrics.count_planned(found.mode.value, len(found.pages), found.density)
            self._metrics.count_uncovered(blocks - len(found.pages))
            known.outcome = (
                f"{found.mode.value}; blocks={len(found.pages)}/{blocks}; density={found.density:.2f}; "
                f"sender={found.pair.sender.name}"
            )
            if found.unmapped is not None:
                known.outcome += f"; map={found.unmapped.value}"
            elif found.mode is ReuseMode.MAP:
                known.outcome += f"; queries={'skipped' if self.layers.skips_queries else 'computed'}"
            return
        if isinstance(known.taken, Pending):
            known.taken.end()
        known.taken = found
        self._metrics.count_refused(found.mode, found, blocks)
        known.outcome = f"{found.mode}; reason={found.value}"


def _approximate_from(runs: Sequence[Run], start: int) -> int | None:
    """Number of the first row that may not be exact; None if all are."""
    firsts = [run.start if run.mapped else max(run.start, _EXACT) for run in runs if run.guided]
    stops = [run.stop for run in runs if run.guided]
    return next((first - start for first, stop in zip(firsts, stops, strict=True) if first < stop), None)


def _on_host(mass: BlockMass) -> BlockMass:
    return BlockMass(mass.mass.cpu(), mass.blocks.cpu(), mass.totals.cpu())


def _blocks(start: int, total: int) -> int:
    """Row blocks that have rows in [start, total)."""
    return -(-total // BLOCK) - start // BLOCK
