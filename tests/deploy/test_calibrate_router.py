"""Fitting the learned scorer: on data whose truth is known, and end to end on a sample of real answers."""

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from statistics import NormalDist, fmean

import numpy as np
import pytest
import yaml

from crossfill.cli import main
from crossfill.errors import CalibrationError
from crossfill.router_calibration import metrics
from crossfill.router_calibration.artifact import artifact_of
from crossfill.router_calibration.calibrate import Wanted, calibrate
from crossfill.router_calibration.data import read_scored_prompts, split
from crossfill.router_calibration.threshold import expected_choice, solve_tau
from router.config import LearnedScorerConfig, LimitsConfig, RouterConfig, RoutingConfig
from router.decision.decider import Decider, build_scorer
from router.decision.policy import Rule, Scores, decide_routed
from router.request.generation import parse_chat

SAMPLE = Path(__file__).parent.parent / "data" / "router_scores_gsm8k_200.jsonl"
FIELDS = {"small": "small_correct", "large": "large_correct"}


def silent(stage, done, total):
    pass


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def known_truth(tmp_path_factory):
    """800 prompts whose length decides, with known chances, whether `small` is right; `large` is right 9 in 10."""
    generator = np.random.default_rng(7)
    lines = []
    for number in range(800):
        words = int(generator.integers(5, 80))
        chance = 1 / (1 + math.exp((words - 40) / 8))
        scores = {"small": bool(generator.random() < chance), "large": bool(generator.random() < 0.9)}
        lines.append({"prompt": f"number {number}: " + "word " * words, "scores": scores})
    return write(tmp_path_factory.mktemp("truth") / "known.jsonl", *lines)


@pytest.fixture(scope="module")
def calibrated(known_truth):
    return calibrate(read_scored_prompts(known_truth, {}, ()), Wanted(), silent)


def test_scorer_finds_what_decides_and_says_how_sure_it_is(calibrated):
    small, large = calibrated.models
    assert small.auc > 0.9
    assert abs(large.auc - 0.5) < 0.12
    assert small.calibration.error < 3 * small.calibration.error_by_chance
    assert calibrated.routing.apgr.interval.low > 0.6
    assert calibrated.routing.cpt50.value < 0.4
    assert calibrated.routing.recovered.value > calibrated.routing.large_share.value


def test_scores_that_do_not_depend_on_the_prompt_are_told_from_random_routing_by_nothing(known_truth, tmp_path):
    lines = [json.loads(line) for line in known_truth.read_text().splitlines()]
    scores = [lines[row]["scores"] for row in np.random.default_rng(0).permutation(len(lines))]
    shuffled = [{**line, "scores": score} for line, score in zip(lines, scores, strict=True)]
    result = calibrate(read_scored_prompts(write(tmp_path / "x.jsonl", *shuffled), {}, ()), Wanted(), silent)
    assert result.routing.apgr.interval.low < 0.5 < result.routing.apgr.interval.high


@pytest.mark.parametrize("wanted", [0.3, 0.6])
def test_solved_tau_gives_the_wanted_share_on_queries_that_were_not_used(known_truth, wanted):
    data = read_scored_prompts(known_truth, {}, ())
    results = [calibrate(data, Wanted(target_large_share=wanted, seed=seed), silent).routing for seed in range(4)]
    assert fmean(routing.large_share.value for routing in results) == pytest.approx(wanted, abs=0.03)
    assert all(routing.shares[-1] == pytest.approx(routing.large_share.value) for routing in results)
    assert all(sum(routing.shares) == pytest.approx(1) for routing in results)


def test_same_seed_gives_the_same_result_and_another_seed_another_split(known_truth):
    data = read_scored_prompts(known_truth, {}, ())
    first, again, other = (calibrate(data, Wanted(seed=seed), silent) for seed in (1, 1, 2))
    assert artifact_of(first, {}) == artifact_of(again, {})
    assert first.held_out.prompts != other.held_out.prompts
    training, held_out = split(data.prompts, 0.3, 1)
    assert set(training.prompts) | set(held_out.prompts) == set(data.prompts.prompts)
    assert not set(training.prompts) & set(held_out.prompts)


@pytest.mark.parametrize("sigma", [0.01, 0.1, 0.5])
def test_expected_choice_of_two_is_the_closed_form(sigma):
    quality = np.random.default_rng(0).random((20, 2))
    expected = [NormalDist().cdf((large - small - 0.2) / (sigma * math.sqrt(2))) for small, large in quality]
    assert expected_choice(quality, 0.2, sigma)[:, 1] == pytest.approx(expected, abs=1e-12)


def test_expected_choice_is_what_the_policy_does():
    quality = {"a": 0.4, "b": 0.6, "c": 0.75}
    ladder = tuple(quality)
    chosen = [
        decide_routed(f"id-{number}", "auto", ladder, Scores(quality, "t"), Rule(0.15, 0.2)).model
        for number in range(8000)
    ]
    expected = expected_choice(np.array([list(quality.values())]), 0.15, 0.2)[0]
    assert [chosen.count(name) / 8000 for name in ladder] == pytest.approx(expected, abs=0.02)
    sharp = expected_choice(np.array([[0.5, 0.75], [0.5, 0.76]]), 0.25, 0.0)
    assert sharp.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("sigma", [0.0, 0.1])
@pytest.mark.parametrize("models", [2, 4])
def test_solve_tau_meets_any_share(sigma, models):
    quality = np.random.default_rng(3).random((1000, models))
    for share in (0.05, 0.3, 0.9):
        tau = solve_tau(quality, share, sigma)
        assert expected_choice(quality, tau, sigma)[:, -1].mean() == pytest.approx(share, abs=2e-3)


def test_routing_figures_of_a_case_done_by_hand():
    weak, strong = np.array([0.0, 1, 0, 1]), np.array([1.0, 1, 1, 0])
    curve = metrics.quality_curve(np.array([4.0, 3, 2, 1]), weak, strong)
    assert curve.shares == (0, 0.25, 0.5, 0.75, 1)
    assert curve.recovered.tolist() == [0, 1, 1, 2, 1]
    assert curve.apgr == pytest.approx((0.5 + 1 + 1.5 + 1.5) / 4)
    assert curve.share_for(0.5) == pytest.approx(0.125)
    assert curve.share_for(1) == 0.25


def test_scorer_that_knows_nothing_is_exactly_random_routing():
    weak, strong = np.array([0.0, 1, 0, 0, 1]), np.array([1.0, 1, 0, 1, 1])
    curve = metrics.quality_curve(np.zeros(5), weak, strong)
    assert curve.apgr == 0.5
    assert curve.share_for(0.8) == pytest.approx(0.8)


def test_no_gap_is_no_figure():
    same = np.array([1.0, 0, 1])
    curve = metrics.quality_curve(np.array([3.0, 2, 1]), same, same)
    assert (curve.apgr, curve.share_for(0.5), curve.recovered_at(0.5)) == (None, None, None)
    assert metrics.auc(np.array([0.1, 0.2]), np.array([1.0, 1.0])) is None


def test_model_that_is_always_right_can_be_fitted(tmp_path):
    lines = [{"prompt": f"p {n}", "scores": {"a": n % 2, "b": True}} for n in range(200)]
    result = calibrate(read_scored_prompts(write(tmp_path / "x.jsonl", *lines), {}, ()), Wanted(), silent)
    assert result.models[1].mean_predicted > 0.97
    assert result.models[1].auc is None


def test_fractions_and_repeated_prompts_are_averaged(tmp_path):
    lines = [{"prompt": "p", "scores": {"a": 0.5, "b": True}}, {"prompt": "p", "scores": {"a": 0, "b": False}}, ""]
    read = read_scored_prompts(write(tmp_path / "x.jsonl", *lines), {}, ("b", "a"))
    assert (read.lines, read.prompts.prompts, read.prompts.ladder) == (2, ("p",), ("b", "a"))
    assert read.prompts.scores.tolist() == [[0.5, 0.25]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{nope", "not JSON"),
        ("[1]", "not a JSON object"),
        ({"scores": {"a": 1, "b": 1}}, "prompt: must be a text"),
        ({"prompt": " ", "scores": {"a": 1, "b": 1}}, "prompt: must be a text"),
        ({"prompt": "x"}, "scores: must be an object"),
        ({"prompt": "x", "scores": {"a": 1}}, "no score for the model 'b'"),
        ({"prompt": "x", "scores": {"a": 1, "b": 2}}, "score of 'b': must be true, false or in [0, 1], not 2"),
        ({"prompt": "x", "scores": {"a": 1, "b": "1"}}, "score of 'b': must be true, false or in [0, 1], not '1'"),
        (
            f'{{"prompt": "x", "scores": {{"a": 1, "b": {"9" * 400}}}}}',
            "score of 'b': must be true, false or in [0, 1], not 9",
        ),
        (f'{{"prompt": "x", "scores": {{"a": 1, "b": {"9" * 5000}}}}}', "not JSON: "),
        (
            '{"prompt": "x", "scores": {"a": 1, "b": -Infinity}}',
            "score of 'b': must be true, false or in [0, 1], not -inf",
        ),
        ('{"prompt": "x", "scores": {"a": 1, "b": NaN}}', "score of 'b': must be true, false or in [0, 1], not nan"),
    ],
)
def test_bad_line_names_file_and_line(tmp_path, line, message):
    path = write(tmp_path / "x.jsonl", {"prompt": "good", "scores": {"a": 1, "b": 0}}, line)
    with pytest.raises(CalibrationError) as caught:
        read_scored_prompts(path, {}, ())
    assert str(caught.value).startswith(f"{path}:2: {message}")
    assert "\n" not in str(caught.value)


class Outside(HTMLParser):
    """Collects what a page would load from elsewhere, and the ids in it."""

    def __init__(self):
        super().__init__()
        self.loads, self.ids = [], []

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in {"src", "href", "xlink:href"} and not value.startswith("#"):
                self.loads.append(value)
            if name == "id":
                self.ids.append(value)
        if tag in {"script", "link", "img", "iframe"}:
            self.loads.append(tag)


@pytest.fixture
def run(monkeypatch, capsys):
    """`crossfill calibrate router …`: exit status, standard output and standard error."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["crossfill", "calibrate", "router", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return command


def test_command_fits_real_answers_and_the_router_decides_by_the_file(tmp_path, run):
    scorer, report = tmp_path / "out" / "scorer.json", tmp_path / "report.html"
    scores = [word for name, field in FIELDS.items() for word in ("--score", f"{name}={field}")]
    status, out, err = run("--data", SAMPLE, *scores, "--model", "large=gpt-4", "--output", scorer, "--report", report)
    assert status == 0, err
    assert all(word in out for word in ("APGR", "CPT(50 %)", "CPT(80 %)", "PGR at tau", "ECE", "Brier"))

    saved = json.loads(scorer.read_text())
    assert list(saved["models"]) == ["small", "gpt-4"]
    assert (saved["training"]["prompts"], saved["training"]["held_out"]) == (140, 60)
    assert saved["metrics"]["apgr"]["interval_95"]
    printed = yaml.safe_load(out.split("\n\n")[-1])["routing"]
    assert printed["tau"] == saved["routing"]["tau"]

    models = [{"name": name, "workers": ["http://127.0.0.1:1"]} for name in printed["ladder"]]
    config = RouterConfig.model_validate({"models": models, "routing": printed})
    decider = Decider(config, build_scorer(config.routing))
    prompts = [json.loads(line)["prompt"] for line in SAMPLE.read_text().splitlines()]
    chosen = []
    for number, prompt in enumerate(prompts):
        chat = parse_chat({"model": "auto", "messages": [{"role": "user", "content": prompt}]}, LimitsConfig())
        decision = decider.prepare(chat, f"id-{number}")(())
        assert decision.scorer == "learned"
        assert all(0 <= quality <= 1 for quality in decision.scores.values())
        chosen.append(decision.model)
    assert chosen.count("gpt-4") / len(chosen) == pytest.approx(0.3, abs=0.1)

    page = Outside()
    page.feed(report.read_text())
    assert page.loads == []
    assert len(page.ids) == len(set(page.ids))
    text = report.read_text()
    assert text.count("<svg") == 3
    assert set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    assert {a or b for a, b in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)} <= set(page.ids)


def test_artifact_of_three_models_has_one_tau_for_all_neighbours(tmp_path):
    generator = np.random.default_rng(1)
    lines = []
    for number in range(400):
        words = int(generator.integers(5, 200))
        chances = (1 - words / 200, 1 - words / 400, 0.95)
        scores = {name: bool(generator.random() < chance) for name, chance in zip("abc", chances, strict=True)}
        lines.append({"prompt": f"{number} " + "word " * words, "scores": scores})
    result = calibrate(read_scored_prompts(write(tmp_path / "x.jsonl", *lines), {}, ()), Wanted(), silent)
    assert result.routing.shares[2] == pytest.approx(0.3, abs=0.06)
    path = tmp_path / "scorer.json"
    path.write_text(artifact_of(result, {}).model_dump_json())
    routing = RoutingConfig(ladder=("a", "b", "c"), tau=result.tau, scorer=LearnedScorerConfig(path=path))
    assert build_scorer(routing)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--data", "/no/such.jsonl"), 1, "/no/such.jsonl: cannot be read"),
        (("--data", SAMPLE), 1, ":1: scores: must be an object"),
        (("--data", SAMPLE, "--score", "small"), 2, "NAME=VALUE"),
        (("--data", SAMPLE, "--score", "small=small_correct"), 1, "two models or more; there are 1"),
        (
            ("--data", SAMPLE, "--score", "a=small_correct", "--score", "b=large_correct", "--model", "c=x"),
            2,
            "is not in the ladder",
        ),
        (
            ("--data", SAMPLE, "--score", "a=small_correct", "--score", "b=large_correct", "--holdout", "0.05"),
            1,
            "10 held out",
        ),
    ],
    ids=["no-file", "no-scores", "pair", "one-model", "unknown-name", "too-few"],
)
def test_mistake_is_told(run, arguments, status, message):
    ended, _, err = run(*arguments)
    assert ended == status, err
    assert message in err
    # With status 2 the usage is shown as well.
    assert len(err.strip().splitlines()) == 1 or status == 2


SCORES = ("--score", "small=small_correct", "--score", "large=large_correct")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        (option, value)
        for option in ("--sigma", "--holdout", "--target-large-share")
        for value in ("nan", "inf", "1e308")
    ],
)
def test_number_that_means_nothing_is_refused(run, tmp_path, option, value):
    output = tmp_path / "scorer.json"
    ended, _, err = run("--data", SAMPLE, *SCORES, option, value, "--output", output)
    assert (ended, option in err, output.exists()) == (2, True, False), err


def test_largest_noise_gives_a_tau(run, tmp_path):
    ended, out, err = run("--data", SAMPLE, *SCORES, "--sigma", 10, "--output", tmp_path / "scorer.json")
    assert ended == 0, err
    assert math.isfinite(yaml.safe_load(out.split("\n\n")[-1])["routing"]["tau"])


@pytest.fixture
def one_file(tmp_path, monkeypatch):
    """The folder of `data.jsonl`, which is also `link`, `hard` and `sub/../data.jsonl`; nothing in it is readable."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "data.jsonl").write_text("not read")
    (tmp_path / "link").symlink_to("data.jsonl")
    (tmp_path / "hard").hardlink_to("data.jsonl")
    (tmp_path / "folder").symlink_to("sub")
    return tmp_path


@pytest.mark.parametrize(
    ("output", "report", "hint"),
    [
        ("data.jsonl", "r.html", "--output"),
        ("link", "r.html", "--output"),
        ("hard", "r.html", "--output"),
        ("sub/../data.jsonl", "r.html", "--output"),
        ("scorer.json", "link", "--report"),
        ("scorer.json", "./scorer.json", "--report"),
        ("sub/new", "folder/new", "--report"),
    ],
)
def test_no_file_is_overwritten_by_another(run, one_file, output, report, hint):
    ended, _, err = run("--data", "data.jsonl", "--output", output, "--report", report)
    assert ended == 2
    assert f"Invalid value for {hint}" in err
    assert (one_file / "data.jsonl").read_text() == "not read"
    assert not (one_file / "scorer.json").exists()
    # Different files come as far as being read.
    ended, _, err = run("--data", "data.jsonl", "--output", "scorer.json", "--report", "r.html")
    assert (ended, "data.jsonl:1: not JSON" in err) == (1, True)


@pytest.mark.parametrize("name", ["auto", "a b", "x" * 201, "-a", "a\nb"])
def test_name_that_the_router_refuses_is_refused_before_the_fit(run, tmp_path, name):
    output = tmp_path / "scorer.json"
    ended, out, err = run("--data", SAMPLE, *SCORES, "--model", f"small={name}", "--output", output)
    assert (ended, out, output.exists()) == (2, "", False)
    assert "Invalid value for --model" in err


@pytest.mark.parametrize("name", ["", "auto"])
def test_name_in_the_data_that_the_router_refuses_needs_another(run, tmp_path, name):
    data = write(tmp_path / "x.jsonl", *[{"prompt": f"p {n}", "scores": {name: n % 2, "b": 1}} for n in range(200)])
    output = tmp_path / "scorer.json"
    ended, _, err = run("--data", data, "--output", output)
    assert (ended, "Invalid value for --model" in err, output.exists()) == (2, True, False), err


def test_name_that_the_router_refuses_may_be_given_another(run, tmp_path):
    data = write(tmp_path / "x.jsonl", *[{"prompt": f"p {n}", "scores": {"auto": n % 2, "b": 1}} for n in range(200)])
    ended, _, err = run("--data", data, "--model", "auto=a", "--output", tmp_path / "scorer.json")
    assert ended == 0, err
