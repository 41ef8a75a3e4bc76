"""Whether a folder can be served, as far as its small files and the headers of its weights say. No
torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdx.checkpoint.model import ModelConfig
    from pdx.config.engine import EngineConfig

__all__ = ["check_folder", "check_nodes", "check_text"]


def check_folder(folder: Path, *, serves_text: bool) -> ModelConfig:
    """The model as it would be loaded.

    Args:
        serves_text: whether the node has a frontend, which wants the tokenizer. A prefiller gets
            token ids.

    Raises:
        CheckpointError: it would not be loaded.
    """
    from pdx.checkpoint.folder import Checkpoint
    from pdx.checkpoint.token_ids import ids_without_token

    model = Checkpoint.read(folder).model
    ids_without_token(folder, model.vocab_size)
    if serves_text:
        check_text(folder)
    return model


def check_nodes(folder: Path, config: EngineConfig, num_nodes: int) -> None:
    """Whether so many nodes on this host would start, as far as can be said without starting one.

    Raises:
        PdxError: they would not; most often they take more memory than there is.
    """
    from pdx.engine.start_check import plan_node
    from pdx.host.memory import read_memory_facts
    from pdx.host.memory_room import check_memory

    plan = plan_node(check_folder(folder, serves_text=True), config)
    if (need := plan.host_memory(num_nodes)) is not None:
        check_memory(need, read_memory_facts())


def check_text(folder: Path) -> None:
    """Whether a frontend would start: tokenizer, chat template, defaults of sampling.

    Raises:
        CheckpointError: one is missing or damaged; it is named.
    """
    from pdx.server.sampling import SamplingDefaults
    from pdx.text.chat_template import ChatTemplate
    from pdx.text.tokenizer import Tokenizer

    Tokenizer.from_folder(folder)
    ChatTemplate.from_folder(folder)
    SamplingDefaults.from_folder(folder)
