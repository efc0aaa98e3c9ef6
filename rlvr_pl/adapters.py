"""Adapters of the package peft (LoRA and its relatives) inside a policy's own model.

peft puts its layers into the transformers model in place, so the model keeps its class and its names. Three things
follow. The start policy of a run is the same model with the adapter off. A plain policy is the model with the adapter
merged, in FP32: what an adapter changes is mostly smaller than the rounding of BF16 weights. And log-probs are computed
from the output head's own matrix, so nothing may adapt the head.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_pl.errors import UserError
from rlvr_pl.text_file import read_json

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

CONFIG_FILE = "adapter_config.json"


def attach(model: PreTrainedModel, settings: Mapping[str, Any]) -> Any:
    """Put a fresh adapter into `model`; only its weights ask for gradients from then on.

    Args:
        model: changed in place.
        settings: fields of peft's ``LoraConfig``, or of another configuration class named by ``peft_type`` (``LOHA``,
            ``OFT``, ...). ``target_modules`` is ``all-linear`` unless given.

    Returns:
        The ``peft.PeftModel`` around `model`.

    Raises UserError for an unknown type or field, dropout (two passes over the same tokens must agree), virtual tokens,
    and an adapter on the output head.
    """
    peft = _peft()
    head = model.get_output_embeddings()
    config = _config(peft, settings)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # about what peft asks of transformers
            adapter = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except (ValueError, TypeError) as error:
        raise UserError(f"policy.peft: {' '.join(str(error).split())[:300]}") from None
    if model.get_output_embeddings() is not head:
        raise UserError("policy.peft: it adapts the output head, of whose matrix log-probs are made; leave it out")
    return adapter


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError("policy.peft: adapters need the package peft: pip install 'rlvr-pl[peft]'") from None
    return peft


def _config(peft: Any, settings: Mapping[str, Any]) -> Any:
    fields = dict(settings)
    kind = str(fields.pop("peft_type", "LORA"))
    known = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING
    cls = {str(getattr(key, "value", key)): value for key, value in known.items()}.get(kind)
    if cls is None:
        raise UserError(f"policy.peft: peft has no peft_type {kind!r}")
    if issubclass(cls, peft.PromptLearningConfig):
        raise UserError(f"policy.peft: peft_type {kind} adds virtual tokens, which are in no rollout; use an adapter")
    if unknown := sorted(set(fields) - set(cls.__dataclass_fields__)):
        raise UserError(f"policy.peft: {cls.__name__} has no field {', '.join(unknown)}")
    if wet := [name for name, value in fields.items() if "dropout" in name and value]:
        raise UserError(
            f"policy.peft.{wet[0]} is {fields[wet[0]]!r}: it must be 0: two passes over the same tokens have to agree"
        )
    for name, value in fields.items():
        usual = cls.__dataclass_fields__[name].default
        if type(usual) in (int, float) and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise UserError(f"policy.peft.{name} is {value!r}: it must be a number; {cls.__name__}'s own is {usual}")
    if "target_modules" in cls.__dataclass_fields__:
        fields.setdefault("target_modules", "all-linear")
    try:
        return cls(task_type="CAUSAL_LM", **fields)
    except (ValueError, TypeError) as error:
        raise UserError(f"policy.peft: {' '.join(str(error).split())[:300]}") from None


def computing(policy: Any) -> AbstractContextManager[Any]:
    """Inside, the model computes this policy: with the adapter off for a start policy that shares its model."""
    return policy.adapter.disable_adapter() if getattr(policy, "adapter_off", False) else nullcontext()


# ---- layers ----------------------------------------------------------------------------------------------------------


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer of peft around one of the model's own."""
    return hasattr(module, "get_base_layer") and hasattr(module, "merge")


def is_replaced(module: nn.Module) -> bool:
    """Whether a module holds a copy that is trained in its place (peft's ``modules_to_save`` and trainable tokens)."""
    return type(module).__module__.startswith("peft.") and hasattr(module, "original_module")


def base(module: Any) -> Any:
    """The model's own layer behind an adapted one; any other module itself."""
    return module.get_base_layer() if is_adapted(module) else module


def plain(module: Any) -> Any:
    """A layer without adapter that computes what `module` does now: its own base while the adapter is off, else a copy
    in FP32 with the adapter merged. A module that is not adapted is returned as it is."""
    if not is_adapted(module):
        return module
    if module.disable_adapters:
        return module.get_base_layer()
    merged = copy.deepcopy(module).float()
    merged.merge()
    return merged.get_base_layer()


# ---- folders ---------------------------------------------------------------------------------------------------------


def merged_model(adapter: Any) -> PreTrainedModel:
    """A plain transformers model in FP32 that computes what the adapted one does now; takes the memory of a copy."""
    return copy.deepcopy(adapter).float().merge_and_unload()


def save_adapter(adapter: Any, folder: Path, base_name: str) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` beside the generation config."""
    adapter.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's, a form to fill in
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": base_name}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    adapter.get_base_model().generation_config.save_pretrained(folder)


def base_of_folder(folder: Path) -> str:
    """The name of the policy that an adapter folder adapts."""
    path = folder / CONFIG_FILE
    content = read_json(path, byte_order_mark=False)
    name = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if not isinstance(name, str) or not name:
        raise UserError(f"{path}: base_model_name_or_path is {name!r}; it must name the adapted model")
    return name


def merge_folder(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """`model` in FP32 with the adapter of a folder merged into it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        return _peft().PeftModel.from_pretrained(model.float(), str(folder)).merge_and_unload()
