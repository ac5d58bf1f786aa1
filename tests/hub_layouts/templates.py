"""Chat templates that write what the published ones write, each in our own words. None has marks of answers."""

# Sarvam-1 and LLaMA 2: the system text inside the first question, BOS before each question, no generation prompt.
LLAMA_2 = """\
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
{%- endfor -%}"""

# Sarvam-M: a default system text, thinking of the last answer alone, and no look at add_generation_prompt.
MISTRAL = """\
{%- set thinks = enable_thinking is not defined or enable_thinking -%}
{%- set asks = 'Think inside <think> tags first.' if thinks else '' -%}
{%- if messages[0]['role'] == 'system' -%}
{%- set system = (asks + '\\n\\n' if asks else '') + messages[0]['content'] -%}{%- set rest = messages[1:] -%}
{%- else -%}
{%- set system = 'You are a helpful assistant.' + (' ' + asks if asks else '') -%}{%- set rest = messages -%}
{%- endif -%}
{{- bos_token + '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' -}}
{%- for each in rest -%}
{%- if (each['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate') -}}
{%- endif -%}
{%- if each['role'] == 'user' -%}
{{- '[INST]' + each['content'] + '[/INST]' -}}
{%- if loop.last and thinks -%}{{- '<think>\\n' -}}{%- endif -%}
{%- else -%}
{%- set parts = each['content'].split('</think>') -%}
{%- if loop.last and parts | length > 1 -%}
{{- '<think>\\n' + parts[0].replace('<think>', '').strip() + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- parts[-1].strip() + eos_token -}}
{%- endif -%}
{%- endfor -%}"""

# Krutrim-2: markers of plain words, no BOS, and a line feed after each answer but the last.
KRUTRIM = """\
{%- for each in messages -%}
{%- if each['role'] == 'assistant' -%}
{{- '<|assistant|>\\n' + each['content'] + eos_token -}}
{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
{%- else -%}
{{- '<|' + each['role'] + '|>\\n' + each['content'] + '\\n' -}}
{%- endif -%}
{%- if loop.last and add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
{%- endfor -%}"""

# Llama 3.2: the date of today in a system turn that is always there.
LLAMA_3 = """\
{%- set today = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' -%}
{%- set has_system = messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] | trim if has_system else '' -%}
{%- set rest = messages[1:] if has_system else messages -%}
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' -}}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + today + '\\n\\n' + system + '<|eot_id|>' -}}
{%- for each in rest -%}
{{- '<|start_header_id|>' + each['role'] + '<|end_header_id|>\\n\\n' + each['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""

# Gemma 3: strict alternation, the system text before the first question, `model` for the assistant.
GEMMA = """\
{{- bos_token -}}
{%- set has_system = messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] + '\\n\\n' if has_system else '' -%}
{%- set rest = messages[1:] if has_system else messages -%}
{%- for each in rest -%}
{%- if (each['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate') -}}
{%- endif -%}
{%- set name = 'model' if each['role'] == 'assistant' else each['role'] -%}
{{- '<start_of_turn>' + name + '\\n' + (system if loop.first else '') + each['content'] | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""

# Qwen 3: thinking is written for answers after the last question alone, there even if it is empty.
QWEN = """\
{%- set last = namespace(question=-1) -%}
{%- for each in messages -%}
{%- if each['role'] == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for each in messages -%}
{%- set parts = each['content'].split('</think>') -%}
{{- '<|im_start|>' + each['role'] + '\\n' -}}
{%- if each['role'] == 'assistant' -%}
{%- if loop.index0 > last.question -%}
{%- set thought = parts[0].replace('<think>', '').strip() if parts | length > 1 else '' -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- parts[-1].lstrip('\\n') -}}
{%- else -%}
{{- each['content'] -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""
