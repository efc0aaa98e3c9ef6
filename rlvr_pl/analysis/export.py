"""Make a folder to publish from a run: a policy that transformers and vLLM load, with a model card of the run's facts.

The policy is the run's final snapshot, or the one of --snapshot. An adapter stays one unless --merge makes plain
weights of it (FP32, unless --dtype says otherwise). With --push-to the folder is uploaded to the Hugging Face hub;
without it, or where HF_HUB_OFFLINE is set, nothing leaves the machine.

JSON keys: folder, card, snapshot, merged, dtype, pushed_to (null: nothing was uploaded).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

from rlvr_pl.analysis.command import Result
from rlvr_pl.errors import RunFailure, UserError
from rlvr_pl.records import RunFolder, atomic_write_text, check_place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write (default: RUN/export)")
    parser.add_argument("--snapshot", default="final", help="which of RUN/snapshots (default: final)")
    parser.add_argument("--merge", action="store_true", help="merge an adapter into the weights of its model")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="of the weights (default: as saved)"
    )
    parser.add_argument("--push-to", metavar="NAME", help="upload the folder to NAME or OWNER/NAME on the hub")
    parser.add_argument("--private", action="store_true", help="make the uploaded repository a private one")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --out")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else")


def run(args: argparse.Namespace) -> Result:
    from rlvr_pl.policy import load_policy
    from rlvr_pl.policy_folder import written

    folder = RunFolder(args.run)
    source, out = folder.snapshots / args.snapshot, args.out or folder.path / "export"
    if folder.read_json("run.json") is None:
        raise UserError(f"{args.run}: not a run folder (no run.json)")
    if not source.is_dir():
        there = ", ".join(sorted(p.name for p in folder.snapshots.glob("[!.]*"))) or "none"
        raise UserError(f"{args.run}: no snapshot {args.snapshot!r}; there are {there}")
    if args.push_to is not None and (not args.push_to.strip("/") or args.push_to.count("/") > 1):
        raise UserError(f"--push-to {args.push_to}: write NAME or OWNER/NAME")
    if out.exists() and not args.overwrite:
        raise UserError(f"--out {out}: exists; choose another folder or pass --overwrite")
    if out.exists() and not any((out / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise UserError(f"--overwrite: {out} is no model folder (no config.json); it will not be removed")
    adapter = (source / "adapter_config.json").exists()
    if args.dtype is not None and adapter and not args.merge:
        raise UserError("--dtype: an adapter has no weights of its own to cast; pass --merge too")
    check_place(out, "--out")
    facts = run_facts(folder)
    facts["form"] = "an adapter (peft)" if adapter and not args.merge else "full weights"
    with written(out) as partial:
        if (args.merge and adapter) or args.dtype:
            load_policy(source, dtype=args.dtype).save(partial)
        else:
            partial.mkdir()
            for path in source.iterdir():
                shutil.copy(path, partial)
        facts["dtype"] = dtype_of(partial)
        atomic_write_text(partial / "README.md", card(args.push_to or folder.path.name, facts))
    online = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("", "0", "false", "no", "off")
    pushed = push(out, args.push_to, args.private) if args.push_to is not None and online else None
    data = {
        "folder": str(out),
        "card": str(out / "README.md"),
        "snapshot": args.snapshot,
        "merged": adapter and args.merge,
        "dtype": facts["dtype"],
        "pushed_to": pushed,
    }
    notes = [f"{out}: {facts['form']}, {facts['dtype']}, with a model card in README.md"]
    if pushed is not None:
        notes.append(f"uploaded to {pushed}")
    elif args.push_to is not None:
        notes.append(f"HF_HUB_OFFLINE is set, so nothing was uploaded; later: hf upload {args.push_to} {out}")
    return Result(data, notes=notes)


def run_facts(folder: RunFolder) -> dict[str, Any]:
    """What a model card says of a run, from its folder."""
    import yaml

    from rlvr_pl.analysis.distill import compare_items

    config = yaml.safe_load((folder.path / "config.yaml").read_text(encoding="utf-8"))
    items = sorted(folder.items.glob("val-*.jsonl"))
    return {
        "run": folder.read_json("run.json"),
        "cost": folder.read_json("cost.json") or {},
        "rule": folder.read_json("criterion.json"),
        "config": config,
        "validation": compare_items(items[0], items[-1]) if len(items) > 1 else None,
    }


def dtype_of(folder: Path) -> str:
    """The dtype of a saved folder's first tensor."""
    from safetensors import safe_open

    path = next(iter(sorted(folder.glob("*.safetensors"))))
    with safe_open(path, framework="np") as f:
        return str(f.get_slice(next(iter(f.keys()))).get_dtype())


def card(name: str, facts: dict[str, Any]) -> str:
    """The model card: front matter for the hub, then the run's facts."""
    run, config, cost = facts["run"], facts["config"], facts["cost"]
    start = str(run["start"])
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    front += ["tags: [rlvr, reinforcement-learning, rlvr-pl]"]
    front += [f"base_model: {start}"] if start.count("/") == 1 and not Path(start).exists() else []
    optimizer = config["optimizer"]
    rows = [
        ("start policy", f"`{start}`, weights {run['start_sha256'][:16]}"),
        ("objective", f"{run['objective']} `{json.dumps(config['objective'].get('init_args') or {})}`"),
        ("updates", f"{run['updates']} of {run['planned_updates']}"),
        ("rollouts", f"{config['model']['group_size']} a question, {cost.get('sampled_tokens', 0):,} tokens sampled"),
        ("sampling", f"temperature {config['model']['temperature']}, top-p {config['model']['top_p']}"),
        ("questions", f"`{json.dumps(config['data'])}`, order {run['order_sha256'][:16]}"),
        ("optimizer", f"{optimizer['class_path'].rpartition('.')[2]} `{json.dumps(optimizer.get('init_args') or {})}`"),
        ("FP32 masters", str(config["precision"]["master_weights"]).lower()),
        ("adapter", f"`{json.dumps(config['policy'].get('peft'))}`"),
        ("seed", str(run["seed"])),
        ("stop rule", rule_of(facts)),
        ("saved as", f"{facts['form']}, {facts['dtype']}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in run["versions"].items())),
    ]
    table = [
        "| fact | value |",
        "|---|---|",
        *(f"| {key} | {value.replace('|', chr(92) + '|')} |" for key, value in rows),
    ]
    return "\n".join([*front, "---", "", f"# {name}", "", *intro(facts), "", *table, "", *use(name), ""])


def intro(facts: dict[str, Any]) -> list[str]:
    lines = ["Trained by reinforcement learning with verifiable rewards, with rlvr-pl."]
    found = facts["validation"]
    if found is not None:
        lines += [
            "",
            f"Greedy accuracy on the run's {found['n']} held-out questions: {found['before']} before, {found['after']} "
            f"after: {found['delta_pp']:+.1f} pp, 95% interval [{found['ci_low']:+.1f}, {found['ci_high']:+.1f}] over "
            "items, paired, of one training seed. The same questions were watched during the run.",
        ]
    return lines


def rule_of(facts: dict[str, Any]) -> str:
    if facts["rule"] is None:
        return "none"
    ended = "it ended the run" if facts["run"]["stopped_by"] == "damage" else "it did not fire"
    return f"criterion {facts['rule']['sha256'][:16]}; {ended}"


def use(name: str) -> list[str]:
    """How to ask the policy: prompts must be those that it was trained with."""
    return [
        "```bash",
        f"rlvr-pl evaluate {name} --questions QUESTIONS --out items.jsonl",
        "```",
        "",
        "`prompt_template.json` holds the prompt it was trained with, `generation_config.json` every id that ends an",
        "answer.",
    ]


def push(folder: Path, name: str, private: bool) -> str:
    """Upload the folder and return the full name that it has there. Raises RunFailure, the folder kept, when the hub
    cannot be reached or refuses."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        full = api.create_repo(name, private=private, exist_ok=True).repo_id
        api.upload_folder(repo_id=full, folder_path=str(folder))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise RunFailure(f"{folder} is ready, but was not uploaded to {name}: {reason}") from error
    return full
