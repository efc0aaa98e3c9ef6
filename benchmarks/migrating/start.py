"""A Qwen3 policy folder in the supplied recipe's own code, beside a tokenizer with what the recipe asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from reasoning_from_scratch.qwen3 import Qwen3Model, load_hf_weights_into_qwen
from safetensors.torch import load_file
from transformers import AutoTokenizer


class Tokenizer:
    def __init__(self, folder: Path) -> None:
        self._inner = AutoTokenizer.from_pretrained(folder)
        self.eos_token_id = self._inner.eos_token_id

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self._inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def load_model_and_tokenizer(name: str, dtype: torch.dtype = torch.float32) -> tuple[Qwen3Model, Tokenizer]:
    folder = Path(name)
    shape = json.loads((folder / "config.json").read_text())
    settings: dict[str, Any] = {
        "vocab_size": shape["vocab_size"],
        "context_length": shape["max_position_embeddings"],
        "emb_dim": shape["hidden_size"],
        "n_heads": shape["num_attention_heads"],
        "n_layers": shape["num_hidden_layers"],
        "hidden_dim": shape["intermediate_size"],
        "head_dim": shape["head_dim"],
        "n_kv_groups": shape["num_key_value_heads"],
        "qk_norm": True,
        "rope_base": shape["rope_parameters"]["rope_theta"],
        "dtype": dtype,
    }
    model = Qwen3Model(settings)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    load_hf_weights_into_qwen(model, settings, weights)
    return model, Tokenizer(folder)
