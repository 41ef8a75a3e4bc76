"""`pdx generate`: prefill and decode in one process pair, without network. The oracle of the
disaggregated path.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdx.cli.options import with_settings
from pdx.config.engine import EngineConfig
from pdx.config.node import ModelChoice
from pdx.config.resolve import Settings
from pdx.config.setting import pick
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.engine.loading import LoadedModel
    from pdx.text.tokenizer import Tokenizer

__all__ = ["generate"]


_SAMPLING = "Sampling"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    model: str
    prompt: str | None
    token_ids: str | None
    chat: bool
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    ignore_eos: bool
    draft: bool
    as_json: bool


@with_settings(
    [*pick(ModelChoice, required=["model"]), *pick(EngineConfig, without=["max_num_seqs"])],
    argument="model",
)
def generate(
    settings: Settings,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The prompt's text.")
    ] = None,
    token_ids: Annotated[
        str | None,
        typer.Option(
            metavar="IDS", help="The prompt as comma-separated token ids, instead of text."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat the prompt as a user's chat message.")
    ] = False,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", "-n", min=1, metavar="TOKENS", help="Output tokens at most."),
    ] = 128,
    temperature: Annotated[
        float,
        typer.Option(
            min=0, max=2, metavar="NUMBER", rich_help_panel=_SAMPLING, help="0 is greedy."
        ),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.001, max=1, metavar="NUMBER", rich_help_panel=_SAMPLING, help="Nucleus sampling."
        ),
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", rich_help_panel=_SAMPLING, help="A random one by default."),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            rich_help_panel=_SAMPLING,
            help="Go on after an end-of-sequence token.",
        ),
    ] = False,
    draft: Annotated[
        bool,
        typer.Option(
            "--draft",
            rich_help_panel=_SAMPLING,
            help="Load the model's layer that drafts, and verify its drafts: the same text.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generate from one prompt on this machine, colocated."""
    job = _Job(
        model=settings["model"],
        prompt=prompt,
        token_ids=token_ids,
        chat=chat,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        ignore_eos=ignore_eos,
        draft=draft,
        as_json=as_json,
    )
    import asyncio

    asyncio.run(_generate(job, settings.build(EngineConfig, max_num_seqs=1, drafts=draft)))


async def _generate(job: _Job, config: EngineConfig) -> None:
    from pdx.checkpoint.model_source import resolve_model
    from pdx.cli.loading_view import loading_progress
    from pdx.engine.loading import load_model
    from pdx.text.tokenizer import Tokenizer

    folder = resolve_model(job.model)
    tokenizer = Tokenizer.from_folder(folder)  # before minutes of loading
    with loading_progress(job.model) as progress:
        loaded = await load_model(folder, config, progress)
    try:
        await _run(job, folder, loaded, tokenizer)
    finally:
        await loaded.close()


async def _run(job: _Job, folder: Path, loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    import secrets

    from pdx.engine.colocated_node import ColocatedNode
    from pdx.engine.local_frontend import LocalFrontend
    from pdx.request.request import SamplingParams

    prompt_ids = _prompt_ids(job, folder, tokenizer)
    vocab_size = loaded.model.vocab_size
    wrong = [token_id for token_id in prompt_ids if not 0 <= token_id < vocab_size]
    if wrong:
        raise ConfigError(f"token id {wrong[0]} is outside the vocabulary of {vocab_size}")
    room = loaded.context_len - len(prompt_ids)
    eos = loaded.model.eos_token_ids
    sampling = SamplingParams(
        max_tokens=max(min(job.max_tokens, room), 1),
        temperature=job.temperature,
        top_p=job.top_p,
        seed=secrets.randbits(64) if job.seed is None else job.seed % 2**64,
        stop_token_ids=() if job.ignore_eos else eos,
    )
    detokenizer = tokenizer.detokenizer()
    output_ids: list[int] = []
    text = ""
    reason = None
    frontend = LocalFrontend()
    node = ColocatedNode(loaded, model_name=folder.name, frontend=frontend)
    async with frontend.serving(node):
        async for update in frontend.generate(prompt_ids, sampling):
            output_ids += update.token_ids
            reason = update.finish_reason
            shown = [i for i in update.token_ids if i not in sampling.stop_token_ids]
            piece = detokenizer.push(shown) + (detokenizer.flush() if reason else "")
            text += piece
            if not job.as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
    if job.as_json:
        result: dict[str, object] = {
            "prompt_token_ids": prompt_ids,
            "token_ids": output_ids,
            "text": text,
            "finish_reason": reason,
        }
        if job.draft:
            result["num_drafts"] = node.scheduler.num_drafts
            result["num_right_drafts"] = node.scheduler.num_right_drafts
        sys.stdout.write(json.dumps(result))
    sys.stdout.write("\n")


def _prompt_ids(job: _Job, folder: Path, tokenizer: Tokenizer) -> list[int]:
    from pdx.text.chat_template import ChatTemplate

    if (job.prompt is None) == (job.token_ids is None):
        raise ConfigError("give the prompt either as text or as --token-ids")
    if job.token_ids is not None:
        try:
            return [int(part) for part in job.token_ids.split(",")]
        except ValueError:
            raise ConfigError(f"--token-ids {job.token_ids!r} is not a list like 1,2,3") from None
    assert job.prompt is not None
    if not job.chat:
        return tokenizer.encode(job.prompt)
    template = ChatTemplate.from_folder(folder)
    if template is None:
        raise ConfigError(f"{folder} has no chat template", hint="leave out --chat")
    rendered = template.render([{"role": "user", "content": job.prompt}])
    return tokenizer.encode(rendered, add_special_tokens=False)
