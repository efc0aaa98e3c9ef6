"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# read when torch loads: threads that spin on busy cores cost many times the work of these small tests
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts the suite in the background lets it ignore Ctrl-C, which tests of interruption send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--goldens",
        type=Path,
        default=ROOT / "tests" / "golden" / "trl_losses.json",
        help="losses and gradients computed by TRL, to which the objectives are held",
    )


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of cases and data that lies beside the checkout; absent on a user's machine."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the folder ../shared (public cases and data) is not here")
    return folder


@pytest.fixture
def tiny_policy():
    """A function that makes a random untied Qwen3 policy of 64 tokens, in the given dtype."""

    def make(dtype: str = "float64", seed: int = 0, **config):
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        from rlvr_pl.policy import Policy

        torch.manual_seed(seed)
        settings = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        model = Qwen3ForCausalLM(Qwen3Config(**{**settings, **config})).to(getattr(torch, dtype))
        return Policy(model.eval(), None, None, (1,), 0, 128, 16, "tiny", "none")

    return make
