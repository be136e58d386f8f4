"""What a worker takes from others: asks the store when a request arrives, decides when its turn comes."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cache_store.metrics import FetchEnd
from cache_store.namespace import Namespace
from cache_store.records import Kind, read_record_name, record_name
from cache_store.seldom import SeldomLog
from engines.errors import MapRecordError, MassRecordError, PairArtifactError
from engines.reuse.asked import Mode
from engines.reuse.guided import guide, mixtures
from engines.reuse.map_records import union, unpack_maps
from engines.reuse.metrics import MapMissed
from engines.reuse.plan import Plan, pages_to_guide, rows_in
from engines.reuse.prepared import Prepared
from engines.reuse.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from cache_store.client.fetch import Fetch, Fetcher, LayerRecords
    from cache_store.coverage import Coverage
    from cache_store.records import Record
    from engines.reuse.asked import Asked
    from engines.reuse.map_reader import MapReader
    from engines.reuse.metrics import ReuseMetrics
    from engines.reuse.settings import ModelIdentity, PairSettings, ReuseSettings

_log = logging.getLogger("crossfill.reuse")

_LOG_EVERY_S = 60.0
_ENDED = {
    FetchEnd.UNAVAILABLE: Refusal.STORE_UNAVAILABLE,
    FetchEnd.BUSY: Refusal.STORE_BUSY,
    FetchEnd.FAILED: Refusal.FAILED,
    FetchEnd.FLUSHED: Refusal.NOTHING_STORED,
}


def namespace_of(model: ModelIdentity, asked: Asked) -> Namespace:
    """Where state that `model` computed for this request lies."""
    return Namespace(asked.tenant, model.name, model.revision, model.tokenizer, model.template, asked.salt)


@dataclass(frozen=True)
class Pending:
    """What a request may take, and from whom, while it waits for its turn."""

    fetches: tuple[tuple[PairSettings, Fetch[Prepared | None]], ...]

    def end(self) -> None:
        """The request is gone, or nothing of it is wanted."""
        for _, fetch in self.fetches:
            fetch.cancel()


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request waits for the store, in seconds: for what there is, and, if that is worth it, for a layer."""

    answer_s: float
    layer_s: float


@dataclass(frozen=True, slots=True)
class _Choice:
    """The sender that left most, and what of it would be used: `rows` in row blocks `pages`, of `mapped` maps too."""

    pair: PairSettings
    fetch: Fetch[Prepared | None]
    pages: frozenset[int]
    mapped: frozenset[int]
    rows: int


class Receiver:
    """Plans prefills with the help of others' masses.

    Args:
        settings: of the worker.
        fetcher: reads the store in the background.
        maps: reads maps; None if this worker has no block pool.
    """

    def __init__(
        self,
        settings: ReuseSettings,
        fetcher: Fetcher,
        metrics: ReuseMetrics,
        *,
        maps: MapReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._fetcher = fetcher
        self._metrics = metrics
        self._maps = maps
        self._clock = clock
        # By sender, then by receiver layer.
        self._weights: dict[str, dict[int, torch.Tensor]] = {}
        self._unfit = Refusal.NO_PAIR
        self._pairs = [pair for pair in settings.pairs if self._is_fit(pair)]
        # Most prompts find nothing, and need no masks of nothing made for each layer.
        self._nothing = {
            pair.sender.name: Prepared(guide([{}], pair, self._weights[pair.sender.name])) for pair in self._pairs
        }
        self._malformed = SeldomLog(_log, _LOG_EVERY_S, clock)

    def begin(self, request_id: str, asked: Asked | None, tokens: Sequence[int]) -> Pending | Refusal:
        """Ask the store what there is for a prompt; returns at once."""
        if asked is None:
            return Refusal.NO_ROUTER
        if asked.mode is Mode.OFF:
            return Refusal.OFF
        if not self._pairs:
            return self._unfit
        wanted = [pair for pair in self._pairs if len(tokens) > pair.min_tokens]
        if not wanted:
            return Refusal.TOO_SHORT
        return Pending(tuple((pair, self._start(request_id, pair, asked, tokens)) for pair in wanted))

    def decide(self, pending: Pending, prefix: int, total: int, patience: Patience) -> Plan | Refusal:
        """Freeze the plan of a request whose turn has come.

        Args:
            pending: of `begin`.
            prefix: tokens that this worker has in its own cache.
            total: tokens of the prompt.
            patience: how long may be waited for the store.
        """
        started_s = self._clock()
        try:
            found = self._best(pending, prefix, total, started_s + patience.answer_s)
            if isinstance(found, Refusal):
                return found
            # Nobody takes what the others left; it would only hold room.
            Pending(tuple(one for one in pending.fetches if one[1] is not found.fetch)).end()
            # Further layers are read while the first ones are computed.
            first = next(iter(found.pair.guided.values()))
            found.fetch.wait_for(first, started_s + patience.layer_s - self._clock())
            return self._gate(found)
        finally:
            self._metrics.count_wait(self._clock() - started_s)

    def preview(self, pending: Pending, total: int, wait_s: float) -> Refusal | None:
        """Why nothing could be planned even if this worker had nothing in its own cache; arguments as of `decide`."""
        found = self._best(pending, 0, total, self._clock() + wait_s)
        return found if isinstance(found, Refusal) else None

    def exclude(self, sender: str, reason: Refusal) -> None:
        """Plan nothing with this sender any more, and give this reason where nobody else is left."""
        self._pairs = [pair for pair in self._pairs if pair.sender.name != sender]
        self._unfit = reason

    def _is_fit(self, pair: PairSettings) -> bool:
        """Whether a pair may be used; remembers why not."""
        try:
            if pair.refused is None:
                self._weights[pair.sender.name] = mixtures(pair, self._settings.model)
                return True
            self._unfit = pair.refused
        except PairArtifactError as error:
            self._unfit = Refusal.ARTIFACT_UNUSABLE
            _log.error("%s", error)
        _log.warning("nothing is taken from %s: %s", pair.sender.name, self._unfit.value)
        return False

    def _best(self, pending: Pending, prefix: int, total: int, until_s: float) -> _Choice | Refusal:
        best: _Choice | None = None
        refusal = Refusal.NOTHING_STORED
        for pair, fetch in pending.fetches:
            if pair not in self._pairs:
                refusal = self._unfit
                continue
            coverage = fetch.coverage(until_s - self._clock())
            if coverage is None:
                refusal = _ENDED.get(fetch.end or FetchEnd.DEADLINE, Refusal.STORE_SLOW)
                continue
            covered = _covered(coverage, pair)
            pages = pages_to_guide(covered, prefix, total)
            rows = rows_in(pages, prefix)
            if rows < pair.min_tokens:
                refusal = _too_little(covered, rows)
            elif best is None or rows > best.rows:
                best = _Choice(pair, fetch, pages, pages & _mapped(coverage, pair), rows)
        return best or refusal

    def _gate(self, choice: _Choice) -> Plan | Refusal:
        pair, fetch = choice.pair, choice.fetch
        plan = Plan(pair, choice.pages, 1.0, fetch, choice.mapped, self._weights[pair.sender.name])
        came = {layer: plan.layer(layer) for layer in pair.guided if plan.has_come(layer)}
        kept = {layer: one.density(choice.pages) for layer, one in came.items() if one is not None}
        if not kept:
            return Refusal.MALFORMED if came else _ENDED.get(fetch.end or FetchEnd.DEADLINE, Refusal.STORE_SLOW)
        work = plan.density = _expected(kept, pair.layer_density)
        if pair.uses_maps:
            plan.unmapped = self._unmapped(plan, [*came])
            if plan.unmapped is None:
                plan.density, work = _with_maps(plan, kept)
        return Refusal.TOO_DENSE if work > pair.max_density else plan

    def _unmapped(self, plan: Plan, came: Sequence[int]) -> MapMissed | None:
        """Why no layer that has come will be computed by its map; None if one will, now."""
        if self._maps is None:
            return MapMissed.NO_POOL
        missed = MapMissed.ABSENT
        for layer in came if plan.mapped else ():
            stored = plan.map(layer)
            if stored is None:
                continue
            if union(stored, plan.mapped) > plan.pair.most_map_density:
                missed = MapMissed.TOO_DENSE
            elif (found := self._maps.missed(stored)) is None:
                return None
            else:
                missed = found
        return missed

    def _start(
        self, request_id: str, pair: PairSettings, asked: Asked, tokens: Sequence[int]
    ) -> Fetch[Prepared | None]:
        kinds = (Kind.MASS, Kind.MAP) if pair.uses_maps and self._maps is not None else (Kind.MASS,)
        return self._fetcher.start(
            request_id,
            namespace_of(pair.sender, asked),
            tokens,
            [name for kind in kinds for name in _names(pair, kind)],
            self._settings.store.fetch_deadline_s,
            prepare=partial(self._prepare, pair),
            size=_size,
        )

    def _prepare(self, pair: PairSettings, records: LayerRecords) -> Prepared | None:
        """What is of use of one sender layer, whose names these are."""
        masses, maps = (_shards(records, pair, kind) for kind in (Kind.MASS, Kind.MAP))
        if not masses:
            return self._nothing[pair.sender.name]
        layer = read_record_name(next(iter(records))).layer
        weights = self._weights[pair.sender.name]
        try:
            guided = guide(masses, pair, {one: weights[one] for one in pair.guided_by(layer)})
        except MassRecordError as error:
            self._malformed.warn(f"masses of {pair.sender.name} are not used: {error}")
            return None
        try:
            return Prepared(guided, unpack_maps(maps, pair.sender.heads) if maps else None)
        except MapRecordError as error:
            self._malformed.warn(f"maps of {pair.sender.name} are not used: {error}")
            return Prepared(guided)


def _with_maps(plan: Plan, guided: Mapping[int, float]) -> tuple[float, float]:
    """Mean density of layers that have come, and the work in them as a share of what dense attention takes.

    Of a map the density is that of positions that some head keeps. A map takes one product a block, of probabilities
    and values, where attention takes two.
    """
    maps = {layer: plan.map(layer) for layer in guided}
    unions = {layer: union(stored, plan.mapped) for layer, stored in maps.items() if stored is not None}
    used = {layer: union for layer, union in unions.items() if union <= plan.pair.most_map_density}
    work = {**guided, **{layer: union / 2 for layer, union in used.items()}}
    return sum({**guided, **used}.values()) / len(guided), sum(work.values()) / len(work)


def _expected(kept: Mapping[int, float], usual: Mapping[int, float]) -> float:
    """Density of all guided layers from that of those that have come, which are the first and usually denser ones."""
    if not usual:
        return sum(kept.values()) / len(kept)
    share = sum(kept.values()) / sum(usual[layer] for layer in kept)
    return min(1.0, share * sum(usual.values()) / len(usual))


def _size(prepared: Prepared | None) -> int:
    return prepared.size_bytes if prepared else 0


def _names(pair: PairSettings, kind: Kind) -> list[str]:
    layers = dict.fromkeys(pair.guided.values())
    return [record_name(kind, layer, shard, pair.shards) for layer in layers for shard in range(pair.shards)]


def _shards(records: LayerRecords, pair: PairSettings, kind: Kind) -> list[dict[int, Record]]:
    """Of one kind, records by row block of each shard in order; none if a shard has none."""
    found = {of.shard: pages for name, pages in records.items() if (of := read_record_name(name)).kind is kind}
    whole = [found.get(shard, {}) for shard in range(pair.shards)]
    return whole if all(whole) else []


def _covered(coverage: Coverage, pair: PairSettings, kind: Kind = Kind.MASS) -> list[bool]:
    names = frozenset(_names(pair, kind))
    return [names <= records.keys() for records in coverage.records]


def _mapped(coverage: Coverage, pair: PairSettings) -> frozenset[int]:
    if not pair.uses_maps:
        return frozenset()
    return frozenset(page for page, is_covered in enumerate(_covered(coverage, pair, Kind.MAP)) if is_covered)


def _too_little(covered: Sequence[bool], rows: int) -> Refusal:
    if not any(covered):
        return Refusal.NOTHING_STORED
    return Refusal.TOO_LITTLE if rows else Refusal.CACHED
