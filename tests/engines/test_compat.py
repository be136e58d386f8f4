import pytest

from engines import compat
from engines.errors import IncompatibleSglangError


def test_the_installed_sglang_has_everything_that_crossfill_uses():
    compat.check()


def test_another_version_is_refused_with_what_to_do():
    with pytest.raises(
        IncompatibleSglangError, match=r"0\.5\.22 is installed, Crossfill needs exactly 0\.5\.23.*make setup"
    ):
        compat.check(version="0.5.22")


@pytest.mark.parametrize(
    "target",
    ["sglang.srt.gone:anything", "sglang.srt.server_args:gone", "sglang.srt.mem_cache.memory_pool:KVWriteLoc.gone"],
)
def test_a_target_that_moved_is_refused_by_name(target):
    with pytest.raises(IncompatibleSglangError, match=target):
        compat.check(targets={target: ()})


def test_a_target_that_lost_a_parameter_is_refused():
    with pytest.raises(IncompatibleSglangError, match="does not take no_such_parameter"):
        compat.check(targets={"sglang.srt.server_args:prepare_server_args": ("argv", "no_such_parameter")})


def test_registering_makes_the_backend_known_and_selectable():
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry

    def make(runner):
        return runner

    compat.add_attention_backend("crossfill-test", make)
    compat.add_attention_backend("crossfill-test", make)
    assert attention_registry.ATTENTION_BACKENDS["crossfill-test"] is make
    assert choices.ATTENTION_BACKEND_CHOICES.count("crossfill-test") == 1


def test_the_plugin_ends_the_process_when_sglang_moved(monkeypatch):
    from engines import plugin

    monkeypatch.setattr(compat, "SGLANG_VERSION", "9.9.9")
    # SystemExit, since SGLang's plugin loader swallows ordinary exceptions.
    with pytest.raises(SystemExit, match=r"crossfill: SGLang .* is installed, Crossfill needs exactly 9\.9\.9"):
        plugin.register()
