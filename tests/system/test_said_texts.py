"""Texts that a model says come to the client byte for byte: what tests with `tests.oracle.parrot`
rely on."""

from __future__ import annotations

import json
from pathlib import Path

from tests.oracle.parrot import Pieces, build
from tests.system.test_serve import serving

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEXTS = {
    "words": "The same words, the same words, the same words. Grüße, 日本 🙂!",
    "again": "The same words, the same words, the same words. Grüße, 日本 🙂!",
    "spaces": "\n\n" + " " * 300 + "\n",
    "long": "".join(f"{i} little lines\n" for i in range(2000)),
}


def test_a_parrot_says_what_is_asked_for(tmp_path: Path) -> None:
    texts: dict[str, str | bytes | Pieces] = {
        **TEXTS,
        "no utf-8": b"a\xff\xfe\xe6\x97",
        "for ever": Pieces(pieces=[b"<1>", b"<2>"], is_endless=True),
    }
    parrot = build(tmp_path / "parrot", TEMPLATE, texts)
    with serving(parrot.folder, tmp_path / "log", "--colocated") as served:

        def say(name: str, **fields: object) -> tuple[str, str]:
            messages = [{"role": "user", "content": "Hello, please say it."}]
            body = {"messages": messages, **parrot.say(name), **fields}
            answer = served.client.post(f"{served.url}/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            choice = json.loads(answer.text)["choices"][0]
            return choice["message"]["content"], choice["finish_reason"]

        for name, text in TEXTS.items():
            assert say(name) == (text, "stop")
        assert say("no utf-8") == ("a\ufffd\ufffd\ufffd", "stop")
        assert say("for ever", max_tokens=7) == ("<1><2><1><2><1><2><1>", "length")
