"""`crossfill route`: the service's own decision, from a file alone."""

import io
import json
import sys

import pytest

from crossfill.cli import main
from router.decision.policy import replay

STACK = """\
models:
  - {name: small, source: tiny-llama}
  - {name: middle, source: tiny-llama}
  - {name: large, urls: ["http://gpu:1"], cost: {input: 1, output: 2}}
routing: {ladder: [small, middle, large], tau: [0.1, 0.2]}
"""
ROUTER = """\
models:
  - {name: small, workers: ["http://a:1"]}
  - {name: large, workers: ["http://b:1"]}
routing: {ladder: [small, large]}
"""
HARD = "Prove that the square root of 2 is irrational, step by step."


@pytest.fixture
def route(tmp_path, monkeypatch, capsys):
    """`crossfill route TEXT …`: exit status, standard output and standard error."""

    def command(text, *arguments, config=ROUTER, stdin=""):
        path = tmp_path / "config.yaml"
        path.write_text(config)
        monkeypatch.setattr(sys, "argv", ["crossfill", "route", text, "--config", str(path), *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return command


@pytest.mark.parametrize(("config", "ladder"), [(ROUTER, 2), (STACK, 3)], ids=["router", "stack"])
def test_json_is_a_decision_that_replays_with_all_models_usable(route, config, ladder):
    status, out, err = route(HARD, "--json", "--request-id", "r-1", config=config)
    assert status == 0, err
    decision = json.loads(out)
    assert (decision["model"], decision["reason"], decision["request_id"]) == ("large", "threshold_large", "r-1")
    assert len(decision["ladder"]) == ladder
    assert "unavailable" not in decision
    assert replay(decision).to_json() == decision


def test_text_comes_from_standard_input_and_a_system_turn_counts(route):
    options = ("--json", "--request-id", "r")
    typed = json.loads(route("-", *options, stdin=HARD)[1])
    argument = json.loads(route(HARD, *options)[1])
    assert typed == argument
    with_system = json.loads(route(HARD, *options, "--system", "Be brief. " * 50)[1])
    assert with_system["features"]["context_words"] > 0 == argument["features"]["context_words"]


def test_table_shows_every_rung_and_the_terms_that_apply(route):
    shown = route("hi", "--request-id", "req_a", config=STACK)[1]
    for word in ("threshold_small", "request id", "req_", "quality", "noise", "expected cost", "small", "middle"):
        assert word in shown
    assert "expected cost" not in route("hi")[1]


def test_explicit_model_has_no_ladder(route):
    shown = route("hi", "--model", "large")[1]
    assert "explicit" in shown
    assert "noise" not in shown


@pytest.mark.parametrize(
    ("config", "arguments", "status", "message"),
    [
        (ROUTER, ("--model", "huge"), 2, "does not exist here"),
        (ROUTER, ("--model", ""), 2, "model"),
        (ROUTER, ("--request-id", "é"), 2, "takes 1 to 128 letters, digits and . _ : -"),
        (ROUTER, ("--request-id", "two words"), 2, "takes 1 to 128 letters, digits and . _ : -"),
        (ROUTER, ("--request-id", ""), 2, "takes 1 to 128 letters, digits and . _ : -"),
        ("a: !!int x\n", (), 1, "not valid YAML"),
        (ROUTER.replace("routing", "ruoting"), (), 1, "did you mean 'routing'?"),
        (STACK.replace("source", "sauce"), (), 1, "did you mean 'models.0.source'?"),
        ("models: [\n", (), 1, "not valid YAML"),
        ("[]", (), 1, "expected a mapping"),
        (
            ROUTER.replace("}\n", "}\n", 1).replace("large]}", "large], scorer: {kind: learned, path: none.json}}"),
            (),
            1,
            "none.json: cannot be read",
        ),
    ],
    ids=[
        "model",
        "no-model",
        "request-id",
        "spaced-id",
        "no-id",
        "tag",
        "router-key",
        "stack-key",
        "yaml",
        "list",
        "scorer",
    ],
)
def test_mistake_is_told(route, config, arguments, status, message):
    ended, _, err = route("hi", *arguments, config=config)
    assert ended == status
    assert message in " ".join(err.split())
    # With status 2 the usage is shown as well.
    assert len(err.strip().splitlines()) == 1 or status == 2
