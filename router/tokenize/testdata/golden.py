#!/usr/bin/env python3
"""Writes golden.json.gz: the prompts that vLLM 0.32 makes of requests, for ../golden_test.go. It needs vLLM's packages.

    python golden.py ../../../internal/bpe/testdata/golden.json.gz golden.json.gz

The templates are those beside this script, the tokenizer is the one named "llama3" of the other golden file. Each row is a
template, a request's body, and its prompt as text and tokens, or that vLLM refuses it.
"""
import gzip
import json
import pathlib
import sys
import types

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import _detect_content_format, safe_apply_chat_template

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Paris\", \"days\": 2, \"deep\": {\"b\": [1.5, null], \"a\": true}}"}}
EMPTY = {"type": "function", "id": "c2", "function": {"arguments": "", "name": "now"}}
BROKEN = {"type": "function", "id": "c3", "function": {"arguments": "[1", "name": "broken"}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "It's <b>", "strict": True, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
BARE = {"function": {"parameters": {"z": 1, "a": "é"}, "name": "now", "foo": 1}, "type": "function"}


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


def tool(content):
    return {"role": "tool", "tool_call_id": "c1", "content": content}


PLAIN = [system("Be brief."), user("Hello, wörld! \"quoted\" \\ back\n<|im_end|>"), assistant("Hi <|im_start|>\tthere"), user("  What's 2+2?  ")]
PARTS = [user([{"type": "text", "text": "one"}, {"type": "text", "text": " two\n"}, "three"]), assistant([{"type": "text", "text": "ok"}]), user("x", name="bob")]
TOOLS = [user("Weather?"), assistant(None, tool_calls=[CALL]), tool("rain"), assistant("It rains."), user("Again?"),
         assistant("", tool_calls=[CALL, EMPTY, BROKEN], reasoning_content="Let me see"), tool([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), tool("more")]
THINK = [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c"), assistant("d", reasoning="because"), user("e"), assistant("<think>x</think>f")]
ODD = [assistant("first"), user(""), user("twice"), assistant("x", tool_calls=[])]
REQUESTS = [
    {"messages": PLAIN}, {"messages": PLAIN, "add_generation_prompt": False}, {"messages": PLAIN[1:]}, {"messages": PLAIN, "add_special_tokens": True},
    {"messages": PARTS}, {"messages": TOOLS}, {"messages": TOOLS, "tools": [TOOL, BARE]}, {"messages": TOOLS[:1], "tools": [TOOL], "tool_choice": "none"},
    {"messages": PLAIN, "tools": []}, {"messages": THINK}, {"messages": THINK[:4]}, {"messages": THINK, "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": PLAIN, "reasoning_effort": "none"}, {"messages": PLAIN, "reasoning_effort": "low", "chat_template_kwargs": {"date_string": "today"}},
    {"messages": PLAIN, "reasoning_effort": "high", "chat_template_kwargs": {}}, {"messages": ODD}, {"messages": [system("only")]},
    {"messages": PLAIN[:3], "add_generation_prompt": False, "continue_final_message": True},
    {"messages": [user("go on"), assistant("One, two,  ")], "add_generation_prompt": False, "continue_final_message": True},
    {"messages": [system("a"), user("b"), system("c"), user("d")]}, {"messages": [user("1"), assistant("2"), user("3"), assistant("4"), user("5")]},
]


def prompt(tok, template, body):
    request = ChatCompletionRequest(model="m", **body)
    tools = None if request.tools is None else [t.model_dump() for t in request.tools]
    config = types.SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)
    conversation, _, _ = parse_chat_messages(request.messages, config, _detect_content_format(template, default="string"))
    kwargs = request.build_chat_params(template, "auto").with_defaults({"tools": tools, "tokenize": False}).get_apply_chat_template_kwargs()
    for name in ("tools", "chat_template", "tokenize", "return_dict"):
        kwargs.pop(name, None)
    return safe_apply_chat_template(config, tok, conversation, tools=tools, chat_template=template, tokenize=False, **kwargs)


def main(families, out):
    with gzip.open(families) as file:
        tokenizer = next(f["tokenizer"] for f in json.load(file)["families"] if f["name"] == "llama3")
    backend = Tokenizer.from_str(json.dumps(tokenizer))
    tok = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|im_end|>")
    rows = []
    for path in sorted(pathlib.Path(__file__).parent.glob("templates/*.jinja")):
        template = path.read_text()
        for body in REQUESTS:
            body = json.loads(json.dumps(body))
            row = {"template": path.stem, "body": json.dumps(body, ensure_ascii=False), "parts": _detect_content_format(template, default="string") == "openai"}
            try:
                row["text"] = prompt(tok, template, body)
                row["ids"] = backend.encode(row["text"], add_special_tokens=body.get("add_special_tokens", False)).ids
            except Exception as e:  # what vLLM refuses
                row["refused"] = str(e).splitlines()[0][:100]
            rows.append(row)
    print(sum("refused" in r for r in rows), "of", len(rows), "are refused", file=sys.stderr)
    with open(out, "wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as zipped:
        zipped.write(json.dumps(rows, ensure_ascii=False).encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
