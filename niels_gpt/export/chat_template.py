"""Our chat formats as Jinja templates, as `transformers` and llama.cpp render them."""

from __future__ import annotations

from niels_gpt.chat.own_formats import ROLE_NAMES
from niels_gpt.chat.transcript import ROLES
from niels_gpt.tokenizer import SPECIAL_TOKENS, ByteTokenizer, Tokenizer
from niels_gpt.tokenizer.special import SPECIAL_STRINGS

_CHECKED = """\
{%- for message in messages -%}
{%- if message['role'] not in [ROLES] -%}
{{- raise_exception('unknown role ' + message['role'] + '; allowed roles are PLAIN') -}}
{%- endif -%}
FORBIDDEN\
TURN
{%- endfor -%}
{%- if add_generation_prompt -%}PROMPT{%- endif -%}
"""
_FORBIDDEN = """\
{%- for special in [SPECIAL] -%}
{%- if special in message['content'] -%}
{{- raise_exception('a message must not contain ' + special) -}}
{%- endif -%}
{%- endfor -%}
"""


def chat_template(tokenizer: Tokenizer | ByteTokenizer) -> str:
    """Return the Jinja template that renders messages as the chat format of the tokenizer encodes them.

    It raises for an unknown role, and for special strings in a message, which could forge a turn.
    """
    if isinstance(tokenizer, ByteTokenizer):
        turn = "{{- message['role'] + ': ' + message['content'] + '\\n' -}}"
        prompt, forbidden = "{{- 'assistant: ' -}}", ""
    else:
        by_role = ", ".join(f"'{role}': '{SPECIAL_STRINGS[ROLE_NAMES[role]]}'" for role in ROLES)
        turn = f"{{{{- {{{by_role}}}[message['role']] + message['content'] + '{SPECIAL_STRINGS['eot']}' -}}}}"
        prompt = f"{{{{- '{SPECIAL_STRINGS['asst']}' -}}}}"
        forbidden = _FORBIDDEN.replace("SPECIAL", ", ".join(f"'{text}'" for text in SPECIAL_TOKENS))
    text = _CHECKED.replace("ROLES", ", ".join(f"'{role}'" for role in ROLES)).replace("PLAIN", ", ".join(ROLES))
    return text.replace("FORBIDDEN", forbidden).replace("TURN", turn).replace("PROMPT", prompt)
