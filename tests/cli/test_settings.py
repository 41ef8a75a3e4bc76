"""Settings: one declaration, four sources, the last one wins; what is wrong is named with its
place.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pdx.config.engine import EngineConfig
from pdx.config.node import FabricConfig, OutputConfig, ServerConfig
from pdx.config.resolve import Settings, all_settings, read_file, resolve
from pdx.config.setting import Kind, Setting, format_bytes, parse_bytes, pick, settings_of
from pdx.errors import ConfigError

ENGINE = settings_of(EngineConfig)


def resolved(
    declared: list[Setting] = ENGINE,
    *,
    flags: dict[str, object] | None = None,
    env: dict[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    return resolve(declared, flags=flags or {}, env=env or {}, file=file)


def written(folder: Path, text: str) -> Path:
    path = folder / "pdx.toml"
    path.write_text(text)
    return path


def test_each_source_wins_over_the_one_before(tmp_path: Path) -> None:
    file = written(tmp_path, "[scheduler]\nchunk = 1\nmax_seqs = 1\nwatchdog = 1\n")
    env = {"PDX_MAX_SEQS": "2", "PDX_WATCHDOG": "2"}
    settings = resolved(flags={"watchdog_s": "3", "chunk_len": None}, env=env, file=file)
    config = settings.build(EngineConfig)
    assert (config.reserve_output_len, config.chunk_len) == (256, 1)
    assert (config.max_num_seqs, config.watchdog_s) == (2, 3.0)
    assert [
        settings.origins[name]
        for name in ("reserve_output_len", "chunk_len", "max_num_seqs", "watchdog_s")
    ] == ["default", str(file), "PDX_MAX_SEQS", "--watchdog"]


def test_without_any_source_a_config_is_its_dataclass() -> None:
    for config in (EngineConfig, FabricConfig, ServerConfig, OutputConfig):
        assert resolved(settings_of(config)).build(config) == config()


def test_an_empty_variable_sets_nothing() -> None:
    assert resolved(env={"PDX_CHUNK": ""}).is_default("chunk_len")


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("0", False), ("off", False)]
)
def test_variables_turn_flags_on_and_off(text: str, value: bool) -> None:
    assert resolved(env={"PDX_POISON": text})["poison"] is value


def test_a_flag_turns_off_what_a_file_turns_on(tmp_path: Path) -> None:
    file = written(tmp_path, "[kv]\npoison = true\n")
    assert resolved(file=file)["poison"] is True
    assert resolved(flags={"poison": False}, file=file)["poison"] is False


def test_lists_come_from_repeated_flags_commas_and_arrays(tmp_path: Path) -> None:
    declared = pick(ServerConfig, "cors_origins")
    file = written(tmp_path, '[server]\ncors_origin = ["http://a", "http://b"]\n')
    wanted = ("http://a", "http://b")
    assert resolved(declared, flags={"cors_origins": list(wanted)})["cors_origins"] == wanted
    assert (
        resolved(declared, env={"PDX_CORS_ORIGIN": "http://a, http://b"})["cors_origins"] == wanted
    )
    assert resolved(declared, file=file)["cors_origins"] == wanted


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[scheduler]\nchunck = 1\n", "unknown key 'chunck' in [scheduler]", "chunk"),
        ("[kv]\nchunk = 1\n", "unknown key 'chunk' in [kv]", "page_size"),
        ("[sheduler]\nchunk = 1\n", "unknown section or key 'sheduler'", "scheduler"),
        ("chunk = 1\n", "unknown section or key 'chunk'", "scheduler"),
        ("[scheduler]\nchunk = 0\n", "[scheduler] chunk = 0: it must be at least 1", None),
        ("[scheduler]\nchunk = '64'\n", "chunk = 64: it must be a whole number", None),
        ("[scheduler]\nchunk = true\n", "chunk = True: it must be a whole number", None),
        ("[scheduler]\nwatchdog = nan\n", "watchdog = nan: the number must be finite", None),
        ("[kv]\npoison = 1\n", "poison = 1: it must be true or false", None),
        ("[kv]\nkv_memory = 'lots'\n", "kv_memory = lots: 'lots' is not a size", "512M"),
        ("[model]\ndtype = 'int4'\n", "dtype = int4: use auto or float32", None),
        ("[server]\ncors_origin = 'a'\n", "cors_origin = a: it must be a list of texts", None),
        ("[server]\napi_key = 7\n", "api_key = (hidden): it must be text", None),
        ("[scheduler\n", "is not TOML", None),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_file_and_key(
    tmp_path: Path, text: str, message: str, hint: str | None
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: No such file"):
        read_file(tmp_path / "none.toml")


def test_wrong_variables_and_flags_are_named() -> None:
    with pytest.raises(ConfigError, match="PDX_CHUNK=x: it must be a whole number"):
        resolved(env={"PDX_CHUNK": "x"})
    with pytest.raises(ConfigError, match="--chunk 0: it must be at least 1"):
        resolved(flags={"chunk_len": "0"})
    with pytest.raises(ConfigError, match=r"--dtype int4: use auto or"):
        resolved(flags={"dtype": "int4"})


def test_what_is_required_and_missing_is_named_with_the_ways_to_give_it() -> None:
    settings = resolved(pick(FabricConfig, "peers", required=["peers"]))
    with pytest.raises(ConfigError, match="--peer is missing") as caught:
        settings.check_required()
    assert all(way in str(caught.value.hint) for way in ("PDX_PEER", "[fabric]", "--config"))


def test_printed_settings_are_a_file_that_gives_them_again(tmp_path: Path) -> None:
    declared = [each for each in all_settings() if not each.secret]
    given: dict[Kind, object] = {
        Kind.INT: "7",
        Kind.FLOAT: "2.5",
        Kind.TEXT: 'a "b" \\ \n ü',
        Kind.FLAG: True,
        Kind.TEXTS: ["x", "y"],
        Kind.SIZE: "3M",
    }
    flags = {s.name: s.choices[0] if s.choices else given[s.kind] for s in declared}
    settings = resolved(declared, flags=flags)
    again = resolved(declared, file=written(tmp_path, settings.to_toml()))
    assert again.values == settings.values


def test_printed_settings_name_every_origin_and_hide_the_key() -> None:
    settings = resolved(settings_of(ServerConfig), env={"PDX_API_KEY": "sesame", "PDX_HTTP": ":1"})
    text = settings.to_toml()
    assert tomllib.loads(text)["server"]["http"] == ":1"
    assert "sesame" not in text
    lines = {line.strip("# ").partition(" ")[0]: line for line in text.splitlines()}
    assert lines["http"].endswith("# PDX_HTTP")
    assert lines["max_streams"].endswith("# default")
    assert lines["api_key"].endswith("# PDX_API_KEY")
    assert lines["served_model_name"].endswith("# default: the folder's or hub name")


def test_settings_reach_another_process_by_its_environment() -> None:
    declared = all_settings()
    settings = resolved(
        declared, flags={"poison": True, "kv_memory_bytes": "3M", "cors_origins": ["a", "b"]}
    )
    env = settings.to_env()
    assert env["PDX_PAGES"] is None
    there = resolved(declared, env={name: text for name, text in env.items() if text is not None})
    assert there.values == settings.values


def test_names_of_settings_are_unique() -> None:
    for attribute in ("name", "key", "flag", "env"):
        names = [getattr(each, attribute) for each in all_settings()]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512M", 512 << 20), ("1.5G", 3 << 29), ("1GiB", 1 << 30), ("2kb", 2048)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert parse_bytes(format_bytes(size)) == size


@pytest.mark.parametrize("text", ["", "M", "-1M", "0", "nan", "infG", "1X"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)
