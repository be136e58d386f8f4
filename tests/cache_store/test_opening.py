import pytest

from cache_store.backends.opening import open_backend
from cache_store.errors import StoreUrlError


@pytest.mark.parametrize("url", ["user:secret@host:6379/0", "http://user:secret@host", "secret", ""])
def test_an_unknown_url_is_refused_without_showing_it(url):
    with pytest.raises(StoreUrlError, match="memory://, lmdb://, redis://") as caught:
        open_backend(url)
    assert "secret" not in str(caught.value)
