"""Several choices, log probabilities, echoes and what changes the distribution, as users of OpenAI's client ask for them."""

import math

import openai
import pytest
from test_client import chat

PROMPT = "The miller opens the gate and"


def complete(client, model, **kw):
    kw = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0} | kw
    return client.completions.create(model=model, **kw)


def joined(chunks, n, text):
    """The texts, finish reasons and usage of a stream of n choices."""
    texts, finish, usage = [""] * n, [None] * n, None
    for c in chunks:
        usage = c.usage or usage
        for choice in c.choices:
            assert finish[choice.index] is None, "text behind the end"
            texts[choice.index] += text(choice) or ""
            finish[choice.index] = choice.finish_reason
    return texts, finish, usage


# ---- n


@pytest.mark.parametrize("n", [2, 5])
def test_n_of_chat(client, model, n):
    kw = dict(n=n, temperature=1.0, seed=3, max_tokens=16)
    r = chat(client, model, **kw)
    assert [c.index for c in r.choices] == list(range(n))
    texts = [c.message.content for c in r.choices]
    assert len(set(texts)) > 1, "the choices are all the same"
    single = chat(client, model, **(kw | {"n": 1}))
    assert single.choices[0].message.content == texts[0]
    assert r.usage.prompt_tokens == single.usage.prompt_tokens
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens
    assert n <= r.usage.completion_tokens <= 16 * n
    chunks = list(chat(client, model, stream=True, stream_options={"include_usage": True}, **kw))
    roles = [c.choices[0].index for c in chunks if c.choices and c.choices[0].delta.role]
    assert sorted(roles) == list(range(n))
    assert len({c.id for c in chunks}) == 1
    streamed, finish, usage = joined(chunks, n, lambda c: c.delta.content)
    assert streamed == texts
    assert finish == [c.finish_reason for c in r.choices]
    assert (usage.prompt_tokens, usage.completion_tokens) == (r.usage.prompt_tokens, r.usage.completion_tokens)


def test_n_of_completions(client, model):
    kw = dict(n=3, best_of=3, temperature=0.9, seed=8, max_tokens=10)
    r = complete(client, model, **kw)
    streamed, _, _ = joined(complete(client, model, stream=True, **kw), 3, lambda c: c.text)
    assert streamed == [c.text for c in r.choices]


def test_n_stops_each(client, model):
    """A choice that stops does not stop the others."""
    kw = dict(n=4, temperature=1.2, seed=21, max_tokens=40, stop=[" the", ","])
    r = complete(client, model, **kw)
    streamed, finish, _ = joined(complete(client, model, stream=True, **kw), 4, lambda c: c.text)
    assert streamed == [c.text for c in r.choices]
    assert finish == [c.finish_reason for c in r.choices]
    assert all(" the" not in c.text and "," not in c.text for c in r.choices)


# ---- logprobs


def check_entry(entry, top):
    assert entry.logprob <= 0
    assert bytes(entry.bytes).decode(errors="replace") == entry.token
    assert len(entry.top_logprobs) == top
    values = [t.logprob for t in entry.top_logprobs]
    assert values == sorted(values, reverse=True)
    assert sum(math.exp(v) for v in values) <= 1.0001


@pytest.mark.parametrize("top", [None, 0, 5, 20])
def test_chat_logprobs(client, model, top):
    kw = dict(logprobs=True) | ({} if top is None else {"top_logprobs": top})
    r = chat(client, model, **kw)
    content = r.choices[0].logprobs.content
    assert len(content) == r.usage.completion_tokens
    for entry in content:
        check_entry(entry, top or 0)
        if top:
            assert entry.top_logprobs[0].logprob == entry.logprob  # temperature 0
            assert entry.top_logprobs[0].token == entry.token
    text = b"".join(bytes(e.bytes) for e in content).decode()
    assert text.startswith(r.choices[0].message.content)
    streamed = [
        e
        for c in chat(client, model, stream=True, **kw)
        if c.choices and c.choices[0].logprobs
        for e in c.choices[0].logprobs.content
    ]
    assert [e.model_dump() for e in streamed] == [e.model_dump() for e in content]


def test_no_logprobs_unless_asked(client, model):
    assert chat(client, model).choices[0].logprobs is None
    assert chat(client, model, logprobs=False).choices[0].logprobs is None
    assert complete(client, model).choices[0].logprobs is None


@pytest.mark.parametrize("top", [0, 3])
def test_completion_logprobs(client, model, top):
    r = complete(client, model, logprobs=top)
    lp, text = r.choices[0].logprobs, r.choices[0].text
    n = r.usage.completion_tokens
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset) == n
    assert "".join(lp.tokens) == text
    assert [text[o : o + len(t)] for o, t in zip(lp.text_offset, lp.tokens)] == lp.tokens
    for token, value, best in zip(lp.tokens, lp.token_logprobs, lp.top_logprobs):
        assert best[token] == value == max(best.values())
        assert len(best) == max(top, 1)
    chunks = [c.choices[0].logprobs for c in complete(client, model, logprobs=top, stream=True) if c.choices and c.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [e for c in chunks for e in getattr(c, name)] == getattr(lp, name)


def test_sampling_does_not_change_logprobs(client, model):
    """They are the model's, whatever temperature and biases make of them."""
    plain = complete(client, model, max_tokens=1, logprobs=5).choices[0].logprobs.top_logprobs[0]
    bent = complete(client, model, max_tokens=1, logprobs=5, temperature=1.7, seed=4, presence_penalty=1.5).choices[0].logprobs
    assert {t: v for t, v in bent.top_logprobs[0].items() if t in plain} == plain


# ---- echo


def test_echo(client, model):
    plain = complete(client, model).choices[0].text
    assert complete(client, model, echo=True).choices[0].text == PROMPT + plain
    chunks = list(complete(client, model, echo=True, stream=True))
    assert chunks[0].choices[0].text == PROMPT
    assert "".join(c.choices[0].text for c in chunks) == PROMPT + plain


def test_echo_with_logprobs(client, model):
    kw = dict(echo=True, logprobs=2, max_tokens=4)
    r = complete(client, model, **kw)
    lp, text = r.choices[0].logprobs, r.choices[0].text
    assert len(lp.tokens) == r.usage.total_tokens
    assert lp.token_logprobs[0] is None and lp.top_logprobs[0] is None
    assert all(v is not None and v <= 0 for v in lp.token_logprobs[1:])
    assert "".join(lp.tokens) == text
    assert [text[o : o + len(t)] for o, t in zip(lp.text_offset, lp.tokens)] == lp.tokens
    # What was generated is as likely as it was when it was not part of an echo, and when it is part of a prompt.
    plain = complete(client, model, logprobs=2, max_tokens=4).choices[0].logprobs
    assert lp.token_logprobs[-4:] == plain.token_logprobs
    scored = complete(client, model, prompt=text, echo=True, logprobs=2, max_tokens=0)
    if scored.choices[0].logprobs.tokens == lp.tokens:
        assert scored.choices[0].logprobs.token_logprobs == lp.token_logprobs
    assert scored.usage.completion_tokens == 0
    assert scored.choices[0].text == text


# ---- what changes the distribution


def test_penalties(client, model):
    def ids(**kw):
        kw["extra_body"] = kw.get("extra_body", {}) | {"return_token_ids": True, "ignore_eos": True}
        return complete(client, model, prompt="one two one two one two", max_tokens=40, **kw).choices[0].model_extra["token_ids"]

    def repeats(tokens):
        return len(tokens) - len(set(tokens))

    plain = ids()
    for penalty in (
        dict(presence_penalty=2.0),
        dict(frequency_penalty=2.0),
        dict(extra_body={"repetition_penalty": 1.8}),
    ):
        tokens = ids(**penalty)
        assert ids(**penalty) == tokens, penalty
        assert repeats(tokens) < repeats(plain), penalty


def test_logit_bias(client, model):
    first = complete(client, model, max_tokens=1, extra_body={"return_token_ids": True}).choices[0]
    token = str(first.model_extra["token_ids"][0])
    banned = complete(client, model, max_tokens=1, logit_bias={token: -100}).choices[0]
    assert banned.text != first.text
    forced = complete(client, model, max_tokens=5, temperature=1.0, seed=1, logit_bias={token: 100}).choices[0]
    assert forced.text == first.text * 5


def test_min_p(client, model):
    """At 1 only the most likely token is left, whatever the temperature; lower, a hot answer stays likelier."""
    greedy = complete(client, model).choices[0].text
    hot = dict(temperature=2.0, seed=9)
    assert complete(client, model, **hot, extra_body={"min_p": 1.0}).choices[0].text == greedy
    assert complete(client, model, **hot).choices[0].text != greedy

    def likely(**kw):
        lp = complete(client, model, **hot, logprobs=0, max_tokens=24, **kw).choices[0].logprobs.token_logprobs
        return sum(lp) / len(lp)

    assert likely(extra_body={"min_p": 0.2}) > likely() + 1


# ---- what is refused


@pytest.mark.parametrize(
    "kw, param",
    [
        (dict(n=0), "n"),
        (dict(n=129), "n"),
        (dict(n=2, best_of=4), "best_of"),
        (dict(logprobs=21), "logprobs"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(suffix="end"), "suffix"),
        (dict(presence_penalty=3), "presence_penalty"),
        (dict(frequency_penalty=-2.1), "frequency_penalty"),
        (dict(extra_body={"repetition_penalty": 0}), "repetition_penalty"),
        (dict(extra_body={"min_p": -0.1}), "min_p"),
        (dict(logit_bias={"5": 101}), "logit_bias"),
        (dict(logit_bias={"99999999": 1}), "logit_bias"),
        (dict(extra_body={"response_format": {"type": "json_schema"}}), "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refused(client, model, kw, param, stream):
    with pytest.raises(openai.BadRequestError) as e:
        complete(client, model, stream=stream, **kw)
    assert e.value.param == param
    assert param in e.value.body["message"]
