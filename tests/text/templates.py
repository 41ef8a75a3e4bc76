"""Chat templates in the shapes that published ones have, each with the habits that make histories
hard: what it takes as content, as arguments, as ids, and what it forgets."""

from __future__ import annotations

__all__ = ["SHAPES"]

_TURN = "{% macro turn(role, words) %}[{{ role }}] {{ words }}\n{% endmacro %}"
_REST = (
    "{% elif m.role == 'assistant' %}{{ '[assistant] ' + m.content + '\n' }}"
    "{% else %}{{ turn(m.role, m.content) }}{% endif %}"
)
_CALLS = (
    "{% for c in m.tool_calls %}"
    "<call>{{ c.function.name + c.function.arguments | tojson }}</call>\n{% endfor %}"
)
_END = "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"

#: Name to source.
SHAPES = {
    "words and calls of any number": _TURN
    + "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{{ '[assistant] ' }}{% if m.content %}{{ m.content + '\n' }}{% endif %}"
    "{% for c in m.tool_calls %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>\n{% endfor %}" + _REST + _END,
    "looks for thoughts in the content, which null has not": _TURN
    + "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% set words = m.content.split('</think>')[-1] if '</think>' in m.content else m.content %}"
    "{{ '[assistant] ' + words }}{% for c in m.tool_calls %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": '
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}}</tool_call>\n{% endfor %}"
    + _REST
    + _END,
    "calls where the content is null, arguments as text": _TURN
    + "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}<call>{{ c['type'] + ' ' + c['function']['name'] + '\n' "
    "+ c['function']['arguments'] }}</call>\n{% endfor %}" + _REST + _END,
    "calls where the content is empty": _TURN
    + "{% for m in messages %}{% if m.role == 'assistant' and not m.content and m.tool_calls %}"
    + _CALLS
    + _REST
    + _END,
    "an answer of calls has an empty answer behind it": _TURN
    + "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    + _CALLS
    + "{% endif %}{% if m.role == 'assistant' and m.content is none %}"
    + _REST
    + _END,
    "one call, without words, by the presence of the key": _TURN
    + "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}\n" + _REST + _END,
    "the first call alone, without the others": _TURN
    + "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('no channels') }}{% endif %}"
    "{% if m.content %}{{ turn('assistant', m.content) }}{% endif %}"
    "to={{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}\n"
    + _REST
    + _END,
    "turns that alternate, ids of nine characters": _TURN
    + "{% set ns = namespace(turn=0) %}{% for m in messages %}"
    "{% if m.role != 'tool' and not m.get('tool_calls') %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.get('tool_calls') %}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "[CALL]{{ c.function.name }}[ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}\n"
    "{% endfor %}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "[RESULT]{{ m.tool_call_id }} {{ m.content | string }}\n" + _REST + _END,
    "each argument by itself": _TURN
    + "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{{ '[assistant] ' }}"
    "{% if m.content is string and m.content | trim %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}<function={{ c.function.name }}>"
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>"
    "{{ value if value is string else value | tojson }}</parameter>{% endfor %}</function>\n"
    "{% endfor %}" + _REST + _END,
    "prints what it is given, also None": _TURN
    + "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{{ turn('assistant', m.content) }}{% for c in m.tool_calls %}"
    "<call>{{ c.function.name }}({{ c.function.arguments }})</call>\n{% endfor %}" + _REST + _END,
    "contents of parts alone": (
        "{% for m in messages %}[{{ m.role }}] "
        "{% for part in m.content or [] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% endif %}{% endfor %}{% for c in m.tool_calls or [] %}"
        "<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}\n" + _END
    ),
}
