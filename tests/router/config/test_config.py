from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from pydantic import ValidationError

from cache_store.config import StoreSettings
from router.config import ListenConfig, RouterConfig, RoutingConfig, Section, UpstreamConfig, load_yaml
from router.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MODELS = """\
models:
  - {name: small, workers: ["http://a:1"]}
  - {name: large, workers: ["http://b:1/", "https://c"]}
"""


def load(tmp_path: Path, text: str, model: Any = RouterConfig) -> Any:
    path = tmp_path / "router.yaml"
    path.write_text(text, encoding="utf-8")
    return load_yaml(path, model)


def told(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "router.yaml"))
    assert "\n" not in message
    return message.removeprefix(str(tmp_path / "router.yaml"))


def test_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, MODELS)
    assert config.listen == ListenConfig(host="127.0.0.1", port=8000)
    assert config.routing == RoutingConfig()
    assert (config.routing.tau, config.routing.sigma, config.routing.ladder) == (0.3, 0.1, None)
    assert config.limits.body_bytes == 8 * 1024 * 1024
    assert config.upstream == UpstreamConfig(
        connect_s=5, first_byte_s=300, between_bytes_s=120, total_s=1800, attempts=2
    )
    assert config.model_names == ("small", "large")
    assert config.models[1].workers == ("http://b:1", "https://c")


def test_sizes_may_have_units_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    text = f"{MODELS}limits: {{body_bytes: 1 MiB}}\nrouting: {{scorer: {{kind: recorded, path: sub/scores.jsonl}}}}\n"
    config = load(tmp_path, text)
    assert config.limits.body_bytes == 1024 * 1024
    assert config.routing.scorer.path == tmp_path / "sub" / "scores.jsonl"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{MODELS}routing:\n  taau: 0.1\n", ":5: unknown key 'routing.taau'; did you mean 'routing.tau'?"),
        (f"{MODELS}upstrem: {{}}\n", ":4: unknown key 'upstrem'; did you mean 'upstream'?"),
        (f"{MODELS}tau: 0.1\n", ":4: unknown key 'tau'; did you mean 'routing.tau'?"),
        (
            f"{MODELS}routing: {{zzz: 1}}\n",
            ":4: unknown key 'routing.zzz'; expected one of: ladder, tau, sigma, cost_weight, ttft_weight, scorer",
        ),
        (
            "models:\n  - name: small\n    worker: ['http://a']\n",
            ":3: unknown key 'models.0.worker'; did you mean 'models.0.workers'? (and 1 more)",
        ),
        (
            f"{MODELS}routing:\n  scorer:\n    kind: recorded\n    path: a\n    paths: b\n",
            ":8: unknown key 'routing.scorer.paths'; did you mean 'routing.scorer.path'?",
        ),
        (f"{MODELS}routing: {{scorer: {{kind: recorded}}}}\n", ":4: the key 'routing.scorer.path' is missing"),
        (
            f"{MODELS}routing: {{scorer: {{kind: taught}}}}\n",
            ":4: routing.scorer.kind must be one of 'heuristic', 'recorded', 'learned'",
        ),
        ("listen: {}\n", ": the key 'models' is missing"),
        (f"{MODELS}listen: {{port: '80'}}\n", ":4: listen.port: must be a valid integer, not '80'"),
        (
            f"{MODELS}limits: {{body_bytes: 8MB}}\n",
            ":4: limits.body_bytes: not a size: '8MB'; write bytes, or a number with B, KiB, MiB or GiB",
        ),
        (
            f"{MODELS}routing: {{ladder: [small]}}\n",
            ":4: routing: ladder takes two models or more, weakest first; it has 1",
        ),
        (f"{MODELS}routing: {{tau: [0.1, x]}}\n", ":4: routing.tau.1: must be a valid number, not 'x'"),
        (f"{MODELS}routing: {{tau: [.nan]}}\n", ":4: routing.tau.0: must be a finite number, not nan"),
        (
            f"{MODELS}routing: {{ladder: [small, large], tau: [0.1, 0.2]}}\n",
            ":4: routing: tau takes one number, or a list of 1 for the neighbours of this ladder; it has 2",
        ),
        (
            f"{MODELS}  - {{name: paid, workers: ['http://d'], cost: {{input: 1, output: 2}}}}\n"
            "routing: {ladder: [small, paid], cost_weight: 1}\n",
            ": routing.cost_weight needs a cost for every model of the ladder; there is none for 'small'",
        ),
        (
            "models: [{name: m, workers: ['http://a'], cost: {input: -1, output: 2}}]\n",
            ":1: models.0.cost.input: must be greater than or equal to 0, not -1",
        ),
        (f"{MODELS}routing: {{ladder: [small, small]}}\n", ":4: routing: ladder names 'small' twice"),
        (
            f"{MODELS}routing: {{ladder: [small, huge]}}\n",
            ":4: routing.ladder.1: there is no model 'huge' (small, large)",
        ),
        (f"{MODELS}  - {{name: small, workers: ['http://d']}}\n", ": models has the name 'small' twice"),
        (
            "models: [{name: auto, workers: ['http://a']}]\n",
            ":1: models.0.name: the name 'auto' is reserved for the routed model",
        ),
        ("models: [{name: m, workers: ['ftp://a']}]\n", ":1: models.0.workers.0: not an http(s) URL: 'ftp://a'"),
        (
            "models: [{name: m, workers: ['http://a', 'http://a/']}]\n",
            ":1: models.0: model 'm' lists the worker http://a twice",
        ),
        (
            "models: [{name: m, workers: ['http://a/v1']}]\n",
            ":1: models.0.workers.0: a worker URL has no path, write it without /v1: 'http://a/v1'",
        ),
        (
            f"{MODELS}listen: !!python/name:os.a {{}}\n",
            ":4: listen: a configuration has no values of the type !!python/name:os.a",
        ),
        (f"{MODELS}? [a, b]\n: 1\n", ":4: not valid YAML: found unhashable key"),
        (f"{MODELS}? {{a: b}}\n: 1\n", ":4: not valid YAML: found unhashable key"),
        (f"a: {'[' * 3000}{']' * 3000}\n", ":1: is nested too deep"),
        (f"a: 1\nb: {'[' * 65}{']' * 65}\n", ":2: is nested too deep"),
        ("a: !!int x\n", ":1: a: not valid YAML: invalid literal for int() with base 10: 'x'"),
        ("a: &a [*a]\n", ":1: is nested too deep"),
        (f"a: &a [{'*a,' * 2000}]\n", ": has more than 100000 nodes, aliases written out"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{n}: &{n} [{f'*{a},' * 10}]\n" for a, n in pairwise("abcdefghi")),
            ": has more than 100000 nodes, aliases written out",
        ),
        (f"a: {'x' * 2**20}\n", ": is larger than 1048576 bytes"),
        (MODELS + MODELS, ":4: the key 'models' is there twice"),
        ("models: [\n", ":2: not valid YAML: expected the node content, but found '<stream end>'"),
        ("", ": expected a mapping of keys at the top, found nothing"),
        ("- a\n", ": expected a mapping of keys at the top, found a list"),
    ],
)
def test_fault_is_one_line_with_place_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    assert told(tmp_path, text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("routing: {tau: {a: 1}}", "routing.tau: must be a number or a list of numbers, not {'a': 1}"),
        ("routing: {tau: {number: 1}}", "routing.tau: must be a number or a list of numbers, not {'number': 1}"),
        ("routing: {tau: {}}", "routing.tau: must be a number or a list of numbers, not {}"),
        ("routing: {tau: [{list: 1}]}", "routing.tau.0: must be a valid number, not {'list': 1}"),
        ("routing: {scorer: {heuristic: 1}}", "the key 'routing.scorer.kind' is missing"),
        (
            "routing: {scorer: {kind: {recorded: 1}}}",
            "routing.scorer.kind must be one of 'heuristic', 'recorded', 'learned'",
        ),
        (
            "routing: {scorer: {kind: recorded, path: {recorded: 1}}}",
            "routing.scorer.path: must be a valid string, not {'recorded': 1}",
        ),
        (
            "routing: {scorer: {kind: recorded, path: a, recorded: {}}}",
            "unknown key 'routing.scorer.recorded'; expected one of: kind, path",
        ),
        ("routing: {scorer: [1]}", "routing.scorer: must be an object, not [1]"),
    ],
)
def test_fault_within_alternatives_is_told_by_the_keys_of_the_file(tmp_path: Path, text: str, message: str) -> None:
    assert told(tmp_path, f"{MODELS}{text}\n") == f":4: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('auth: {keys_file: "a\\0b"}', "auth.keys_file: has a null character"),
        ('routing: {scorer: {kind: recorded, path: "\\0"}}', "routing.scorer.path: has a null character"),
        ('routing: {scorer: {kind: learned, path: "\\0"}}', "routing.scorer.path: has a null character"),
        ('auth: {keys_file: "\\uD800"}', "auth.keys_file: has half of a surrogate pair"),
        ('"\\0": 1', "the key '\\x00' has a null character"),
        ("streams: {heartbeat_s: .inf}", "streams.heartbeat_s: must be a finite number, not inf"),
        ("sessions: {remembered: -.inf}", "sessions.remembered: must be a finite number, not -inf"),
        ("limits: {default_max_tokens: .nan}", "limits.default_max_tokens: must be a finite number, not nan"),
        ("limits: {default_max_tokens: 1.0e+999}", "limits.default_max_tokens: must be a finite number, not inf"),
        ("limits: {choices: 9223372036854775808}", "limits.choices: must be a number of at most 64 bits"),
        (
            "limits: {body_bytes: !!binary aGk=}",
            "limits.body_bytes: a configuration has no values of the type !!binary",
        ),
        ("limits: {body_bytes: !!set {a, b}}", "limits.body_bytes: a configuration has no values of the type !!set"),
        ("limits: !!omap [a: 1]", "limits: a configuration has no values of the type !!omap"),
        ("limits: {choices: 2020-99-01}", "limits.choices: not valid YAML: month must be in 1..12"),
        ("on: 1", "the key 'on' is not a text; if it is meant as one, quote it"),
        ("? !!binary aGk=\n: 1", "the key 'aGk=' is not a text; if it is meant as one, quote it"),
        ('listen: {host: "\\UFFFFFFFF"}', "not valid YAML: Python int too large to convert to C int"),
        ("listen: {host: \x01}", "not valid YAML: special characters are not allowed"),
        (
            "limits: {body_bytes: 99999999999999999999999GiB}",
            "limits.body_bytes: is more than 1 TiB (1099511627776 bytes)",
        ),
        ("affinity: {mirror_bytes: 1099511627777}", "affinity.mirror_bytes: is more than 1 TiB (1099511627776 bytes)"),
        (
            "limits: {body_bytes: ' 8 MiB '}",
            "limits.body_bytes: not a size: ' 8 MiB '; write bytes, or a number with B, KiB, MiB or GiB",
        ),
    ],
)
def test_value_that_no_configuration_can_hold_is_told_by_its_place(tmp_path: Path, text: str, message: str) -> None:
    assert told(tmp_path, f"{MODELS}{text}\n") == f":4: {message}"


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan"])
def test_optional_number_that_is_not_finite_is_not_taken_for_none(tmp_path: Path, text: str) -> None:
    fault = f"models: [{{name: m, workers: ['http://a'], prefill_tokens_per_s: {text}}}]\n"
    assert told(tmp_path, fault) == (
        f":1: models.0.prefill_tokens_per_s: must be a finite number, not {text.replace('.', '')}"
    )


def test_merged_keys_are_taken(tmp_path: Path) -> None:
    text = (
        "models:\n  - &a {name: small, workers: ['http://a']}\n  - {<<: *a, name: large}\n"
        "limits: {body_bytes: 1024 GiB}\n"
    )
    config = load(tmp_path, text)
    assert config.models[1].workers == ("http://a",)
    assert config.limits.body_bytes == 2**40


@pytest.mark.parametrize(
    ("fault", "key"),
    [
        (f"{MODELS}routing: {{sigma: -1}}", "routing.sigma"),
        (f"{MODELS}routing: {{tau: .nan}}", "routing.tau"),
        (f"{MODELS}listen: {{host: ''}}", "listen.host"),
        (f"{MODELS}limits: {{client_write_s: 0}}", "limits.client_write_s"),
        ("models: [{name: m, workers: ['']}]", "models.0.workers.0"),
        ("models: [{name: m, workers: ['http://:80']}]", "models.0.workers.0"),
        (f"{MODELS}upstream: {{attempts: 0}}", "upstream.attempts"),
        (f"{MODELS}health: {{interval_s: 0}}", "health.interval_s"),
        ("models: []", "models"),
        ("models: [{name: m, workers: []}]", "models.0.workers"),
        ("models: [{name: m, workers: ['http://a'], capability: 2}]", "models.0.capability"),
        ("models: [{name: m, workers: ['http://a'], system_role: users}]", "models.0.system_role"),
    ],
)
def test_values_out_of_range_are_refused(tmp_path: Path, fault: str, key: str) -> None:
    assert f" {key}: " in told(tmp_path, fault)


def test_scorer_without_settings_may_be_given_by_its_name(tmp_path: Path) -> None:
    config = load(tmp_path, f"{MODELS}routing: {{scorer: heuristic}}\n")
    assert config.routing == RoutingConfig()
    assert "routing.scorer" in told(tmp_path, f"{MODELS}routing: {{scorer: learned}}\n")


def test_few_aliases_are_welcome(tmp_path: Path) -> None:
    config = load(tmp_path, "models: [{name: a, workers: &w ['http://a']}, {name: b, workers: *w}]\n")
    assert config.models[0].workers == config.models[1].workers


def test_credentials_in_a_worker_url_are_refused_and_not_repeated(tmp_path: Path) -> None:
    message = told(tmp_path, "models:\n  - name: m\n    workers: ['http://user:hunter2@a']\n")
    assert "must not carry credentials" in message
    assert "hunter2" not in message


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_yaml(tmp_path / "none.yaml", RouterConfig)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"latin\.yaml: cannot be read: it is not UTF-8 text"):
        load_yaml(tmp_path / "latin.yaml", RouterConfig)


def test_the_store_is_named_with_sizes_as_everywhere(tmp_path: Path) -> None:
    assert load(tmp_path, MODELS).store == StoreSettings()
    text = (
        f"{MODELS}store: {{url: 'redis://:hunter2@host', budget_bytes: 4 GiB, tenant_bytes: 512MiB, deadline_s: 2}}\n"
    )
    config = load(tmp_path, text)
    store = config.store
    assert (store.url, store.budget_bytes, store.tenant_bytes) == ("redis://:hunter2@host", 2**32, 2**29)
    # As `crossfill up` hands it to the router's process.
    assert load(tmp_path, yaml.safe_dump(config.model_dump(mode="json"))) == config
    assert "hunter2" not in repr(config)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("store: {budget: 1GiB}", "unknown key 'store.budget'; did you mean 'store.budget_bytes'?"),
        ("store: {budget_bytes: 1GB}", "store.budget_bytes: not a size: '1GB'; write bytes, or a number with B, KiB,"),
        ("store: {budget_bytes: 1}", "store.budget_bytes: must be greater than or equal to 1048576, not 1"),
        ("store: {url: 'var/store'}", "store.url: no store's URL; it begins with memory://, lmdb://"),
        (
            "store: {budget_bytes: 1GiB, tenant_bytes: 2GiB}",
            "store: tenant_bytes is more than budget_bytes, so it would bound nothing",
        ),
    ],
)
def test_a_fault_of_the_store_is_told_with_place_and_remedy(tmp_path: Path, section: str, message: str) -> None:
    assert told(tmp_path, f"{MODELS}{section}\n").startswith(f":4: {message}")


@pytest.mark.parametrize(
    "section",
    [
        "store: {url: 'redis://:hunter2@host/x'}",
        "store: {url: 'redis://:hunter2#@host'}",
        "store: {url: ['redis://:hunter2@host']}",
        "store: 'redis://:hunter2@host'",
        f"store: 'redis://:hunter2{'x' * 200}@host'",
        "store: 'redis://me:a/hunter2/b@c@host'",
        "stor: 'redis://:hunter2@host'",
        "store: {'redis://:hunter2@host': 1}",
        "store: {budget_bytes: 'redis://:hunter2@host'}",
    ],
)
def test_a_password_of_the_store_is_in_no_message(tmp_path: Path, section: str) -> None:
    message = told(tmp_path, f"{MODELS}{section}\n")
    assert "stor" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("store", ["redis://:hunter2@host", {"url": "redis://:hunter2@host/x"}, {"url": ["hunter2"]}])
def test_what_pydantic_says_of_a_store_does_not_repeat_it(store: Any) -> None:
    with pytest.raises(ValidationError, match="store") as caught:
        RouterConfig.model_validate({"models": [], "store": store})
    assert "hunter2" not in str(caught.value)


def test_other_models_embed_the_sections(tmp_path: Path) -> None:
    class Stack(Section):
        router: RoutingConfig
        listen: ListenConfig = ListenConfig()

    assert load(tmp_path, "router: {tau: 0.2}\n", Stack).router.tau == 0.2
    with pytest.raises(ConfigError, match=r"unknown key 'router\.sigm'; did you mean 'router\.sigma'\?"):
        load(tmp_path, "router: {sigm: 0.2}\n", Stack)


def test_configuration_is_frozen(tmp_path: Path) -> None:
    config = load(tmp_path, MODELS)
    with pytest.raises(ValidationError):
        config.listen.port = 1


def test_ladder_of_three_takes_a_tau_for_each_pair_and_costs(tmp_path: Path) -> None:
    text = (
        f"{MODELS}  - {{name: huge, workers: ['http://d'], cost: {{input: 0.5, output: 1.5}}}}\n"
        "routing: {ladder: [small, large, huge], tau: [0.1, 0.2], ttft_weight: 0.05}\n"
    )
    config = load(tmp_path, text)
    assert config.routing.tau == (0.1, 0.2)
    assert config.models[2].cost.output == 1.5
    # As `crossfill up` hands it to the router's process.
    assert load(tmp_path, yaml.safe_dump(config.model_dump(mode="json"))) == config
