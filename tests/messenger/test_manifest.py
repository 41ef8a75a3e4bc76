"""What a node says of its KV memory: every split that can be, and no other."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import msgspec
import pytest

from pdx.checkpoint.layers import LayerGroup, full_attention
from pdx.errors import ProtocolError
from pdx.messenger.manifest import differences, model_id, text_id
from tests.messenger.manifests import ONE_RANK


def test_ranks_divide_the_heads_or_are_a_multiple_of_them() -> None:
    for num_heads, tp_size in itertools.product(range(1, 17), repeat=2):
        manifest = msgspec.structs.replace(ONE_RANK, num_kv_heads=num_heads, tp_size=tp_size)
        if num_heads % tp_size and tp_size % num_heads:
            with pytest.raises(ProtocolError, match="cannot be"):
                manifest.layout()
            continue
        layout = manifest.layout()
        held = [head for rank in range(tp_size) for head in layout.heads(rank)]
        assert sorted(held) == sorted(list(range(num_heads)) * layout.num_replicas)
        assert layout.rank.num_kv_heads * tp_size == len(held)


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 0},
        {"num_pages": -1},
        {"dtype": "int7"},
        {"kv_dtype": "float9"},
        {"kv_alignment": 0},
        {"num_parts": 0},
        {"layer_groups": ()},
        {"layer_groups": (full_attention(0),)},
        {"layer_groups": (LayerGroup(name="full_attention", layers=(0, 2)),)},
        {"layer_groups": (LayerGroup(name="full_attention", layers=(1, 0)),)},
        {"layer_groups": (full_attention(1), LayerGroup(name="other", layers=(1,)))},
    ],
)
def test_a_memory_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="cannot be"):
        msgspec.structs.replace(ONE_RANK, **change).layout()


def test_records_of_one_part_are_half_of_keys_and_values() -> None:
    record = msgspec.structs.replace(ONE_RANK, num_parts=1).layout()
    assert 2 * record.rank.page_bytes == ONE_RANK.layout().rank.page_bytes


def test_what_differs_is_told_in_two_columns_and_what_may_differ_is_not() -> None:
    other = msgspec.structs.replace(
        ONE_RANK,
        weights_id="x",
        layer_groups=(full_attention(3),),
        page_size=4,
        num_pages=9,
        tp_size=2,
    )
    assert differences(ONE_RANK, ONE_RANK, us="prefiller", them="decoder") is None
    table = differences(ONE_RANK, other, us="prefiller", them="decoder")
    assert table is not None
    assert table.splitlines() == [
        "              prefiller                  decoder",
        "weights_id    w                          x",
        "layer_groups  full_attention (2 layers)  full_attention (3 layers)",
    ]


def test_nodes_that_group_their_layers_in_another_way_refuse_each_other() -> None:
    window = (LayerGroup(name="sliding_attention", layers=(0, 1)),)
    other = msgspec.structs.replace(ONE_RANK, layer_groups=window)
    table = differences(ONE_RANK, other, us="prefiller", them="decoder")
    assert table is not None
    assert "sliding_attention (2 layers)" in table
    assert other.layout().rank.group == "sliding_attention"


def write_model(folder: Path, *, config: str, header: bytes, data: bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    file = struct.pack("<Q", len(header)) + header + data
    (folder / "model.safetensors").write_bytes(file)


def test_a_models_id_is_its_config_its_headers_and_a_sample_of_its_weights(tmp_path: Path) -> None:
    model = {"config": '{"a": 1, "b": 2}', "header": b'{"x": 1}', "data": bytes(1 << 17)}
    ids = {}
    for name, change in {
        "same": {},
        "other order": {"config": '{"b": 2, "a": 1}'},
        "config": {"config": '{"a": 1, "b": 3}'},
        "header": {"header": b'{"x": 2}'},
        "data": {"data": b"\1" + bytes((1 << 17) - 1)},
    }.items():
        write_model(tmp_path / name, **{**model, **change})
        ids[name] = model_id(tmp_path / name)
    assert ids["same"] == ids["other order"]
    assert len(set(ids.values())) == 4


def test_a_texts_id_is_of_the_tokenizer_and_the_template(tmp_path: Path) -> None:
    assert text_id(tmp_path) == text_id(tmp_path)
    ids = {text_id(tmp_path)}
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tool_use.jinja",
        "additional_chat_templates/tool_use.jinja",
        "tokenizer.json",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.read_text() + "x" if path.exists() else "")
        ids.add(text_id(tmp_path))
    (tmp_path / "README.md").write_text("of no account")
    ids.add(text_id(tmp_path))
    assert len(ids) == 7


def test_both_nodes_have_the_same_type_of_cache() -> None:
    narrow = msgspec.structs.replace(ONE_RANK, kv_dtype="float8")
    assert 4 * narrow.layout().rank.page_bytes == ONE_RANK.layout().rank.page_bytes
    told = differences(ONE_RANK, narrow, us="prefiller", them="decoder")
    assert told is not None
    assert told.splitlines()[1].split() == ["kv_dtype", "None", "float8"]
