"""What the artifact of a pair says, and several of them side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from engines.reuse.artifact import Manifest, Measured


def verdict(manifest: Manifest) -> str:
    """In words."""
    failed = [one.name for one in manifest.gate if not one.passed]
    if manifest.passed:
        return "may be used"
    return f"refused, because of: {', '.join(failed)}" if failed else "refused: nothing was measured"


def lines(manifest: Manifest) -> Iterator[str]:
    """All of one, but for what the table of its gate has."""
    sender, receiver = manifest.sender, manifest.receiver
    yield f"{sender.name} ({sender.revision[:12]}) → {receiver.name} ({receiver.revision[:12]}): {verdict(manifest)}"
    guided = manifest.guided
    pairs = ", ".join(f"{layer}←{manifest.layers[layer]}" for layer in guided)
    yield f"guided layers, receiver←sender: {pairs}"
    yield (
        f"top-p {manifest.top_p:g}, for prompts of which {manifest.min_tokens} tokens or more can be guided, at a "
        f"density of {manifest.max_density:g} at most"
    )
    for source in manifest.data:
        yield f"{source.purpose}: {source.name}, {source.tokens} tokens, digest {source.digest}"
    if manifest.seconds:
        yield f"took {sum(manifest.seconds.values()) / 60:.1f} minutes"
    for name, value in manifest.made_by.items():
        yield f"{name}: {value}"


def rows(manifests: Mapping[str, Manifest]) -> list[Sequence[str]]:
    """Every figure of every artifact, a column each; the limit stands with the figure where limits differ."""
    names = list(dict.fromkeys(one.name for manifest in manifests.values() for one in manifest.gate))
    found: list[Sequence[str]] = [("", *manifests)]
    found += [(name, *(_cell(name, manifest) for manifest in manifests.values())) for name in names]
    found.append(("top-p", *(f"{manifest.top_p:g}" for manifest in manifests.values())))
    groups = [
        ", ".join(f"{layer}: {top_p:g}" for layer, top_p in one.layer_top_p.items()) for one in manifests.values()
    ]
    if any(groups):
        found.append(("… of layers", *groups))
    found.append(("first layer", *(str(manifest.first_layer) for manifest in manifests.values())))
    found.append(("may be used", *("yes" if manifest.passed else "no" for manifest in manifests.values())))
    return found


def _cell(name: str, manifest: Manifest) -> str:
    one = next((one for one in manifest.gate if one.name == name), None)
    return "–" if one is None else _told(one)


def _told(one: Measured) -> str:
    interval = "" if one.low is None or one.high is None else f" ({one.low:.4f}–{one.high:.4f})"
    return f"{one.value:.4f}{interval}, {'within' if one.passed else 'NOT within'} {one.limit:g}"
