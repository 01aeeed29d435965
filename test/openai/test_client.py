"""What users of OpenAI's client do with a server."""

import asyncio
import threading

import openai
import pytest
from conftest import eventually, idle, need, worker_status

GREEN = [{"role": "user", "content": "Name three colours."}]


def chat(client, model, **kw):
    kw = {"messages": GREEN, "max_tokens": 24, "temperature": 0} | kw
    return client.chat.completions.create(model=model, **kw)


def text_of(stream):
    """Reads a chat stream to its end: text, finish reason, usage, chunks."""
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    finish = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    usage = [c.usage for c in chunks if c.usage is not None]
    assert len(finish) == 1
    return text, finish[0], usage, chunks


# ---- models


def test_models_list_and_retrieve(client, model):
    models = client.models.list().data
    assert [m.object for m in models] == ["model"]
    assert client.models.retrieve(model).id == model


def test_unknown_model_retrieved(client):
    with pytest.raises(openai.NotFoundError) as e:
        client.models.retrieve("no-such-model")
    assert e.value.code == "model_not_found"


# ---- chat


def test_chat(client, model):
    r = chat(client, model)
    assert r.object == "chat.completion"
    assert r.id.startswith("chatcmpl-")
    assert r.model == model
    assert r.created > 1_600_000_000
    assert len(r.choices) == 1
    choice = r.choices[0]
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert r.usage.prompt_tokens > 0
    assert 0 < r.usage.completion_tokens <= 24
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens


def test_chat_stream_equals_whole(client, model):
    whole = chat(client, model)
    text, finish, usage, chunks = text_of(chat(client, model, stream=True))
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage == []
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({c.id for c in chunks}) == 1
    assert len({c.created for c in chunks}) == 1
    assert len(chunks) > 3, "the answer came in one piece"


def test_chat_stream_usage(client, model):
    whole = chat(client, model)
    _, _, usage, chunks = text_of(chat(client, model, stream=True, stream_options={"include_usage": True}))
    assert len(usage) == 1
    assert chunks[-1].usage is not None and chunks[-1].choices == []
    assert (usage[0].prompt_tokens, usage[0].completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage[0].total_tokens == usage[0].prompt_tokens + usage[0].completion_tokens


def test_chat_stream_helper(client, model):
    """The client's own accumulator is stricter than a loop. It wants answers that end by themselves."""
    kw = dict(messages=[{"role": "user", "content": "Say hi."}], max_tokens=200)
    with client.chat.completions.stream(model=model, temperature=0, **kw) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == chat(client, model, **kw).choices[0].message.content


def test_chat_system_and_turns(client, model):
    r = chat(
        client,
        model,
        messages=[
            {"role": "system", "content": "You answer in one word."},
            {"role": "user", "content": [{"type": "text", "text": "Which colour has"}, {"type": "text", "text": "the sky?"}]},
            {"role": "assistant", "content": "Blue"},
            {"role": "user", "content": "And grass?"},
        ],
    )
    assert r.choices[0].message.content


def test_max_completion_tokens(client, model):
    r = chat(client, model, max_tokens=openai.omit, max_completion_tokens=5)
    assert r.usage.completion_tokens <= 5


def test_one_token(client, model):
    """Token one ends the request: prefill alone answers."""
    r = chat(client, model, max_tokens=1)
    assert r.usage.completion_tokens == 1
    assert r.choices[0].finish_reason == "length"
    text, finish, _, _ = text_of(chat(client, model, max_tokens=1, stream=True))
    assert (text, finish) == (r.choices[0].message.content, "length")


def test_ends_by_itself(client, model):
    """A short answer ends with the model's end token, which is not shown."""
    r = chat(client, model, messages=[{"role": "user", "content": "Say hi."}], max_tokens=200)
    assert r.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in r.choices[0].message.content


def test_seed(client, model):
    def once(seed):
        return chat(client, model, temperature=1.0, top_p=0.95, seed=seed, max_tokens=20).choices[0].message.content

    assert once(7) == once(7)
    assert len({once(s) for s in range(4)}) > 1
    assert once(-1) == once(-1)


def test_seed_stream_equals_whole(client, model):
    kw = dict(temperature=0.9, seed=11, max_tokens=20, extra_body={"top_k": 30})
    text, _, _, _ = text_of(chat(client, model, stream=True, **kw))
    assert text == chat(client, model, **kw).choices[0].message.content


def test_no_seed_differs(client, model):
    answers = {chat(client, model, temperature=1.5, max_tokens=20).choices[0].message.content for _ in range(4)}
    assert len(answers) > 1


# ---- stop


def test_stop_string(client, model):
    full = chat(client, model, max_tokens=40).choices[0].message.content
    stop = full[len(full) // 2 : len(full) // 2 + 3]
    want = full[: full.index(stop)]
    r = chat(client, model, max_tokens=40, stop=stop)
    assert r.choices[0].message.content == want
    assert r.choices[0].finish_reason == "stop"
    text, finish, _, _ = text_of(chat(client, model, max_tokens=40, stop=stop, stream=True))
    assert (text, finish) == (want, "stop")


def test_stop_list_first_wins(client, model):
    full = chat(client, model, max_tokens=40).choices[0].message.content
    early, late = full[6:8], full[20:23]
    want = full[: min(full.index(early), full.index(late))]
    r = chat(client, model, max_tokens=40, stop=[late, early, "never to be seen \u2603"])
    assert r.choices[0].message.content == want


def test_stop_in_first_token(client, model):
    full = chat(client, model).choices[0].message.content
    r = chat(client, model, stop=full[0])
    assert r.choices[0].message.content == ""
    assert r.choices[0].finish_reason == "stop"
    text, finish, _, _ = text_of(chat(client, model, stop=full[0], stream=True))
    assert (text, finish) == ("", "stop")


def test_stop_that_never_comes(client, model):
    """What is held back for a stop string that stays away is given at the end."""
    full = chat(client, model).choices[0].message.content
    text, _, _, _ = text_of(chat(client, model, stop=full[-4:] + "\u2603", stream=True))
    assert text == full


# ---- completions


def test_completion(client, model):
    r = client.completions.create(model=model, prompt="The sky is", max_tokens=8, temperature=0)
    assert r.object == "text_completion"
    assert r.choices[0].text
    assert r.usage.completion_tokens <= 8
    stream = list(client.completions.create(model=model, prompt="The sky is", max_tokens=8, temperature=0, stream=True))
    assert "".join(c.choices[0].text for c in stream) == r.choices[0].text
    assert stream[-1].choices[0].finish_reason == r.choices[0].finish_reason


def test_completion_stream_usage(client, model):
    stream = list(
        client.completions.create(
            model=model, prompt="Rivers run", max_tokens=6, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert stream[-1].usage.completion_tokens <= 6
    assert sum(c.usage is not None for c in stream) == 1


def test_completion_of_tokens(client, model):
    r = client.completions.create(model=model, prompt=[504, 3950, 314], max_tokens=4, temperature=0)
    assert r.usage.prompt_tokens == 3


def test_completion_stop_and_default_length(client, model):
    r = client.completions.create(model=model, prompt="One two three four", temperature=0)
    assert r.usage.completion_tokens <= 16
    full = client.completions.create(model=model, prompt="One two three four", temperature=0, max_tokens=30).choices[0].text
    stop = full[10:12]
    cut = client.completions.create(model=model, prompt="One two three four", temperature=0, max_tokens=30, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (full[: full.index(stop)], "stop")


def test_unicode(client, model):
    """Text that needs several tokens a character arrives whole."""
    r = chat(client, model, messages=[{"role": "user", "content": "Repeat: 水車 🌊 Zürich"}], max_tokens=32)
    text, _, _, _ = text_of(chat(client, model, messages=[{"role": "user", "content": "Repeat: 水車 🌊 Zürich"}], max_tokens=32, stream=True))
    assert text == r.choices[0].message.content


# ---- errors


@pytest.mark.parametrize(
    "kw, param",
    [
        (dict(temperature=9), "temperature"),
        (dict(top_p=1.5), "top_p"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(n=0), "n"),
        (dict(top_logprobs=3), "top_logprobs"),
        (dict(messages=[]), "messages"),
        (dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), None),
        (dict(stop=["x"] * 99), "stop"),
        (dict(seed="not a number"), "seed"),
        (dict(extra_body={"kv_transfer_params": {"role": "decode"}}), "kv_transfer_params"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_parameter(client, model, kw, param, stream):
    with pytest.raises(openai.BadRequestError) as e:
        chat(client, model, stream=stream, **kw)
    assert e.value.type == "invalid_request_error"
    assert e.value.body["message"]
    if param:
        assert e.value.param == param


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model(client, stream):
    with pytest.raises(openai.NotFoundError) as e:
        chat(client, "no-such-model", stream=stream)
    assert e.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_too_long(client, model, stream):
    limit = client.models.retrieve(model).max_model_len
    with pytest.raises(openai.BadRequestError) as e:
        chat(client, model, messages=[{"role": "user", "content": "word " * (limit + 100)}], stream=stream)
    assert e.value.code == "context_length_exceeded"
    assert str(limit) in e.value.body["message"]


def test_too_many_tokens_wanted(client, model):
    limit = client.models.retrieve(model).max_model_len
    with pytest.raises(openai.BadRequestError) as e:
        chat(client, model, max_tokens=limit)
    assert e.value.code == "context_length_exceeded"


def test_unknown_path(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="x", input="y")


def test_not_json(client, model):
    with pytest.raises(openai.BadRequestError):
        client.post("/chat/completions", cast_to=object, content=b'{"model": ', options={"headers": {"content-type": "application/json"}})


# ---- API keys


def test_keys(model):
    keyed, key = need("HEADRACE_KEYED_URL"), need("HEADRACE_KEY")
    with openai.OpenAI(base_url=keyed, api_key=key, max_retries=0) as good:
        name = good.models.list().data[0].id
        assert good.completions.create(model=name, prompt="a", max_tokens=2).usage.completion_tokens <= 2
    for wrong in ("wrong", key[:-1], key + "x"):
        with openai.OpenAI(base_url=keyed, api_key=wrong, max_retries=0) as bad:
            with pytest.raises(openai.AuthenticationError) as e:
                bad.models.list()
            assert e.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                bad.completions.create(model=name, prompt="a", max_tokens=2, stream=True)


# ---- clients that leave


def test_hang_up_in_the_middle(client, model):
    """A client that leaves gives its blocks back, and the next one is served."""
    eventually(idle)
    stream = chat(client, model, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    for i, _ in enumerate(stream):
        if i == 5:
            break
    stream.close()
    eventually(idle)
    assert chat(client, model, max_tokens=4).choices[0].message.content


def test_hang_up_while_waiting(client, model):
    """A client that waits for a whole answer and gives up."""
    eventually(idle)
    with pytest.raises(openai.APITimeoutError):
        chat(client, model, max_tokens=1500, timeout=1.0, extra_body={"ignore_eos": True})
    eventually(idle)
    assert chat(client, model, max_tokens=4).choices[0].message.content


def test_async_cancel(url, model):
    async def leave():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as c:
            first = asyncio.Event()

            async def read():
                stream = await c.chat.completions.create(model=model, messages=GREEN, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
                async for _ in stream:
                    first.set()

            task = asyncio.create_task(read())
            await asyncio.wait_for(first.wait(), 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    eventually(idle)
    asyncio.run(leave())
    eventually(idle)


# ---- together


def test_many_threads(client, model):
    """Answers do not depend on who else is served."""
    prompts = [f"Tell me about the number {i}." for i in range(8)]
    alone = [chat(client, model, messages=[{"role": "user", "content": p}], max_tokens=12).choices[0].message.content for p in prompts]
    together = [None] * len(prompts)

    def one(i):
        together[i] = chat(client, model, messages=[{"role": "user", "content": prompts[i]}], max_tokens=12).choices[0].message.content

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert together == alone


def test_disaggregated(client, model):
    """KV that was computed by the prefill worker arrives at the decode worker."""

    def arrived():
        return sum(s["counters"]["ExternalHits"] for s in worker_status() if s["role"] == "decode")

    before = arrived()
    r = client.completions.create(model=model, prompt="Wheels turn. " * 20, max_tokens=4, temperature=0)
    assert r.usage.completion_tokens
    assert arrived() > before
