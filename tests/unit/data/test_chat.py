"""Conversations become one document for each answer, of the text and the ids that transformers gives."""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from nxtrain.common.errors import ConfigError, DataError
from nxtrain.data.arrow import preparation
from nxtrain.data.arrow.chat import ChatTemplate
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.rows import BadRowError
from nxtrain.data.arrow.streams import Documents
from nxtrain.data.order import shuffled
from nxtrain.data.stream_loader import LaneOrder
from nxtrain.data.tokenization import TextTokenizer, load_tokenizer
from tests.support.corpora import prepare, write_file, write_tokenizer

VOCABULARY = 320
BEGIN, TURN, END = "<|begin|>", "<|turn|>", "<|end|>"
TEMPLATES = {
    "chatml": (
        "{{ bos_token }}{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
    ),
    "trimmed": """{% for m in messages %}
    {%- if loop.first and m.role == "system" %}
        {{- "[" + m.content | trim + "]" }}
        {%- continue %}
    {%- endif %}
    {{- "<|turn|>" + m.role + "\n\n" + m.content | trim + "<|end|>" }}
{% endfor %}
    {% if add_generation_prompt %}{{ "<|turn|>assistant\n\n" }}{% endif %}""",
    "strict": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}{% else %}{{ m | tojson }}<|end|>{% endif %}"
        "{% endfor %}"
    ),
}
TALK = [
    {"role": "system", "content": "Be \u2603 brief."},
    {"role": "user", "content": "What is snow?"},
    {"role": "assistant", "content": "Frozen water."},
    {"role": "user", "content": "And ice?"},
    {"role": "assistant", "content": "Frozen water,\n too. "},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with special tokens."""
    path = tmp_path_factory.mktemp("chat") / "tokenizer"
    write_tokenizer(path, VOCABULARY - 3)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (BEGIN, TURN, END)])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def configure(folder: Path, template: object, **changes: object) -> TextTokenizer:
    """The tokenizer with a template in its configuration."""
    config = {"bos_token": {"content": BEGIN}, "eos_token": END, "chat_template": template, **changes}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_tokenizer(folder, VOCABULARY)


def peer(folder: Path, template: str) -> PreTrainedTokenizerFast:
    file = str(folder / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=file, bos_token=BEGIN, eos_token=END, chat_template=template)


def documents(template: ChatTemplate, talk: object) -> list[tuple[str, str]]:
    return [(text[:length].decode(), text[length:].decode()) for text, length in template.documents(talk)]


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)
TALKS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXTS}), max_size=6
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TALKS, st.sampled_from(["chatml", "trimmed"]))
def test_drawn_conversations_are_written_as_transformers_writes_them(
    folder: Path, talk: list[dict[str, str]], name: str
) -> None:
    template, theirs = ChatTemplate(configure(folder, TEMPLATES[name])), peer(folder, TEMPLATES[name])
    answers = [number for number, turn in enumerate(talk) if turn["role"] == "assistant"]
    actual = documents(template, talk)
    assert len(actual) == len(answers)
    for number, (prompt, answer) in zip(answers, actual, strict=True):
        if number:  # transformers refuses a conversation without turns
            assert prompt == theirs.apply_chat_template(talk[:number], tokenize=False, add_generation_prompt=True)
        whole = theirs.apply_chat_template(talk[: number + 1], tokenize=False)
        assert (prompt + answer + END, whole.rstrip()) == (whole.rstrip(), prompt + answer + END)


def test_values_of_a_turn_are_json_and_a_template_may_refuse_a_conversation(folder: Path) -> None:
    template, theirs = ChatTemplate(configure(folder, TEMPLATES["strict"])), peer(folder, TEMPLATES["strict"])
    talk = [{"role": "user", "content": "<a> & 'b'?"}, {"role": "assistant", "content": "\u2603 <b>"}]
    ((prompt, answer),) = documents(template, talk)
    assert prompt + answer + END == theirs.apply_chat_template(talk, tokenize=False)
    with pytest.raises(BadRowError, match="turns must alternate"):
        documents(template, TALK)


@pytest.mark.parametrize(
    ("template", "date"),
    [
        ("{{ strftime_now('%Y-%m-%d') }}", "2024-07-26"),
        (
            "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}",
            "26 Jul 2024",
        ),
    ],
)
def test_a_template_gets_the_same_date_on_each_day(folder: Path, template: str, date: str) -> None:
    """As gpt-oss asks for the date, and as Llama 3.1 does."""
    (found, _) = documents(ChatTemplate(configure(folder, template + TEMPLATES["chatml"])), TALK)
    assert found[0].startswith(f"{date}{BEGIN}<|turn|>system")


def write(path: Path, talks: list[Any]) -> Path:
    table = pa.table({"id": [*range(len(talks))], "messages": talks})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=3)
    elif path.suffix == ".arrow":
        write_file(path, table)
    else:
        path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["a.jsonl", "a.parquet", "a.arrow"])
def test_a_corpus_has_the_ids_of_transformers_and_knows_the_answers(
    folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each conversation stays in one batch, so that a place of the journal is behind whole rows."""
    monkeypatch.setattr(preparation, "BATCH_ROWS", 3)
    configure(folder, TEMPLATES["chatml"])
    talks = [TALK, TALK[1:3], TALK[:2], TALK] * 2  # the third has no answer
    outcome = prepare(
        write(tmp_path / kind, talks), out=tmp_path / "o.arrow", tokenizer=folder, chat=True, field="messages"
    )
    assert [outcome.summary[key] for key in ("rows", "documents", "empty")] == [8, 10, 2]
    corpus, theirs = PreparedCorpus(tmp_path / "o.arrow"), peer(folder, TEMPLATES["chatml"])
    ends = [end for talk in talks for end, turn in enumerate(talk) if turn["role"] == "assistant"]
    owners = [talk for talk in talks for turn in talk if turn["role"] == "assistant"]
    table = pa.ipc.open_file(str(corpus.path)).read_all()
    for number, (talk, end) in enumerate(zip(owners, ends, strict=True)):
        prompt = theirs(
            theirs.apply_chat_template(talk[:end], tokenize=False, add_generation_prompt=True), add_special_tokens=False
        )
        ids = table["ids"][number].as_py()
        length = table["prompt"][number].as_py()
        assert ids[:length] == prompt["input_ids"]
        assert theirs.decode(ids[length:]) == talk[end]["content"] + END
        assert corpus.prompt(number, corpus.content(number)) == length
    assert [batch.num_rows for batch in table.to_batches()] == [3, 4, 3] if kind == "a.jsonl" else True


@pytest.mark.parametrize(
    ("talk", "says"),
    [
        ("hello", "not a list such as"),
        (None, "name its field with --field"),
        (["hello"], "turn 1 is not an object"),
        ([{"role": "user"}], 'turn 1 has no text in "content"'),
        ([TALK[0], {"role": "user", "content": f"x{END}{TURN}system"}], "turn 2 contains the special token '<|end|>'"),
        ([{"role": "user", "content": "\ud83d"}], "turn 1 holds half of a surrogate pair"),
        ([{"role": f"user{END}", "content": "x"}], "turn 1 contains the special token '<|end|>'"),
        ([TALK[1], {**TALK[2], "thinking": f"so{END}"}], "turn 2 contains the special token '<|end|>'"),
        ([TALK[1], {**TALK[2], "thinking": "\ud83d"}], "turn 2 holds half of a surrogate pair"),
        ([TALK[1], {**TALK[2], "tool_calls": [{"arguments": {"x": [TURN]}}]}], "turn 2 contains the special token"),
        ([TALK[1], {**TALK[2], "tool_calls": [{"arguments": {"\ud83d": 1}}]}], "turn 2 holds half of a surrogate"),
    ],
)
def test_what_is_no_conversation_is_a_bad_row(folder: Path, talk: object, says: str) -> None:
    template = ChatTemplate(configure(folder, TEMPLATES["chatml"]))
    with pytest.raises(BadRowError) as caught:
        list(template.documents(talk))
    assert says in caught.value.args[1]


def test_a_template_that_rewrites_earlier_turns_has_no_answers(folder: Path) -> None:
    rewriting = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(configure(folder, rewriting))
    with pytest.raises(BadRowError, match="differently from its prompt"):
        list(template.documents(TALK))


def test_the_template_may_be_a_file_or_one_of_several(folder: Path, tmp_path: Path) -> None:
    named = [{"name": name, "template": TEMPLATES[key]} for name, key in (("tool", "strict"), ("default", "chatml"))]
    plain = ChatTemplate(configure(folder, TEMPLATES["chatml"]))
    assert ChatTemplate(configure(folder, named)).digest == plain.digest
    file = folder / "chat_template.jinja"
    file.write_text(TEMPLATES["trimmed"], encoding="utf-8")
    try:
        assert ChatTemplate(configure(folder, named)).digest != plain.digest
    finally:
        file.unlink()
    configure(folder, None)
    talk = write(tmp_path / "a.jsonl", [TALK])
    prepare_talk = partial(prepare, talk, out=tmp_path / "o.arrow", chat=True, field="messages")
    with pytest.raises(ConfigError, match="has no chat template"):
        prepare_talk(tokenizer=folder)
    configure(folder, "{% if %}")
    with pytest.raises(ConfigError, match="is not a template"):
        prepare_talk(tokenizer=folder)
    with pytest.raises(ConfigError, match="give its folder with --tokenizer"):
        prepare_talk()
    with pytest.raises(ConfigError, match="give one of the two"):
        prepare_talk(tokenizer=folder, prompt="q")


def drawn_talk(rng: Random, num_answers: int) -> list[dict[str, str]]:
    """Conversation with a common system prompt, short questions, and answers that begin with drawn white space."""
    turns = [TALK[0]] if rng.random() < 0.7 else []
    for _ in range(num_answers):
        question = "".join(rng.choices("ab \n", k=rng.choice((1, 2, 9))))
        answer = rng.choice(("", " ", "\n", "\n\n")) + "".join(rng.choices("yn\n ", k=rng.choice((1, 5)))) + "."
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


@pytest.mark.parametrize("name", ["chatml", "trimmed"])
@pytest.mark.parametrize("seed", range(3))
def test_all_answers_of_a_conversation_are_on_one_side_of_the_split(
    folder: Path, tmp_path: Path, name: str, seed: int
) -> None:
    configure(folder, TEMPLATES[name])
    rng = Random(seed)
    talks = [drawn_talk(rng, rng.choice((1, 1, 2, 5))) for _ in range(60)]
    talks += rng.choices(talks, k=10)  # equal conversations
    lines = write(tmp_path / "talks.jsonl", talks)
    prepare(lines, out=tmp_path / "o.arrow", tokenizer=folder, chat=True, field="messages")
    corpus = PreparedCorpus(tmp_path / "o.arrow")
    owners = [number for number, talk in enumerate(talks) for turn in talk if turn["role"] == "assistant"]
    assert len(owners) == len(corpus)
    documents = Documents(corpus, None, VOCABULARY, held_out=0.4)
    sides: dict[int, set[bool]] = {}
    for document, owner in enumerate(owners):
        sides.setdefault(owner, set()).add(documents.is_held_out(document, corpus.content(document)))
    assert {len(side) for side in sides.values()} == {1}
    assert 10 < sum(side == {True} for side in sides.values()) < 50
    side_of: dict[str, set[bool]] = {}
    for owner, side in sides.items():
        assert side_of.setdefault(json.dumps(talks[owner]), side) == side
    order = LaneOrder(1, 0, True)
    read = [order_of[0] for order_of in islice(documents.lane(order, 0), len(corpus))]
    passed = shuffled(np.array(read), len(corpus), order.seed).tolist()
    assert {owners[document] for document in passed} == {owner for owner, side in sides.items() if side == {False}}


TOOLED = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATES["strict"]
CALLS = [{"name": "rain", "arguments": {"place": "Bern"}}, {"name": "snow", "arguments": {"depth": 2, "of": ["x"]}}]
TOOLS = [
    [{"name": call["name"], "parameters": {"keys": [*call["arguments"]], call["name"]: {"type": "x"}}}]
    for call in CALLS
]


@pytest.mark.parametrize("kind", ["a.jsonl", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("as_text", [True, False])
def test_tools_and_calls_are_written_as_transformers_writes_them(
    folder: Path, tmp_path: Path, kind: str, as_text: bool
) -> None:
    """Columns of a table give each object the keys of all others, with null."""
    configure(folder, TOOLED)
    theirs = peer(folder, TOOLED)
    talks = [[TALK[1], {**TALK[2], "tool_calls": [{"function": call}]}] for call in CALLS] + [TALK[1:3]]
    tools = [*TOOLS, None]
    listed = [json.dumps(item) if as_text and item else item for item in tools]
    path = tmp_path / kind
    if kind == "a.jsonl":
        lines = [{"messages": talk, "tools": item} for talk, item in zip(talks, listed, strict=True)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    elif kind == "a.parquet":
        pq.write_table(pa.table({"messages": talks, "tools": listed}), path)
    else:
        write_file(path, pa.table({"messages": talks, "tools": listed}))
    prepare(path, out=tmp_path / "o.arrow", tokenizer=folder, chat=True, field="messages")
    corpus = PreparedCorpus(tmp_path / "o.arrow")
    for number, (talk, item) in enumerate(zip(talks, tools, strict=True)):
        whole = json.loads(
            theirs.apply_chat_template(talk, tools=item, tokenize=False).partition("[/INST]")[2].removesuffix(END)
        )
        found = theirs.decode(corpus.ids(number))
        described, _, answer = found.removesuffix(END).partition("[INST]")
        assert json.loads(answer.partition("[/INST]")[2]) == whole == talk[1]
        assert (json.loads(described) if described else None) == item


@pytest.mark.parametrize("kind", ["a.parquet", "save_to_disk"])
@pytest.mark.parametrize("whole", [True, False])
def test_json_of_hugging_faces_datasets_is_decoded(folder: Path, tmp_path: Path, kind: str, whole: bool) -> None:
    """Turns are JSON as a whole, or only the arguments of calls are."""
    datasets = pytest.importorskip("datasets", reason="no datasets: it comes with lm_eval")
    configure(folder, TOOLED)
    talks = [[TALK[1], {**TALK[2], "tool_calls": [call]}] for call in CALLS]
    text, turn = datasets.Value("string"), datasets.Json()
    if not whole:
        turn = {
            "role": text,
            "content": text,
            "tool_calls": datasets.List({"name": text, "arguments": datasets.Json()}),
        }
    features = datasets.Features({"messages": datasets.List(turn), "tools": datasets.List(datasets.Json())})
    given = datasets.Dataset.from_dict({"messages": talks, "tools": TOOLS}, features=features)
    if kind == "a.parquet":
        given.to_parquet(tmp_path / kind)
    else:
        given.save_to_disk(tmp_path / kind)
    prepare(tmp_path / kind, out=tmp_path / "o.arrow", tokenizer=folder, chat=True, field="messages")
    corpus, theirs = PreparedCorpus(tmp_path / "o.arrow"), peer(folder, TOOLED)
    for number, talk in enumerate(talks):
        described, _, rest = theirs.decode(corpus.ids(number)).removesuffix(END).partition("[INST]")
        assert json.loads(described) == TOOLS[number]
        assert json.loads(rest.partition("[/INST]")[2]) == talk[1]


def test_broken_json_in_a_column_is_a_bad_row(folder: Path, tmp_path: Path) -> None:
    configure(folder, TOOLED)
    column = pa.array(['[{"name": "x"}]', "[{"], pa.json_())
    write_file(tmp_path / "a.arrow", pa.table({"messages": [TALK[1:3], TALK[1:3]], "tools": column}))
    with pytest.raises(DataError, match="row 2: broken JSON"):
        prepare(tmp_path / "a.arrow", out=tmp_path / "o.arrow", tokenizer=folder, chat=True, field="messages")


@pytest.mark.parametrize("kind", ["pairs", "labels"])
def test_answers_that_are_compared_have_tools_too(folder: Path, tmp_path: Path, kind: str) -> None:
    configure(folder, TOOLED)
    answers = (
        {"chosen": "Frozen.", "rejected": "Sand."} if kind == "pairs" else {"completion": "Frozen.", "label": True}
    )
    line = {"prompt": "What is snow?", **answers, "tools": TOOLS[0]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    prepare(
        tmp_path / "a.jsonl",
        out=tmp_path / "o.arrow",
        tokenizer=folder,
        chat=True,
        pairs=kind == "pairs",
        labels=kind == "labels",
    )
    corpus, theirs = PreparedCorpus(tmp_path / "o.arrow"), peer(folder, TOOLED)
    texts = [theirs.decode(corpus.ids(number)) for number in range(len(corpus))]
    assert [json.loads(text.partition("[INST]")[0]) for text in texts] == [TOOLS[0]] * len(corpus)


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ("[{", '"tools" is not JSON'),
        ([1], '"tools" is not a list of objects'),
        ([{"name": END}], "\"tools\" contains the special token '<|end|>'"),
        ([{"name": "\ud83d"}], '"tools" holds half of a surrogate pair'),
    ],
)
def test_what_describes_no_tools_is_a_bad_row(folder: Path, tools: object, says: str) -> None:
    template = ChatTemplate(configure(folder, TOOLED))
    with pytest.raises(BadRowError) as caught:
        list(template.documents(TALK[1:3], tools))
    assert says in caught.value.args[1]


def test_another_template_is_another_corpus(folder: Path, tmp_path: Path) -> None:
    talk = write(tmp_path / "a.jsonl", [TALK])
    for name in ("chatml", "trimmed"):
        configure(folder, TEMPLATES[name])
        if name == "trimmed":
            with pytest.raises(DataError, match="chat: "):
                prepare(talk, out=tmp_path / "o.arrow", tokenizer=folder, chat=True, field="messages")
        else:
            prepare(talk, out=tmp_path / "o.arrow", tokenizer=folder, chat=True, field="messages")
