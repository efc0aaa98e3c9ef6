"""The policy: a Hugging Face causal language model, its tokenizer, its prompt template and its stop ids.

Weights are read and written as safetensors only. Dropout is off whatever the mode of the module: two passes over the
same tokens must agree, or probability ratios are not 1 on policy.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rlvr_pl import adapters
from rlvr_pl.errors import UserError
from rlvr_pl.model_weights import state_of, untie, weights_sha256
from rlvr_pl.policy_folder import check_files, find_folder, load_config, load_model, load_tokenizer, readable, written
from rlvr_pl.prompts import PromptTemplate, make_template, template_of_folder
from rlvr_pl.types import Question

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        with written(folder) as partial:
            self._save_weights(partial)
            self.tokenizer.save_pretrained(partial)
            self.template.to_folder(partial)

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
    config = load_config(folder, trust_remote_code)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    model = load_model(folder, config, dtype, attn_implementation, trust_remote_code)
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
