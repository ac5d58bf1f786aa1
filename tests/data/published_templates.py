"""Chat templates without marks, in the shapes that published models have, and some that cannot be used."""

from __future__ import annotations

# [INST] and [/INST]; the system text stands before the last question (Mistral).
MISTRAL = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif -%}
{{ bos_token }}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
{%- if m.role == 'user' %}{{ '[INST] ' }}
{%- if system is defined and (loop.last or loop.index == loop.length - 1) %}{{ system + '\\n\\n' }}{% endif -%}
{{ m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content|trim + eos_token }}{% endif -%}
{%- endfor -%}
"""

# As Mistral's, with a system text of its own, and thoughts that a question opens unless they are off (Sarvam-M).
SARVAM_M = """
{%- set today = strftime_now('%Y-%m-%d') -%}
{%- set thinks = enable_thinking is not defined or enable_thinking -%}
{%- set order = 'Think inside <think>...</think> first.' if thinks else '' -%}
{%- if messages[0].role == 'system' %}{% set turns = messages[1:] %}{% set system = order + messages[0].content -%}
{%- else %}{% set turns = messages %}{% set system = 'Be kind.' + order %}{% endif -%}
{{ bos_token + '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- for m in turns %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- if loop.last and thinks %}{{ '<think>\\n' }}{% endif -%}
{%- else %}
{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- if '</think>' in m.content and loop.last -%}
{{ '<think>\\n' + m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ answer + eos_token }}
{%- endif -%}
{%- endfor -%}
"""

# Headers that are no tokens, and a line break after all but the last answer (Airavata, Krutrim-2).
AIRAVATA = """
{%- for m in messages -%}
{{ '<|' + m.role + '|>\\n' + m.content|trim }}
{%- if m.role == 'assistant' %}{{ eos_token }}{% endif -%}
{%- if not (loop.last and m.role == 'assistant') %}{{ '\\n' }}{% endif -%}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif -%}
{%- endfor -%}
"""

# A system turn with today's date, which is written in any case (LLaMA 3.2).
LLAMA_3_2 = """
{%- if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% else %}{% set date = '' %}{% endif -%}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content|trim %}{% set turns = messages[1:] -%}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif -%}
{{ bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Today Date: ' + date + '\\n\\n' + system + '<|eot_id|>' }}
{%- for m in turns -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content|trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}
"""

# The system text stands in the first question, and roles alternate (Gemma 3).
GEMMA_3 = """
{{- bos_token -}}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] -%}
{%- else %}{% set first = '' %}{% set turns = messages %}{% endif -%}
{%- for m in turns -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') }}
{{- m.content|trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""

# The last answer has a thinking block, empty if need be, and earlier answers have none (Qwen 3).
QWEN_3 = """
{%- for m in messages -%}
{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- set before = m.content.split('</think>')[0] if '</think>' in m.content else '' -%}
{%- set thoughts = before.split('<think>')[-1].strip('\\n') -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}{% endif -%}
{{ (answer if m.role == 'assistant' else m.content) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}
"""

# Sarvam-1 and LLaMA 2: the system text inside the first question, BOS before each question, no generation prompt.
LLAMA_2 = """
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}
{%- for each in messages -%}
{%- if each['role'] == 'user' -%}
{{- bos_token + '[INST] ' -}}
{%- if system and loop.index0 == 1 -%}{{- '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' -}}{%- endif -%}
{{- each['content'] + ' [/INST]\\n' -}}
{%- elif each['role'] == 'assistant' -%}
{{- ' ' + each['content'] + ' ' + eos_token + '\\n' -}}
{%- elif each['role'] != 'system' -%}
{{- raise_exception('unknown role ' + each['role']) -}}
{%- endif -%}
{%- endfor -%}
"""

PUBLISHED = {
    "mistral": MISTRAL,
    "sarvam_m": SARVAM_M,
    "airavata": AIRAVATA,
    "llama_3_2": LLAMA_3_2,
    "gemma_3": GEMMA_3,
    "qwen_3": QWEN_3,
}

# What follows the question is written otherwise once there is an answer.
NOT_A_PREFIX = """
{%- for m in messages -%}
{{ m.role + ': ' + m.content + ('.' if not loop.last else '?') + '\\n' }}
{%- endfor -%}
"""

# Three messages are written, and no system text.
DROPS_TURNS = """
{%- for m in messages if m.role != 'system' -%}
{%- if loop.revindex <= 3 %}{{ m.content + (eos_token if m.role == 'assistant' else ' ') }}{% endif -%}
{%- endfor -%}
"""
