"""Chat templates in the styles of published models, written for these tests."""

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

CHATML_WITH_DEFAULT_SYSTEM = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are a helpful assistant named Test.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{%- endif %}
    {%- if message.role in ('user', 'assistant') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

CHATML_WITH_GENERATION = """\
{% for message in messages %}
{% if message.role == 'assistant' %}
{{ '<|im_start|>assistant\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}\
{% else %}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}\
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}\
{% endif %}
"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set system, rest = messages[0]['content'], messages[1:] %}\
{% else %}{% set system, rest = none, messages %}{% endif %}\
{% for message in rest %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
{% if loop.first and system is not none %}\
{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

LLAMA3_WITH_DATE = "{{ bos_token }}{{ strftime_now('%d %b %Y') }}\n" + LLAMA3.removeprefix("{{- bos_token }}\n")

ZEPHYR = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<|im_start|>' + role + '\n' + message['content'] | trim + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"""

VICUNA = """\
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}{% for message in messages %}\
{% if message['role'] == 'user' %}{{ ' USER: ' + message['content'] }}\
{% elif message['role'] == 'assistant' %}{{ ' ASSISTANT: ' + message['content'] + eos_token }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"""

STRIPS_OLD_THOUGHTS = """\
{% for message in messages %}{% set content = message.content %}\
{% if message.role == 'assistant' and not loop.last %}{% set content = content.split('</think>')[-1] %}\
{% elif message.role == 'assistant' %}{% set content = '<think>\n\n</think>\n\n' + content %}{% endif %}\
{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

REWRITES_OLD_TURNS = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + ('\n' if loop.last else ' (before)\n') }}\
{{ message.content }}{{ '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

NO_GENERATION_PROMPT = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}\
{% endfor %}"""

NO_END = """\
{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
