"""Study files: what is read, what is refused, how settings merge."""

from __future__ import annotations

import pytest

from rlvr_pl.config_file import read_config
from rlvr_pl.configs import FOLDER
from rlvr_pl.errors import UserError
from rlvr_pl.study.plan import find_study, flatten, merge, read_study

SHIPPED = sorted((FOLDER / "studies").glob("*.yaml"))
ARMS = ["supplied", "mask", "seqmean", "seqmean-clip0.1", "fp32", "fp32-low", "fork-raw", "fork-shuffled"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_studies_can_be_read_and_expect_something(path):
    study = read_study(path)
    assert study.expectations and study.about
    assert len(study.seeds) == 2


def test_the_stabilization_study_has_the_arms_of_the_paper():
    study = read_study(find_study("stabilization"))
    assert [arm.name for arm in study.arms] == ARMS
    assert all("collapsed" in e.row or "order" in e.row or "against" in e.row for e in study.expectations)
    lr = {arm.name: study.settings(arm)["optimizer"]["init_args"]["lr"] for arm in study.arms}
    assert lr["fp32"] == lr["supplied"] == pytest.approx(10 * lr["fp32-low"])


def test_a_study_by_path_or_by_name(tmp_path):
    assert find_study("stabilization").parent == FOLDER / "studies"
    (tmp_path / "mine.yaml").write_text("x")
    assert find_study("mine.yaml").read_text() == "x"
    with pytest.raises(UserError, match="shipped studies are matched-null"):
        find_study("nope")


def test_settings_merge_by_name_and_another_class_drops_old_arguments():
    base = {"objective": {"class_path": "GRPO", "init_args": {"scale": "std"}}, "model": {"a": 1, "b": 2}}
    over = {"objective": {"class_path": "ForkCredit", "init_args": {"credit": "raw"}}, "model": {"b": 3}}
    merged = merge(base, over)
    assert merged["objective"] == {"class_path": "ForkCredit", "init_args": {"credit": "raw"}}
    assert merged["model"] == {"a": 1, "b": 3}
    same = merge(base, {"objective": {"class_path": "GRPO", "init_args": {"ddof": 0}}})
    assert same["objective"]["init_args"] == {"scale": "std", "ddof": 0}
    assert base["model"] == {"a": 1, "b": 2}


def test_flatten_gives_dotted_names():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_start_order_and_panel_become_settings(study_file):
    study = read_study(study_file())
    settings = study.settings(study.arms[1])
    assert settings["policy"] == {"name": "embedded:start"}
    assert settings["data"]["init_args"] == {
        "train": "embedded:train",
        "questions_per_update": 2,
        "updates": 4,
        "validation": "embedded:drift",
    }
    assert settings["objective"]["init_args"] == {"mask_truncated": True}


def test_a_shipped_config_serves_as_base_by_its_name(tmp_path, study_file):
    given = {"start: embedded:start": "start: embedded:start\nbase: quickstart.yaml"}
    study = read_study(study_file(**given))
    shipped = read_config(FOLDER / "quickstart.yaml")
    assert study.config["model"]["temperature"] == shipped["model"]["temperature"]
    (tmp_path / "quickstart.yaml").write_text("model: {top_p: 0.25}\n")  # one beside the study comes first
    assert read_study(study_file(**given)).config["model"]["top_p"] == 0.25


def test_a_base_config_lies_beneath(tmp_path, study_file):
    (tmp_path / "base.yaml").write_text("data: {updates: 9, order_seed: 5}\nmodel: {top_p: 0.5, group_size: 2}\n")
    study = read_study(study_file(**{"start: embedded:start": "start: embedded:start\nbase: base.yaml"}))
    assert study.config["data"]["init_args"]["order_seed"] == 5
    assert study.config["data"]["init_args"]["updates"] == 4
    assert study.config["model"] == {"top_p": 0.5, "group_size": 4, "max_new_tokens": 24}


MISTAKES = {
    "seeds: [1, 2]": ("seeds: [1, 1]", "seeds: needs a list of distinct"),
    "  supplied: {}": ("  start: {}", "'start' is no name for an arm"),
    "  mask: ": ("  mask: {seed: 3}\n  other: ", "arms.mask.seed: is the same for all arms; say it under seeds"),
    "config:": ("config:\n  data: {updates: 5}", "config.data.updates: is the same for all arms; say it under order"),
    "criterion: {window: 2}": ("criterion: {window: 0}", "window=0"),
    "by: entropy": ("by: loss", "expectation 3: by is 'loss'"),
    "{arm: mask, collapsed: false}": ("{arm: msk, collapsed: false}", "expectation 2: no arm 'msk'"),
    "{arm: supplied, collapsed: true}": ("{arm: supplied, collapses: true}", "none of the forms"),
    "order: [mask, supplied]": ("order: [mask, mask]", "each once"),
    "collapsed: true": ("collapsed: 1", "must be true or false"),
    "start: embedded:start": ("starts: x", "starts: no such key"),
    "  mask: {objective": ("  mask: {commands: [fit], objective", "no settings beside it"),
    "  supplied: {}\n": ("  supplied: {}\n  supplied: {}\n", "'supplied' is already in line"),
    "panel: embedded:drift": ("panel: [", "not YAML"),
}


@pytest.mark.parametrize("old", MISTAKES)
def test_a_mistake_names_the_file_and_the_key(study_file, old):
    new, message = MISTAKES[old]
    with pytest.raises(UserError) as error:
        read_study(study_file(**{old: new}))
    assert "small.yaml" in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)
