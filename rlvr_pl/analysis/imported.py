"""What the import commands share: writing the converted policy, loading it again, and letting it speak."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.errors import UserError
from rlvr_pl.records import check_place
from rlvr_pl.types import Question

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy

PROBE = Question("probe", "What is 2+2?", "4")
REPLY_TOKENS = 24


def add_folder_arguments(parser: argparse.ArgumentParser) -> None:
    """``--out DIR``, ``--overwrite`` and ``--json``."""
    parser.add_argument("--out", dest="folder", type=Path, required=True, metavar="DIR", help="policy folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    add_output_arguments(parser, table=False)


def check_folder(args: argparse.Namespace) -> None:
    """Refuse a folder that exists before the work starts."""
    if args.folder.exists() and not args.overwrite:
        raise UserError(f"--out {args.folder}: exists; choose another folder or pass --overwrite")
    check_place(args.folder, "--out")


def write(policy: Policy, args: argparse.Namespace, facts: dict[str, Any], notes: list[str]) -> Result:
    """Save `policy`, load what was saved, and report it with a greedy reply as evidence that it speaks."""
    from rlvr_pl.policy import load_policy

    policy.save(args.folder, overwrite=args.overwrite)
    again = load_policy(args.folder)
    data = {
        "folder": str(args.folder),
        "architecture": type(again.model).__name__,
        "parameters": again.model.num_parameters(),
        "dtype": str(again.head.dtype).removeprefix("torch."),
        "tokens": again.head.shape[0],
        "max_context": again.max_context,
        "eos_ids": list(again.eos_ids),
        "sha256": again.sha256,
        **facts,
        "reply": _reply(again),
    }
    rows = [[key, value if isinstance(value, str) else repr(value)] for key, value in data.items()]
    return Result(data, [Table(f"Policy folder {args.folder}", ["", ""], rows)], notes)


def _reply(policy: Policy) -> str | None:
    """The greedy answer to "What is 2+2?", by transformers' own generation; None where the context is too small."""
    import torch

    prompt = policy.template.ids(PROBE)
    if len(prompt) + REPLY_TOKENS > policy.max_context:
        return None
    ids = torch.tensor([prompt])
    generate: Any = policy.model.generate
    out = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=REPLY_TOKENS, do_sample=False)
    return policy.decode(out[0, len(prompt) :].tolist())
