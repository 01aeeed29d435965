#!/usr/bin/env python3
"""Writes golden.json: what transformers' apply_chat_template makes of conversations, for ../chat_test.go.

    python3 -m venv venv && venv/bin/pip install transformers jinja2 tokenizers
    venv/bin/python golden.py > golden.json

SmolLM2's template is that of the GGUF file, to the byte. The others are written in the manner of the families named,
and use what their templates use.
"""
import json
import sys

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

TEMPLATES = {
    "smollm2": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{#- the system message comes out of the list #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "qwen": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{{- '[' ~ ns.last_query_index ~ ']' }}
{%- if messages[-1].role == 'user' %}{{- '(user last)' }}{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "mistral": "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
    "zephyr": """{% for message in messages %}
    {% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
    {% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
    {% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + message['content'].strip() + eos_token }}
    {% endif %}
    {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
    {% endif %}
{% endfor %}
""",
    "think": """{%- macro show(m) -%}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{%- endmacro -%}
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'assistant' and '</think>' in m.content -%}
{{- m.content.split('</think>')[-1].lstrip('\\n') | upper -}}
{%- elif m.content is string and m.content.startswith('skip') -%}{%- continue -%}
{%- else -%}{{ show(m) }}{%- endif -%}
{%- if not loop.last -%}|{%- endif -%}
{%- endfor -%}
{{- '!' if enable_thinking is defined and enable_thinking else '?' -}}
{%- generation -%} said {%- endgeneration -%}
{{- range(3) | list | join('-') -}}
""",
}

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "It's <b>the</b> \"weather\" & more: \u00e9\U0001f600",
          "parameters": {"type": "object", "properties": {"where": {"type": "string"}, "at": {"type": "number", "default": 1.5, "big": 9007199254740993}}, "required": ["where"], "empty": {}, "none": None, "list": []}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"where": "Paris", "at": 2, "z": [1, 2.0, True, None], "a": {"k": "\n\t\\"}}}}

U = {"role": "user", "content": "Hello!"}
S = {"role": "system", "content": "  Be brief.\n"}
A = {"role": "assistant", "content": " Hi there. "}
CONVERSATIONS = [
    [U], [S, U], [U, A, U], [S, U, A, U], [A], [S],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "{{ messages }} {% if %} <|im_end|> \u00e9\u4f60\U0001f600 'q' \"d\" & <b>\r\nline\n"}],
    [U, {"role": "assistant", "content": "<think>hmm</think>\n\nanswer"}, {"role": "user", "content": "skip me"}],
    [U, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}, {"role": "tool", "tool_call_id": "call_2", "content": "dry"}, U],
    [U, U],
]


def main():
    rows = []
    for name, template in TEMPLATES.items():
        tok = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
        tok.chat_template = template
        for messages in CONVERSATIONS:
            for generate in (True, False):
                for tools in (None, TOOLS) if name in ("llama3", "qwen") else (None,):
                    row = {"template": name, "messages": json.dumps(messages, ensure_ascii=False), "generate": generate,
                           "tools": json.dumps(tools) if tools else None}
                    try:
                        row["prompt"] = tok.apply_chat_template(messages, tools=tools, add_generation_prompt=generate, tokenize=False)
                    except Exception as e:  # noqa: BLE001: whatever the template raises
                        row["error"] = str(e)
                    rows.append(row)
    json.dump({"templates": TEMPLATES, "rows": rows}, sys.stdout, separators=(",", ":"))
    print()


main()
