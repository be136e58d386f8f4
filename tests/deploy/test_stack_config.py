import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from crossfill.config import StackConfig
from crossfill.config_file import effective
from crossfill.errors import StartError
from crossfill.plan import make_plan, write_router_file
from crossfill.ports import Ports
from router.config import RouterConfig, load_yaml
from router.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent


def load(tmp_path, **content):
    file = tmp_path / "stack.yaml"
    file.write_text(yaml.safe_dump(content))
    return load_yaml(file, StackConfig)


def two_models(**changes):
    return {"models": [{"name": "small", "source": "s"}, {"name": "large", "source": "l", "replicas": 2}], **changes}


def plan_of(config, tmp_path, state="."):
    folders = {model.source: tmp_path for model in config.models if model.source}
    with Ports(config.first_worker_port) as ports:
        return make_plan(config, folders, tmp_path / state, ports)


@pytest.mark.parametrize("file", ["demo.yaml", "demo-three.yaml"])
def test_the_demo_files_are_valid_and_order_their_models_by_size(file):
    from engines.models.catalogue import CATALOGUE

    config = load_yaml(ROOT / "deploy" / file, StackConfig)
    sizes = [CATALOGUE[model.source].parameters for model in config.models]
    assert sizes == sorted(set(sizes))
    assert config.routing.ladder == tuple(model.name for model in config.models)


def test_every_replica_gets_a_port_and_the_router_knows_them_all(tmp_path):
    config = load(tmp_path, **two_models(listen={"port": 0}))
    plan = plan_of(config, tmp_path)
    assert [spec.name for spec in plan.workers] == ["small/0", "large/0", "large/1"]
    urls = [url for model in plan.router_config.models for url in model.workers]
    assert len(set(urls)) == 3
    assert [spec.url for spec in plan.workers] == urls
    assert plan.router_config.listen.port > 0


def test_files_in_the_working_folder_are_no_modules_of_what_is_started(tmp_path):
    config = load(tmp_path, **two_models(listen={"port": 0}))
    plan = plan_of(config, tmp_path)
    for name in ("secrets.py", "router.py", "engines.py"):
        (tmp_path / name).write_text("raise SystemExit(7)")

    def status_of(*flags):
        code = "import secrets, router, engines"
        return subprocess.run([sys.executable, *flags, "-c", code], cwd=tmp_path, check=False).returncode

    assert status_of() == 7
    for spec in (*plan.workers, plan.router):
        flags = spec.command[1 : spec.command.index("-m")]
        assert status_of(*flags) == 0, spec.name


def test_the_written_router_file_is_the_routers_own_configuration(tmp_path):
    config = load(tmp_path, **two_models(routing={"ladder": ["small", "large"], "tau": 0.25}, listen={"port": 0}))
    plan = plan_of(config, tmp_path)
    write_router_file(plan)
    assert load_yaml(plan.router_file, RouterConfig) == plan.router_config


def test_the_written_router_file_has_the_stores_password_for_its_owner_only(tmp_path):
    url = "redis://:hunter2@host"
    plan = plan_of(load(tmp_path, **two_models(store={"url": url}, listen={"port": 0})), tmp_path)
    plan.router_file.parent.mkdir()
    # As an earlier version left it.
    plan.router_file.write_text("old")
    plan.router_file.chmod(0o644)
    write_router_file(plan)
    assert load_yaml(plan.router_file, RouterConfig).store.url == url
    assert plan.router_file.stat().st_mode & 0o777 == 0o600
    assert "hunter2" not in repr(plan)


def test_how_a_model_takes_system_turns_reaches_the_router(tmp_path):
    models = [
        {"name": "small", "source": "s", "system_role": "user"},
        {"name": "large", "urls": ["http://127.0.0.1:1"]},
    ]
    plan = plan_of(load(tmp_path, models=models, listen={"port": 0}), tmp_path)
    write_router_file(plan)
    written = load_yaml(plan.router_file, RouterConfig)
    assert [model.system_role for model in written.models] == ["user", "system"]


def test_files_that_it_names_are_found_from_the_written_router_file_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    routing = {"ladder": ["small", "large"], "scorer": {"kind": "recorded", "path": "scores.jsonl"}}
    stack = two_models(routing=routing, auth={"keys_file": "keys"}, listen={"port": 0})
    Path("stack.yaml").write_text(yaml.safe_dump(stack))
    plan = plan_of(load_yaml("stack.yaml", StackConfig), tmp_path, state="var")
    write_router_file(plan)
    written = load_yaml(plan.router_file, RouterConfig)
    assert written.routing.scorer.path == tmp_path / "scores.jsonl"
    assert written.auth.keys_file == tmp_path / "keys"


def test_a_models_own_worker_section_overrides_only_what_it_names(tmp_path):
    config = load(
        tmp_path,
        worker={"max_total_tokens": 4096, "threads": 2},
        models=[{"name": "a", "source": "s", "worker": {"threads": 3}}],
    )
    worker = config.worker_config(config.models[0], tmp_path, 31000)
    assert (worker.threads, worker.max_total_tokens) == (3, 4096)
    [shown] = effective(config)["models"]
    assert (shown["worker"]["threads"], shown["worker"]["max_total_tokens"]) == (3, 4096)


def test_a_port_in_use_is_skipped(tmp_path):
    import socket

    config = load(tmp_path, **two_models(first_worker_port=31700, listen={"port": 0}))
    with socket.create_server(("127.0.0.1", 31700)):
        assert "http://127.0.0.1:31700" not in {spec.url for spec in plan_of(config, tmp_path).workers}


def test_a_port_that_another_program_has_chosen_but_not_bound_is_skipped():
    code = """
import sys
from crossfill.ports import Ports
with Ports(31750) as ports:
    print(ports.take(), flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        taken = int(other.stdout.readline())
        with Ports(31750) as ports:
            assert ports.take() > taken
        other.stdin.close()
    with Ports(31750) as ports:
        assert ports.take() == taken, "a reservation ends with the program that made it"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"models": [{"name": "a"}]}, "needs source (to be started here) or urls"),
        ({"models": [{"name": "a", "source": "s", "urls": ["http://h:1"]}]}, "has both source"),
        ({"models": [{"name": "a", "replicas": 2, "urls": ["http://h:1"]}]}, "replicas and worker are for source"),
        (
            two_models(routing={"ladder": ["small", "lrage"]}),
            ":10: routing.ladder.1: there is no model 'lrage' (small, large); did you mean 'large'?",
        ),
        ({"models": [{"name": "a", "source": "s"}, {"name": "a", "source": "t"}]}, "twice"),
        (two_models(worker={"thread": 1}), "did you mean 'worker.threads'"),
        (two_models(worker={"extra_args": ["--port", "1"]}), "may not set --port"),
        (two_models(worker={"max_total_tokens": 1}), "worker.max_total_tokens"),
    ],
    ids=["neither", "both", "urls-replicas", "ladder", "twice", "typo", "own-option", "tiny-pool"],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, content, message):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **content)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_worker_that_cannot_start_is_named_before_anything_starts(tmp_path):
    config = load(tmp_path, models=[{"name": "a", "source": "./missing"}], listen={"port": 0})
    with pytest.raises(StartError, match=r"worker a/0: model folder \./missing does not exist"):
        make_plan(config, {"./missing": "./missing"}, tmp_path, Ports(31000))


@pytest.mark.parametrize(("auth", "has_key"), [({}, False), ({"keys_file": "keys"}, True)])
def test_the_ready_text_shows_a_key_where_one_is_asked_for(tmp_path, auth, has_key):
    from crossfill.child import Child
    from crossfill.up import _ready_text

    config = load(tmp_path, **two_models(listen={"port": 0}, auth=auth))
    plan = plan_of(config, tmp_path)
    children = [
        Child(spec, lambda _: None, backoff_max_s=1, clock=lambda: 0.0) for spec in (*plan.workers, plan.router)
    ]
    text = _ready_text(config, plan, children, 1.0, sees_all=True)
    assert ('-H "authorization: Bearer $CROSSFILL_API_KEY"' in text) == has_key


def test_up_ends_at_once_when_a_named_file_cannot_be_used(tmp_path):
    from rich.console import Console

    from crossfill.up import up

    config = load(tmp_path, **two_models(auth={"keys_file": "none"}))
    with pytest.raises(ConfigError, match="none: cannot be read"):
        up(config, state_dir=tmp_path / "var", models_root=tmp_path, console=Console())
    assert not (tmp_path / "var").exists()
