"""--check: the bundled deployments are what they say, and what would not start is told with why."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pdx.cli.main import app
from pdx.errors import ConfigError

MODELS = Path(__file__).parents[2] / "models"
R1, CODER = MODELS / "deepseek-r1", MODELS / "qwen3-coder-480b"
DEPLOYMENTS = [(folder, role) for folder in (R1, CODER) for role in ("prefill", "decode")]


def check(folder: Path, role: str, *flags: str) -> Result:
    words = [role, "--config", str(folder / f"{role}.toml"), "--check", *flags]
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(("folder", "role"), DEPLOYMENTS, ids=str)
def test_a_deployment_would_start(folder: Path, role: str, device: str) -> None:
    """Of 8 ranks, with a GPU each or together on a CPU."""
    result = check(folder, role, "--device", device)
    assert result.exit_code == 0, result.exception
    assert "would start  yes" in result.stdout
    assert "ranks        8" in result.stdout
    assert "Memory of each rank" in result.stdout


def test_a_node_of_one_gpu_would_start(tiny_llama: Path) -> None:
    words = ["prefill", "--model", str(tiny_llama), "--check", "--device", "cuda:1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.exception
    assert "cuda:1" in result.stdout


def test_an_unknown_device_is_refused(tiny_llama: Path) -> None:
    words = ["prefill", "--model", str(tiny_llama), "--check", "--device", "gpu"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError)
    assert "device 'gpu' is not known" in result.exception.message


@pytest.mark.parametrize(("folder", "role"), DEPLOYMENTS, ids=str)
def test_the_readme_has_the_numbers(folder: Path, role: str) -> None:
    readme, printed = (folder / "README.md").read_text(), check(folder, role).stdout
    lines = dict(line.strip().split("  ", 1) for line in printed.splitlines() if "  " in line[3:])
    tokens = lines["pages"].split(": ")[1]
    assert tokens in readme
    assert lines["weights"].strip() in readme


@pytest.mark.parametrize(
    ("folder", "flags", "reason"),
    [
        (R1, ["--tp", "3"], "cannot be split over 3 ranks"),
        (R1, ["--tp", "32"], "32 ranks would cut float8 blocks of 128 x 128: MLPs (18,432)"),
        (R1, ["--kv-memory", "1M"], "1,048,576 bytes of KV memory hold no page"),
        (CODER, ["--tp", "5"], "cannot be split over 5 ranks"),
    ],
)
def test_what_is_refused_is_told_with_why(folder: Path, flags: list[str], reason: str) -> None:
    result = check(folder, "prefill", *flags)
    assert isinstance(result.exception, ConfigError)
    assert reason in result.exception.message
    assert reason in result.stdout


def test_a_cpu_dequantises_so_that_blocks_may_be_cut() -> None:
    assert check(R1, "prefill", "--tp", "32", "--device", "cpu").exit_code == 0


def test_writes_are_of_the_heads_that_both_ranks_have() -> None:
    printed = check(CODER, "prefill", "--device", "cpu", "--tp", "2").stdout
    writes = [line.split() for line in printed.split("Writes")[1].splitlines()[2:6]]
    head = 2 * 64 * 128 * 2
    assert [(int(ranks), int(size.replace(",", ""))) for ranks, size in writes] == [
        (1, 4 * head),
        (2, 4 * head),
        (4, 2 * head),
        (8, head),
    ]


@pytest.mark.parametrize(
    ("words", "exit_code", "reason"),
    [
        (["prefill", "--listen", "0.0.0.0:0"], 2, "without a shared secret any host could use"),
        (["prefill", "--secret-file", "/nowhere/secret"], 2, "cannot read the secret"),
        (["prefill", "--listen", "127.0.0.1:TAKEN"], 1, "the address is already in use"),
        (["prefill", "--fabric-core", "9999"], 2, "--fabric-core 9999"),
        (["prefill", "--kv-memory", "400000G"], 1, "of this host's memory"),
        (["decode", "--peer", "127.0.0.1:1", "--secret", "short"], 2, "fewer than 16"),
        (["decode", "--peer", "127.0.0.1"], 2, "'127.0.0.1' is not an address"),
        (["decode", "--peer", "127.0.0.1:1", "--http", "127.0.0.1:TAKEN"], 1, "already in use"),
    ],
)
def test_check_and_a_start_refuse_the_same_with_the_same_exit_code(
    words: list[str], exit_code: int, reason: str, tiny_llama: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [word.replace("TAKEN", str(taken.getsockname()[1])) for word in words]
        words += ["--model", str(tiny_llama)]
        started, checked = (CliRunner().invoke(app, [*words, *more]) for more in ([], ["--check"]))
    for result in (started, checked):
        assert isinstance(result.exception, ConfigError), result.exception
        assert reason in result.exception.message
        assert result.exception.exit_code == exit_code
    assert reason in " ".join(checked.stdout.split())


def test_a_folder_of_weights_is_checked_too(tiny_qwen3_moe: Path) -> None:
    result = CliRunner().invoke(app, ["prefill", "--model", str(tiny_qwen3_moe), "--check"])
    assert result.exit_code == 0
    # The table breaks a path that is longer than its column.
    assert f"{tiny_qwen3_moe.resolve()}/config.json" in "".join(result.stdout.split())


def test_nothing_is_checked_without_a_model() -> None:
    result = CliRunner().invoke(app, ["decode", "--peer", "127.0.0.1:1", "--check"])
    assert isinstance(result.exception, ConfigError)
    assert "--check needs the model" in result.exception.message


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from pdx.cli.entry import main\n"
        f"sys.argv = ['pdx', 'prefill', '--config', {str(R1 / 'prefill.toml')!r}, '--check']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines()[-1] == "False"


def test_a_float8_cache_takes_half_the_bytes(tiny_llama: Path) -> None:
    words = ["prefill", "--model", str(tiny_llama), "--check", "--device", "cuda"]
    found = []
    for kv_dtype in ("bfloat16", "float8"):
        flags = ["--dtype", "bfloat16", "--kv-dtype", kv_dtype]
        printed = CliRunner().invoke(app, [*words, *flags]).stdout
        assert f"KV dtype     {kv_dtype}" in printed
        token, writes = printed.split("KV of a token")[1], printed.split("Writes")[1]
        found.append((token.split()[0], writes.splitlines()[2].split()[1]))
    (token, atom), (float8_token, float8_atom) = (
        (int(a.replace(",", "")), int(b.replace(",", ""))) for a, b in found
    )
    assert (token, atom) == (2 * float8_token, 2 * float8_atom)


def test_r1s_latents_in_float8_are_records_of_656_bytes() -> None:
    printed = check(R1, "decode", "--kv-dtype", "float8").stdout
    assert f"KV of a token  {61 * 656:,} bytes" in printed
    assert f" {64 * 656:,}" in printed.split("Writes")[1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--kv-dtype", "float8"], "a KV cache in float8 is not served on a CPU"),
        (
            ["--kv-dtype", "bfloat16", "--dtype", "float32"],
            "a KV cache in bfloat16 beside --dtype float32 is not served",
        ),
    ],
)
def test_a_cache_that_is_not_served_is_refused(
    tiny_llama: Path, flags: list[str], reason: str
) -> None:
    words = ["decode", "--peer", "127.0.0.1:1", "--model", str(tiny_llama), "--check", *flags]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError)
    assert reason in result.exception.message
