from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engines.models.healing import network

if TYPE_CHECKING:
    from engines.models.loading import LoadedModel

IDS = torch.arange(1000, 1024)[None]
# Batch, heads, kv heads, rows, context.
SHAPES = [
    (2, 4, 4, 16, 16),
    (2, 6, 2, 33, 33),
    (1, 9, 3, 257, 257),
    (1, 2, 1, 515, 515),
    (1, 2, 1, 256, 256),
    (1, 2, 1, 1, 1),
    (3, 4, 2, 1, 40),
    (2, 4, 2, 5, 21),
    (1, 4, 2, 300, 417),
]


def inputs(batch: int, heads: int, groups: int, rows: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((batch, heads, rows, 8), (batch, groups, context, 8), (batch, groups, context, 8))
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def reference(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    rows, context = query.shape[2], key.shape[2]
    seen = torch.ones(rows, context, dtype=torch.bool).tril(context - rows)
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_attention_and_its_gradients_are_those_of_torch(shape: tuple[int, int, int, int, int]) -> None:
    given = inputs(*shape)
    found, expected = network.attend(*given, 0.3), reference(*given, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [torch.autograd.grad(output, given, upstream) for output in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
    # The control: another scale is another attention, wherever there is more than one token to attend to.
    assert torch.allclose(network.attend(*given, 0.4), expected, rtol=1e-3) == (shape[4] == 1)


def test_a_row_sees_nothing_after_it() -> None:
    query, key, value = (tensor.detach() for tensor in inputs(1, 4, 2, 300, 310))
    before = network.attend(query, key, value, 0.3)
    key[:, :, 290], value[:, :, 290] = 5.0, 5.0
    after = network.attend(query, key, value, 0.3)
    # Row i stands at position 10 + i.
    assert torch.equal(after[:, :, :280], before[:, :, :280])
    assert (after[:, :, 280:] != before[:, :, 280:]).any(-1).all()


@torch.inference_mode()
def test_model_computes_the_same_with_the_training_attention(
    whole: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        calls.append(scale)
        return attend(query, key, value, scale)

    attend = network.attend
    monkeypatch.setattr(network, "attend", counted)
    own = whole.model(IDS, use_cache=False).logits
    assert not calls
    with network.training_attention(whole.model):
        found = whole.model(IDS, use_cache=False).logits
    assert len(calls) == 4
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
    assert (own[:, 1:] - own[:, :-1]).abs().mean() > 0.1


def test_old_attention_is_put_back(whole: LoadedModel) -> None:
    before = whole.model.config._attn_implementation
    with network.training_attention(whole.model):
        assert whole.model.config._attn_implementation != before
    assert whole.model.config._attn_implementation == before


def test_old_attention_is_put_back_after_an_error(whole: LoadedModel) -> None:
    before = whole.model.config._attn_implementation
    with pytest.raises(KeyError, match="inside"), network.training_attention(whole.model):
        raise KeyError("inside")
    assert whole.model.config._attn_implementation == before


# Tokens at a time: a prompt and single tokens, as in sampling; several at once behind others.
@pytest.mark.parametrize("pieces", [(6, *[1] * 18), (5, 1, 7, 11)], ids=["one-by-one", "several"])
@torch.inference_mode()
def test_growing_cache_gives_the_logits_of_no_cache(whole: LoadedModel, pieces: tuple[int, ...]) -> None:
    with network.training_attention(whole.model):
        expected = whole.model(IDS, use_cache=False).logits
        cache: Any = network.growing_cache(IDS.shape[1])
        found = [
            whole.model(ids, past_key_values=cache, use_cache=True).logits for ids in IDS.split(list(pieces), dim=1)
        ]
        alone = whole.model(IDS[:, -1:], use_cache=False).logits
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)
    # The control: what is cached matters.
    assert (alone - expected[:, -1:]).abs().max() > 0.05


@torch.inference_mode()
def test_growing_cache_is_allocated_once(whole: LoadedModel) -> None:
    cache: Any = network.growing_cache(8)
    with network.training_attention(whole.model):
        places = []
        for ids in IDS[:, :8].split(1, dim=1):
            whole.model(ids, past_key_values=cache, use_cache=True)
            places.append([layer.keys.data_ptr() for layer in cache.layers])
    assert all(place == places[0] for place in places)
    assert cache.get_seq_length() == 8
