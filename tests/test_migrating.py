"""docs/migrating.md: its scripts are the ones that were run, and its configs give the same first update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlvr_pl.data.pools import load_questions
from rlvr_pl.grading import GradeRequest
from rlvr_pl.policy import load_policy
from rlvr_pl.settings import FitCLI
from rlvr_pl.types import Completion, Rollout, StopReason, build_batch
from rlvr_pl.update import update_once

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benchmarks" / "migrating"
PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
GOLDEN = json.loads((ROOT / "tests" / "golden" / "migrating.json").read_text(encoding="utf-8"))
# The bar of the page. FP32 sums of some 1,500 log-probs in two orders differ by 1,500 roundings of 6e-8 at worst: 9e-5
# of their absolute sum, and by a hundredth of that as a random walk.
BAR = 1e-4


@pytest.mark.parametrize("name", ["train_trl.py", "rewards.py", "trl.yaml", "train_supplied.py", "supplied.yaml"])
def test_the_page_shows_the_files_that_were_run(name):
    assert f"\n{(SCRIPTS / name).read_text(encoding='utf-8').rstrip()}\n```\n" in PAGE


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """Where the configs say that things are."""
    monkeypatch.chdir(tmp_path)
    load_policy("embedded:start").save("models/start")
    rows = [{"uid": q.uid, "prompt": q.problem, "answer": q.answer} for q in load_questions("embedded:train")[:200]]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text((SCRIPTS / "rewards.py").read_text())


def built(peer):
    """The module that the config builds, and the policy it names in FP32."""
    from rlvr_pl.records import RunFolder

    cli = FitCLI(["--config", str(SCRIPTS / f"{peer}.yaml")], lambda config, text: (RunFolder("r"), None))
    words = {name: cli.config.policy[name] for name in ("name", "untie_embeddings", "template")}
    return cli.model, cli.datamodule, load_policy(**words, dtype="float32")


@pytest.mark.parametrize("peer", ["trl", "supplied"])
def test_the_first_update_is_the_same(workplace, peer):
    if peer == "supplied":
        pytest.importorskip("reasoning_from_scratch", reason="the extra 'supplied' is not installed")
    golden = GOLDEN[peer]
    module, data, policy = built(peer)
    asked = {q.problem: q for q in data.schedule.questions}
    questions = [asked[prompt] for prompt in golden["prompts"]]
    cut = [ids[-1] not in policy.eos_ids for ids in golden["rollouts"]]
    texts = [policy.decode(ids) for ids in golden["rollouts"]]
    requests = [
        GradeRequest(text, q, policy.template.render(q), tuple(ids), c)
        for text, q, ids, c in zip(texts, questions, golden["rollouts"], cut)
    ]
    grades = module.grader.grade(requests, require_box=module.require_box)
    module.grader.close()
    assert [grade.reward for grade in grades] == golden["rewards"]
    rollouts = [
        Rollout(
            request.question.uid,
            i % module.group_size,
            policy.prompt_ids(request.question),
            Completion(request.token_ids, StopReason.LENGTH if request.truncated else StopReason.EOS),
            request.response,
            grade,
        )
        for i, (request, grade) in enumerate(zip(requests, grades))
    ]
    batch = build_batch(rollouts, module.group_size, update=1, cap=module.decoding.max_new_tokens)
    still = torch.optim.SGD(policy.model.parameters(), lr=0.0)
    weights = module.objective.token_weights(batch)
    done = update_once(policy, module.objective, batch, weights, still, temperature=module.logprob_temperature)
    assert done.loss == pytest.approx(golden["loss"], rel=BAR)
    assert done.grad_norm == pytest.approx(golden["grad_norm"], rel=BAR)
