import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import yaml

from crossfill.config import StackConfig
from crossfill.config_file import effective, load_any, schema_of
from engines.reuse.artifact import WEIGHTS, Manifest, write_artifact
from engines.reuse.settings import ModelIdentity
from router.config import RouterConfig, load_yaml
from router.errors import ConfigError

DEMO = Path(__file__).parent.parent.parent / "deploy" / "demo.yaml"
STACK = "models: [{name: a, source: s}, {name: b, urls: ['http://b']}]\n"
ROUTER = "models: [{name: a, workers: ['http://a']}, {name: b, workers: ['http://b']}]\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="file.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_check_tells_each_file_and_fails_if_one_has_a_fault(crossfill, write):
    good, bad = write(ROUTER, "good.yaml"), write(STACK + "routing:\n  threshhold: 0.1\n", "bad.yaml")
    ended = crossfill("config", "check", bad, good, DEMO)
    assert ended.returncode == 1
    assert ended.stdout == f"{good}: ok (router, 2 models)\n{DEMO}: ok (stack, 2 models)\n"
    assert ended.stderr.startswith(f"crossfill: {bad}:3: unknown key 'routing.threshhold'; expected one of: ")
    assert len(ended.stderr.splitlines()) == 1
    assert crossfill("config", "check", good, DEMO).returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ROUTER + "routing: {taus: 1}\n", ":2: unknown key 'routing.taus'; did you mean 'routing.tau'?"),
        (ROUTER + "tau: 1\n", ":2: unknown key 'tau'; did you mean 'routing.tau'?"),
        (ROUTER + "routing: {tau: '1'}\n", ":2: routing.tau: must be a valid number, not '1'"),
        ("models: [{name: a, wokers: ['http://a']}]\n", "'models.0.wokers'; did you mean 'models.0.workers'? (and 1"),
        ("models: [{name: a, source: s, woker: {}}]\n", "'models.0.woker'; did you mean 'models.0.worker'?"),
        ("models: [{name: a, souce: s}]\n", "'models.0.souce'; did you mean 'models.0.source'?"),
        (STACK + "supervisr: {}\n", ":2: unknown key 'supervisr'; did you mean 'supervisor'?"),
        (ROUTER + "supervisor: {}\n", ":2: unknown key 'supervisor'; expected one of: "),
        (
            "models: [{name: a, source: s}, {name: b, source: s}, {name: c, workers: 2}]\n",
            "unknown key 'models.2.workers'",
        ),
        (ROUTER + "auth: {key_file: keys}\n", ":2: unknown key 'auth.key_file'; did you mean 'auth.keys_file'?"),
        (
            STACK + "reuse:\n  shadow: {share: 1.5}\n",
            ":3: reuse.shadow.share: must be less than or equal to 1, not 1.5",
        ),
        (STACK + "reuse: {shadow: {max_divergence: 0}}\n", ":2: reuse.shadow.max_divergence: must be greater than 0"),
        (STACK + "reuse: {shadow: {window: 7}}\n", ":2: reuse.shadow.window: must be greater than or equal to 8"),
        (STACK + "reuse: {shadow: {shar: 1}}\n", ":2: unknown key 'reuse.shadow.shar'; did you mean"),
        ("models: {}\n", ":1: models: must be a valid array, not {}"),
        ("- a\n", ": expected a mapping of keys at the top, found a list"),
        ("models: [\n", ":2: not valid YAML"),
    ],
)
def test_a_fault_is_told_in_the_words_of_the_kind_of_file(write, text, message):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_any(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("models", [STACK, ROUTER], ids=["stack", "router"])
@pytest.mark.parametrize(
    ("section", "fault"),
    [
        ("auth: {keys_file: none}\n", "none: cannot be read: No such file or directory"),
        ("auth: {keys_file: bad}\n", "bad:1: not a key: "),
        ("auth: {keys_file: empty}\n", "empty: has no key, nobody could use the router"),
        (
            "routing: {ladder: [a, b], scorer: {kind: recorded, path: none.jsonl}}\n",
            "none.jsonl: cannot be read: No such file or directory",
        ),
        ("routing: {ladder: [a, b], scorer: {kind: recorded, path: bad}}\n", "bad:1: "),
        ('auth: {keys_file: "a\\0b"}\n', "file.yaml:2: auth.keys_file: has a null character"),
        ("routing: {tau: {a: 1}}\n", "file.yaml:2: routing.tau: must be a number or a list of numbers"),
    ],
    ids=["no keys file", "bad keys file", "empty keys file", "no scores", "bad scores", "null character", "tau"],
)
def test_files_that_a_file_names_are_checked(crossfill, write, models, section, fault):
    write("nonsense\n", "bad")
    write("", "empty").chmod(0o600)
    path = write(models + section)
    ended = crossfill("config", "check", path)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"crossfill: {path.parent}/{fault}")
    assert not ended.stdout


def pair_of(tmp_path, layers, **pair):
    models = []
    for name in ("large", "small"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"num_hidden_layers": 6, "num_attention_heads": 4}')
        (folder / "model.safetensors").write_bytes(b"w")
        models.append({"name": name, "source": str(folder)})
    pairs = [{"sender": "large", "receiver": "small", "layers": layers, **pair}]
    return yaml.safe_dump({"models": models, "reuse": {"pairs": pairs}}, sort_keys=False)


@pytest.mark.parametrize(
    ("layers", "fault"),
    [([0, 1, 2, 3, 4, 5], None), ([0, 1], "reuse.pairs: large and small: layers names 2, "), ("suffix", None)],
)
def test_pairs_of_models_that_are_there_are_compared_with_them(crossfill, write, tmp_path, layers, fault):
    path = write(pair_of(tmp_path, layers))
    ended = crossfill("config", "check", path)
    assert ended.returncode == (fault is not None)
    assert fault is None or ended.stderr.startswith(f"crossfill: {path}: {fault}")


def test_artifacts_are_read_whether_their_models_are_there_or_not(crossfill, write, tmp_path):
    models = [{"name": name, "source": f"org/{name}"} for name in ("large", "small")]
    pairs = [{"sender": "large", "receiver": "small", "artifact": "pairs/here"}]
    path = write(yaml.safe_dump({"models": models, "reuse": {"pairs": pairs}}))
    told = crossfill("config", "check", path)
    assert told.returncode == 1
    assert f"{path}: reuse.pairs: {path.parent}/pairs/here/pair.json: cannot be read" in told.stderr
    large, small = (
        ModelIdentity(name=name, revision=name, tokenizer="t", template="", layers=3, heads=1)
        for name in ("large", "small")
    )
    manifest = Manifest(
        sender=large, receiver=small, layers=(0, 1, 2), first_layer=1, top_p=0.9, min_tokens=64, max_density=1
    )
    write_artifact(path.parent / "pairs/here", manifest, {1: np.ones((1, 1), np.float32)})
    assert crossfill("config", "check", path).returncode == 0
    (path.parent / "pairs/here" / WEIGHTS).write_bytes(b"")
    assert "calibrate again" in crossfill("config", "check", path).stderr


@pytest.mark.parametrize("away", ["org/model", "smollm2-135m-instruct"])
def test_pairs_of_models_that_are_not_there_yet_are_not(crossfill, write, tmp_path, away, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = pair_of(tmp_path, [0, 1]).replace(f"source: {tmp_path}/large", f"source: {away}")
    assert away in text
    assert crossfill("config", "check", write(text)).returncode == 0


@pytest.mark.parametrize(
    ("key", "name", "fault"),
    [
        ("sender", "larg", ":8: reuse.pairs.0.sender: there is no model 'larg' (large, small); did you mean 'large'?"),
        ("receiver", "x", ":9: reuse.pairs.0.receiver: there is no model 'x' (large, small)"),
    ],
)
def test_a_pair_of_an_unknown_model_is_told_with_its_line(crossfill, write, tmp_path, key, name, fault):
    path = write(pair_of(tmp_path, "suffix", **{key: name}))
    ended = crossfill("config", "check", path)
    assert ended.stderr == f"crossfill: {path}{fault}\n"


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (
            "worker: {threads: 2, max_total_tokens: 4096}\n"
            "models: [{name: a, source: s, worker: {threads: 3}}, {name: b, urls: ['http://b']}]\n"
            "limits: {body_bytes: 1MiB}\n"
            "auth: {keys_file: keys}\n",
            StackConfig,
        ),
        (ROUTER + "routing: {ladder: [a, b], tau: 0.2}\n", RouterConfig),
    ],
    ids=["stack", "router"],
)
def test_show_prints_every_default_and_means_the_same(crossfill, write, text, model):
    path = write(text)
    ended = crossfill("config", "show", path)
    assert ended.returncode == 0, ended.stderr
    shown = yaml.safe_load(ended.stdout)
    assert shown.keys() == model.model_fields.keys()
    assert shown["upstream"]["connect_s"] == 5
    again = load_any(write(ended.stdout, "again.yaml"))
    assert isinstance(again, model)
    assert effective(again) == effective(load_any(path)) == shown


@pytest.mark.parametrize(
    "text",
    [
        "affinity: {mirror_bytes: 1024GiB, margin: 9223372036854775807}\n",
        "routing: {tau: 1.0e-320, sigma: 1.7e+308}\n",
        'listen: {host: "\\x85\\u2028 \\\\ \\U0001F600"}\n',
        "listen: {host: 2020-01-01}\nauth: {keys_file: 'null'}\n",
    ],
    ids=["integers", "numbers", "text", "words"],
)
def test_show_of_whatever_is_taken_can_be_taken_again(write, text):
    taken = load_any(write(ROUTER + text))
    shown = yaml.safe_dump(effective(taken), sort_keys=False, allow_unicode=True)
    assert load_any(write(shown, "again.yaml")) == taken


def test_show_of_a_bad_file_is_one_line(crossfill, write):
    ended = crossfill("config", "show", write(ROUTER + "routing: {taus: 1}\n"))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "did you mean 'routing.tau'" in ended.stderr


@pytest.mark.parametrize("kind", ["stack", "router"])
def test_schema_is_valid_and_printed_whole(crossfill, kind):
    ended = crossfill("config", "schema", "--kind", kind)
    assert ended.returncode == 0
    printed = json.loads(ended.stdout)
    assert printed == schema_of(kind)
    assert printed["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(printed)


def faults(kind, text):
    validator = jsonschema.Draft202012Validator(schema_of(kind))
    return [error.message for error in validator.iter_errors(yaml.safe_load(text))]


def test_schema_takes_what_the_program_takes():
    assert not faults("stack", DEMO.read_text())
    assert not faults("stack", STACK + "limits: {body_bytes: 8MiB}\nrouting: {scorer: heuristic}\n")
    assert not faults("router", ROUTER + "limits: {body_bytes: 1000}\nrouting: {scorer: {kind: recorded, path: a}}\n")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (DEMO.read_text().replace("tau:", "taus:"), "taus"),
        (DEMO.read_text().replace("source:", "sources:"), "sources"),
        (STACK + "limits: {body_bytes: 8 apples}\n", "8 apples"),
        (STACK + "limits: {body_bytes: ' 8 MiB '}\n", " 8 MiB "),
        (STACK + "limits: {body_bytes: '8\u00a0MiB'}\n", "8\\xa0MiB"),
        (STACK + "limits: {body_bytes: '٨MiB'}\n", "٨MiB"),
        (STACK + "affinity: {mirror_bytes: 1099511627777}\n", "1099511627777"),
        (STACK + "routing: {scorer: learnt}\n", "learnt"),
        (STACK + "routing: {sigma: -1}\n", "-1"),
        (ROUTER, "workers"),
    ],
    ids=[
        "key",
        "key of a model",
        "size",
        "blanks",
        "other blank",
        "other digit",
        "large size",
        "scorer",
        "number",
        "the other kind",
    ],
)
def test_schema_refuses_what_the_program_refuses(write, text, word):
    assert any(word in message for message in faults("stack", text))
    with pytest.raises(ConfigError):
        load_yaml(write(text), StackConfig)


@pytest.mark.parametrize("models", [STACK, ROUTER], ids=["stack", "router"])
def test_a_password_of_the_store_is_not_shown(crossfill, write, models):
    path = write(f"{models}store: {{url: 'redis://me:hunter2@host:1/0', budget_bytes: 1 GiB}}\n")
    for command in ("show", "check"):
        ended = crossfill("config", command, path)
        assert ended.returncode == 0, ended.stderr
        assert "hunter2" not in ended.stdout + ended.stderr
        if command == "show":
            store = yaml.safe_load(ended.stdout)["store"]
            assert (store["url"], store["budget_bytes"]) == ("redis://me:***@host:1/0", 2**30)


def test_a_key_in_both_files_is_a_fault(crossfill, write):
    key = f"acme sha256:{'0' * 64}\n"
    path = write(ROUTER + "auth: {keys_file: keys, admin_keys_file: admin}\n")
    write(key, "keys")
    write(f"ada sha256:{'1' * 64}\n", "admin")
    assert crossfill("config", "check", path).returncode == 0
    write(key, "admin")
    ended = crossfill("config", "check", path)
    assert ended.returncode == 1
    assert f"{path.parent}/admin: the key 000000000000 is in {path.parent}/keys too" in ended.stderr
