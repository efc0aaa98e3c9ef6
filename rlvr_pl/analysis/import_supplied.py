"""Convert a .pth checkpoint of the supplied recipe (package reasoning-from-scratch) into a policy folder.

Reads the state dict of its Qwen3Model without running pickled code, takes every size from the shapes, and writes an
untied Hugging Face Qwen3 whose logits are the same. What no shape tells comes from --config-from, or else is that of
Qwen3-0.6B: rotary base 1,000,000, context 40,960.

That model keeps its normalisation scales in FP32 while all else is BF16. In a BF16 folder they are rounded, and the
report counts how many change; --dtype float32 keeps every value.

JSON keys: folder, architecture, parameters, dtype, tokens, max_context, eos_ids, sha256, source, rounded, reply
(greedy, to "What is 2+2?").
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_pl.analysis.command import Result
from rlvr_pl.analysis.imported import add_folder_arguments, check_folder, write
from rlvr_pl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

OUTER = {
    "tok_emb.weight": "model.embed_tokens.weight",
    "final_norm.scale": "model.norm.weight",
    "out_head.weight": "lm_head.weight",
}
INNER = {
    "att.W_query.weight": "self_attn.q_proj.weight",
    "att.W_key.weight": "self_attn.k_proj.weight",
    "att.W_value.weight": "self_attn.v_proj.weight",
    "att.out_proj.weight": "self_attn.o_proj.weight",
    "att.q_norm.scale": "self_attn.q_norm.weight",
    "att.k_norm.scale": "self_attn.k_norm.weight",
    "ff.fc1.weight": "mlp.gate_proj.weight",
    "ff.fc2.weight": "mlp.up_proj.weight",
    "ff.fc3.weight": "mlp.down_proj.weight",
    "norm1.scale": "input_layernorm.weight",
    "norm2.scale": "post_attention_layernorm.weight",
}
_BLOCK = re.compile(r"trf_blocks\.(\d+)\.(.+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="the .pth file")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="PATH", help="folder of a tokenizer, or a tokenizer*.json file"
    )
    parser.add_argument("--eos", default="<|endoftext|>", help="end token of a tokenizer file (default: %(default)s)")
    parser.add_argument("--config-from", type=Path, metavar="DIR", help="model folder with context and rotary base")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="of the stored weights (default: the file's)")
    add_folder_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    check_folder(args)
    import torch

    from rlvr_pl.policy import make_policy
    from rlvr_pl.prompts import make_template

    state = read_state(args.checkpoint)
    tokenizer = _tokenizer(args.tokenizer, args.eos)
    config = _config(state, args.config_from, args.checkpoint)
    dtype = getattr(torch, args.dtype) if args.dtype else state["model.embed_tokens.weight"].dtype
    stored = {name: tensor.to(dtype) for name, tensor in state.items()}
    rounded = sum(int((stored[name].to(tensor.dtype) != tensor).sum()) for name, tensor in state.items())
    model = build(stored, config, args.checkpoint)
    policy = make_policy(model, tokenizer, make_template("supplied", tokenizer), name=str(args.checkpoint))
    notes = [f"{rounded} values were rounded to {str(dtype).removeprefix('torch.')}."] if rounded else []
    return write(policy, args, {"source": str(args.checkpoint), "rounded": rounded}, notes)


def read_state(path: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors under Hugging Face names. UserError when it is no checkpoint of that model."""
    import torch

    from rlvr_pl.policy_folder import readable

    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with readable(f"{path}: cannot be read as a checkpoint of tensors"):
        state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping) or not all(isinstance(x, torch.Tensor) for x in state.values()):
        raise UserError(f"{path}: must hold a state dict of tensors, as torch.save(model.state_dict(), ...) writes it")
    named: dict[str, Tensor] = {}
    for key, tensor in state.items():
        name = _hugging_face_name(str(key).removeprefix("_orig_mod."))  # the prefix is that of torch.compile
        if name is None:
            raise UserError(f"{path}: no Qwen3Model of reasoning-from-scratch: it knows no {str(key)[:80]!r}")
        named[name] = tensor
    return named


def build(state: dict[str, Tensor], config: Any, path: Path) -> Any:
    """A Qwen3ForCausalLM of that configuration with these weights. UserError when they do not fit."""
    import torch
    from transformers import Qwen3ForCausalLM

    from rlvr_pl.policy_folder import readable

    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    with readable(f"{path}: the weights do not fit"):
        model.load_state_dict(state, strict=True, assign=True)
    return model


def _hugging_face_name(name: str) -> str | None:
    if name in OUTER:
        return OUTER[name]
    block = _BLOCK.fullmatch(name)
    if block is None or block[2] not in INNER:
        return None
    return f"model.layers.{block[1]}.{INNER[block[2]]}"


def _config(state: dict[str, Tensor], folder: Path | None, path: Path) -> Any:
    from transformers import AutoConfig, Qwen3Config

    from rlvr_pl.policy_folder import readable

    layer = "model.layers.0."
    try:
        vocabulary, hidden = state["model.embed_tokens.weight"].shape
        head = len(state[layer + "self_attn.q_norm.weight"])
        heads, kv_heads = (len(state[f"{layer}self_attn.{x}_proj.weight"]) // head for x in "qk")
        inner = len(state[layer + "mlp.gate_proj.weight"])
    except (KeyError, ValueError) as error:
        raise UserError(f"{path}: no Qwen3Model of reasoning-from-scratch: lacks {error}") from None
    context, theta = 40_960, 1_000_000.0
    if folder is not None:
        with readable(f"--config-from {folder}: no usable config.json"):
            other: Any = AutoConfig.from_pretrained(folder)
            context, theta = other.max_position_embeddings, other.rope_parameters["rope_theta"]
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=1 + max(int(name.split(".")[2]) for name in state if name.startswith("model.layers.")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )


def _tokenizer(path: Path, eos: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    from rlvr_pl.policy_folder import load_tokenizer, readable

    if not path.is_file():
        return load_tokenizer(path)
    with readable(f"{path}: cannot read the tokenizer"):
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    if eos not in tokenizer.get_vocab():
        raise UserError(f"{path}: has no token {eos!r}; name the end token with --eos")
    tokenizer.eos_token = tokenizer.pad_token = eos
    return tokenizer
