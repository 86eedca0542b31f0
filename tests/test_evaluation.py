"""Suites and their prompts."""

import gzip
import json
import re
from importlib import resources
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from clusterkv_jax.evaluation.tasks import documents, longbench, perplexity, ruler, sources, suites, synthetic, turns
from clusterkv_jax.evaluation.tasks.cases import Case, build_prompt, counter, query_aware
from clusterkv_jax.evaluation.tasks.suites import Options
from tests.support.shared_data import shared

TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}<bot>"
MARK = "*** {} OF THE PROJECT GUTENBERG EBOOK X ***"


@pytest.fixture(scope="module")
def tokenizer():
    """The demo's tokenizer, which has no chat template."""
    return AutoTokenizer.from_pretrained(str(resources.files("clusterkv_jax.models") / "demo"))


@pytest.fixture(scope="module")
def chatting(tokenizer):
    other = AutoTokenizer.from_pretrained(str(resources.files("clusterkv_jax.models") / "demo"))
    other.chat_template = TEMPLATE
    return other


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> PreTrainedTokenizerFast:
    """Qwen2's published tokenizer, with its chat template."""
    folder, packed = tmp_path_factory.mktemp("qwen2"), shared("data/hub/tokenizers/qwen2")
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_bytes(gzip.decompress((packed / f"{name}.gz").read_bytes()))
    (folder / "tokenizer_config.json").write_bytes((packed / "tokenizer_config.json").read_bytes())
    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def prose(tmp_path_factory):
    """A book of made-up sentences."""
    rng = np.random.default_rng(0)
    listed = synthetic.words("nouns")
    text = " ".join(" ".join(rng.choice(listed, rng.integers(4, 24))).capitalize() + "." for _ in range(500))
    file = tmp_path_factory.mktemp("books") / "made_up.txt"
    file.write_text("\n".join(["Title", MARK.format("START"), text, MARK.format("END"), "Licence"]))
    return str(file)


# --- prompts ---


def test_parts_become_tokens_and_the_template_goes_around_the_context(tokenizer, chatting):
    case = Case("x", "t", "Some context.\n", "What is it?", " It is", max_new_tokens=8)
    plain = build_prompt(case, tokenizer, 512)
    assert tokenizer.decode(plain.context, skip_special_tokens=True) == "Some context.\n"
    assert tokenizer.decode(plain.question) == "What is it? It is"
    chat = build_prompt(case, chatting, 512)
    assert chatting.decode(chat.context) == "<user>Some context.\n"
    assert chatting.decode(chat.question) == "What is it?</user><bot> It is"
    aware = build_prompt(query_aware(case), chatting, 512)
    assert chatting.decode(aware.context) == "<user>Some context.\nWhat is it?"
    assert chatting.decode(aware.question) == "</user><bot> It is"
    whole = build_prompt(Case("x", "t", "All of it."), chatting, 512)
    assert chatting.decode(whole.context) == "<user>All of it.</user><bot>"
    assert whole.question == ()


def test_what_does_not_fit_is_cut_in_the_middle_or_refused(tokenizer):
    case = Case("x/1", "t", " ".join(map(str, range(400))), "Why?", " So", max_new_tokens=10, truncate=True)
    whole = build_prompt(case, tokenizer, 10_000).context
    room = 200 - 10 - len(build_prompt(case, tokenizer, 10_000).question)
    cut = build_prompt(case, tokenizer, 200)
    assert cut.context == whole[: room // 2] + whole[-(room // 2) :]
    assert cut.cut == len(whole) - room // 2 * 2
    said = r"case x/1 has \d+ tokens of context, .* exceed the model's 200 positions"
    with pytest.raises(ValueError, match=said):
        build_prompt(Case("x/1", "t", case.context, "Why?"), tokenizer, 200)


def longbench_rows(task) -> Any:
    return sources.read_rows(shared(f"data/longbench/examples/{task}.jsonl.gz"), longbench.LongBenchRecord)


@pytest.mark.parametrize("task", ["hotpotqa", "trec", "samsum", "lsht", "lcc", "gov_report"])
def test_longbench_prompts_are_the_official_ones(task, qwen):
    template = json.loads(shared("data/longbench/config/dataset2prompt.json").read_text(encoding="utf-8"))[task]
    lengths = json.loads(shared("data/longbench/config/dataset2maxlen.json").read_text())
    row = longbench_rows(task)[0]
    text = template.format(**row)
    assert "".join(longbench.parts(task, row)) == text
    # The official way to cut: halves of the limit from both ends, as text, then the chat template.
    ids = qwen(text).input_ids
    limit = len(ids) // 2 + 600
    case = longbench.official_case(task, 0, row, qwen, limit)
    room = limit - max(500, lengths[task] + 64)
    expected = "".join(qwen.decode(part, skip_special_tokens=True) for part in (ids[: room // 2], ids[-(room // 2) :]))
    assert case.context == (expected if len(ids) > room else text)
    assert case.max_new_tokens == lengths[task]
    if task in ("hotpotqa", "gov_report"):
        turn = [{"role": "user", "content": case.context}]
        expected = qwen.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    else:
        expected = case.context
    assert qwen.decode(build_prompt(case, qwen, 10**6).context) == expected


def test_longbench_is_divided_as_kvpress_does(qwen):
    row = longbench_rows("hotpotqa")[0]
    case = longbench.kvpress_case("hotpotqa", 0, row)
    assert case.question == f"Question: {row['input']}\n"
    assert case.answer_prefix == "Answer:"
    assert case.max_new_tokens == 32 + 20
    assert case.context.endswith("only give me the answer and do not output any other words.\n\n".capitalize())
    divided = {**row, "context": "C", "question": "Q", "answer_prefix": "A"}
    del divided["input"]
    assert longbench.kvpress_case("hotpotqa", 0, divided).context == "C"
    prompt_parts = build_prompt(case, qwen, 10**6)
    assert qwen.decode(prompt_parts.question).endswith("<|im_end|>\n<|im_start|>assistant\nAnswer:")


def test_genuine_rows_of_ruler_keep_their_text(qwen):
    rows: Any = sources.read_rows(shared("data/ruler/niah_multikey_3_4096_first60.jsonl.gz"), ruler.RulerRecord)
    cases = ruler.published(rows, 4096, "niah_multikey_3")
    assert len(cases) == 60
    for row, case in list(zip(rows, cases, strict=True))[:5]:
        assert case.context + case.question + case.answer_prefix == row["input"]
        assert case.question.startswith("What is the special magic uuid for ")
        assert case.question.endswith("provided text?")
        assert case.answers[0] in case.context
        prompt_parts = build_prompt(case, qwen, 32768)
        turn = [{"role": "user", "content": case.context + case.question}]
        text = qwen.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + case.answer_prefix
        assert qwen.decode(prompt_parts.context) + qwen.decode(prompt_parts.question) == text
        # The generator's wording is the published one: the same frame around other needles.
        spec = synthetic.NEEDLE_TASKS["niah_multikey_3"]
        (mine,) = synthetic.niah(np.random.default_rng(0), 900, counter(qwen), spec)
        assert _frame(mine.prompt) == _frame(row["input"])


def _frame(text):
    """A prompt of uuid needles without its needles, of which the last may be cut short."""
    text = re.sub(r"\nOne of the special magic uuids for [^\n]*", "", text)
    return re.sub(r"[0-9a-f-]{36}", "U", text)


def test_the_papers_subset_is_the_one_they_count():
    subset = ruler.papers_subset(6500)
    counts = [122, 109, 89, 104, 88, 88, 99, 108, 88, 102, 111, 102, 90]  # of the 13 tasks, 500 rows each
    assert len(subset) == len(set(subset)) == 1300
    assert sorted(np.bincount(np.asarray(subset) // 500).tolist()) == sorted(counts)


# --- suites ---


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Question files in SQuAD's and HotpotQA's layouts."""
    folder = tmp_path_factory.mktemp("questions")

    def paragraph(i):
        answers = [{"text": f"shade {i}"}] * 2
        problem = {"question": f"What is the colour of thing {i}?", "answers": answers}
        text = f"The colour of thing {i} is shade {i}. " + "It is so. " * 20
        return {"context": text, "qas": [problem, {"question": "Unanswerable?", "answers": []}]}

    def hotpot_row(i):
        context = [[f"Title {i} {j}", [f"Fact {j} of {i} is answer {i}.", " More follows."]] for j in range(2)]
        return {"question": f"Which is {i}?", "answer": f"answer {i}", "context": context}

    (folder / "squad.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph(i) for i in range(40)]}]}))
    hotpot = [hotpot_row(i) for i in range(40)]
    (folder / "hotpot.json").write_text(json.dumps(hotpot))
    return str(folder)


def test_ruler_generates_every_task_at_its_length(tokenizer, prose, questions):
    examples = suites.cases("ruler", Options(lengths=(1024,), limit=2, books=prose, data=questions), tokenizer, 8192)
    assert [case.task for case in examples[::2]] == list(suites.SUITES["ruler"].tasks)
    assert len({case.id for case in examples}) == len(examples) == 26
    for case in examples:
        made_prompt = build_prompt(case, tokenizer, 1024)  # room for question and answer is within the length
        assert len(made_prompt.context) > 0.8 * (1024 - case.max_new_tokens - ruler.QUESTION_ROOM)
        assert all(answer in case.context for answer in case.answers)
        assert "Licence" not in case.context
        assert ("depth" in case.facts) == (case.task.startswith("niah") and len(case.answers) == 1)
    again = suites.cases("ruler", Options(tasks=("qa_1",), lengths=(1024,), limit=1, data=questions), tokenizer, 8192)
    assert again[0] == next(case for case in examples if case.task == "qa_1")
    assert len(again[0].answers) == 1


def test_a_group_stands_for_its_tasks_and_each_is_asked_once(tokenizer, prose):
    options = Options(tasks=("niah_multiquery", "needles"), lengths=(768,), limit=1, books=prose)
    tasks = [case.task for case in suites.cases("ruler", options, tokenizer, 8192)]
    assert tasks == ["niah_multiquery", *(name for name in synthetic.NEEDLE_TASKS if name != "niah_multiquery")]


def test_questions_stand_among_documents_that_do_not_answer(tokenizer, questions):
    library = documents.from_squad(sources.read_json(sources.local(questions, ["squad*"]), documents.SquadFile))
    assert len(library.questions) == 40
    example = documents.question(np.random.default_rng(0), 700, counter(tokenizer), library, 3, "qa_1")
    listed = re.findall(r"Document (\d+):\n(.*)", example.context)
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    assert sum("thing 3 " in text for _, text in listed) == 1
    assert len(listed) > 3
    with pytest.raises(ValueError, match="too small for the documents of question 3"):
        documents.question(np.random.default_rng(0), 60, counter(tokenizer), library, 3, "qa_1")


def test_questions_whose_documents_do_not_fit_are_left_out(tokenizer):
    texts = ("a short one. " * 3, "a long one. " * 60)
    library = documents.Library(texts, tuple(documents.Question(f"{i}?", (f"{i}",), (i,)) for i in range(2)))
    assert documents.fitting(library, 200, counter(tokenizer), "qa_1").questions == library.questions[:1]
    with pytest.raises(ValueError, match="length = 20 tokens is too small for the documents of any question of qa_1"):
        documents.fitting(library, 20, counter(tokenizer), "qa_1")


def test_grids_and_lines_and_positions(tokenizer, prose):
    grid = suites.cases("niah", Options(lengths=(512, 768), limit=1, books=prose), tokenizer, 8192)
    assert len(grid) == 22
    for case in grid:
        place = case.context.index(case.answers[0]) / len(case.context)
        assert abs(place - case.facts["depth"]) < 0.2
    examples = suites.cases("longeval", Options(lengths=(700,), limit=2), tokenizer, 8192)
    assert len({case.context for case in examples}) == 2
    for case in examples:
        key = re.search(r"in line (\S+)\? I need", case.question).group(1)
        assert f"line {key}: REGISTER_CONTENT is <{case.answers[0]}>\n" in case.context
    read = suites.cases("pg19", Options(lengths=(2048,), limit=1, books=prose), tokenizer, 8192)
    assert [case.facts["position"] for case in read] == perplexity.positions(2048)
    whole = tokenizer.encode(sources.books(prose)["made_up"], add_special_tokens=False)
    for case in read:
        assert case.reading is not None
        context, block = case.reading
        text = [*context, *block]
        start = next(i for i in range(len(whole)) if whole[i : i + 40] == text[:40])
        assert whole[start : start + len(text)] == text
        assert len(block) == perplexity.BLOCK


def test_turns_stand_behind_the_context_or_ask_it_alone(tokenizer, chatting, prose):
    options = Options(lengths=(1024,), limit=2, books=prose)
    asked = suites.cases("turns", options, tokenizer, 8192)
    assert [case.task for case in asked[:10]] == list(turns.TASKS)
    assert len({case.context for case in asked}) == 2
    assert len({case.answers for case in asked}) == 10
    for case, alone in zip(asked[:5], asked[5:10], strict=True):
        assert case.answers == alone.answers
        assert case.answers[0] in case.context
        prompt = build_prompt(case, tokenizer, 1024)
        said = "".join(
            f"{each.question}{each.answer_prefix} {each.answers[0]}.\n" for each in asked[: len(case.earlier)]
        )
        assert tokenizer.decode(prompt.question) == said + case.question + case.answer_prefix
        assert prompt.context == build_prompt(alone, tokenizer, 1024).context
    third = asked[2]
    prompt = build_prompt(third, chatting, 1024)
    (q1, a1), (q2, a2) = third.earlier
    assert chatting.decode(prompt.context) == f"<user>{third.context}"
    told = f"{q1}</user><user>{a1}</user><user>{q2}</user><user>{a2}</user><user>{third.question}</user><bot>"
    assert chatting.decode(prompt.question) == told + third.answer_prefix
    aware = build_prompt(query_aware(third), chatting, 1024)
    assert chatting.decode(aware.context) == f"<user>{third.context}{q1}"
    assert (*aware.context, *aware.question) == (*prompt.context, *prompt.question)
    chatting_once = AutoTokenizer.from_pretrained(str(resources.files("clusterkv_jax.models") / "demo"))
    chatting_once.chat_template = "<user>{{ messages[0]['content'] }}</user><bot>"
    with pytest.raises(ValueError, match=r"Case multi_turn/1024/0/3: .* does not print every turn of a conversation"):
        build_prompt(third, chatting_once, 1024)


def test_the_second_half_of_a_text_is_the_answer_to_the_first(tokenizer, prose):
    cases = suites.cases("pg19-answers", Options(lengths=(1001,), limit=2, books=prose), tokenizer, 8192)
    whole = tokenizer.encode(sources.books(prose)["made_up"], add_special_tokens=False)
    assert len({case.id for case in cases}) == len(cases) == 2
    for case in cases:
        assert case.reading is not None
        text, answer = case.reading
        assert (len(text), len(answer), case.facts["position"]) == (500, 501, 500)
        assert any(whole[i : i + 1001] == [*text, *answer] for i in range(len(whole)))
    with pytest.raises(ValueError, match="length = 1 tokens is too small for a text and an answer"):
        list(perplexity.answers("book", (1, 2), 1, 1, 0))


def test_gsm8k_shares_its_examples(tokenizer, tmp_path):
    (tmp_path / "cot_8shot.json").write_text(json.dumps([{"question": "One?", "target": "So. The answer is 1."}] * 8))
    rows = [{"question": f"What is {i}?", "answer": f"<<x>>\n#### {i},000"} for i in range(3)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    examples = suites.cases("gsm8k", Options(data=str(tmp_path)), tokenizer, 8192)
    assert {case.context for case in examples} == {"Q: One?\nA: So. The answer is 1.\n\n" * 8}
    assert [case.answers for case in examples] == [("0,000",), ("1,000",), ("2,000",)]
    assert examples[1].question + examples[1].answer_prefix == "Q: What is 1?\nA:"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("glue", Options(), "suite 'glue' is unknown; allowed: ruler, "),
        ("ruler", Options(tasks=("boolq",)), "task 'boolq' is not in suite ruler; allowed: needles, niah_single_1"),
        ("ruler", Options(limit=0), "limit must be at least 1, got 0"),
        ("longeval", Options(lengths=(200,)), "length = 200 tokens is too small"),
        ("niah", Options(lengths=(20,)), "length = 20 tokens is too small for niah, whose question"),
        (
            "ruler",
            Options(tasks=("vt",), lengths=(84,)),
            "length = 84 tokens is too small for vt, whose question and answer take 158",
        ),
        ("ruler", Options(lengths=(999_999_999,)), "length = 999999999 tokens exceeds the model's 8192 positions"),
        ("turns", Options(lengths=(512,)), "length = 512 tokens is too small for turns, whose question"),
        ("turns", Options(tasks=("turn_1",)), "task 'turn_1' is not in suite turns; allowed: multi_turn, multi_req"),
        ("ruler-papers", Options(lengths=(1, 2)), "The suite ruler-papers takes one length, got 1, 2."),
        ("pg19", Options(books="/nowhere"), "no .txt or .txt.gz books in /nowhere"),
        ("gsm8k", Options(data="/nowhere"), "no file or folder /nowhere"),
        ("longbench", Options(tasks=("lcc",), data="/nowhere"), "no file or folder /nowhere"),
    ],
)
def test_what_is_not_there_is_named(name, options, said, tokenizer):
    with pytest.raises(ValueError, match=re.escape(said)):
        suites.cases(name, options, tokenizer, 8192)


def test_a_length_that_no_memory_holds_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"length = 999999999 tokens is more than the 16,777,216 that an example may"):
        suites.cases("ruler", Options(lengths=(999_999_999,)), tokenizer, 2**31 - 1)


LCC = {"context": "x", "answers": ["y"], "all_classes": None, "length": 1}


@pytest.mark.parametrize(
    ("suite", "file", "rows", "said"),
    [
        ("gsm8k", "test.jsonl", [{"question": "a"}], "Line 1 of .*test.jsonl: Object missing required field answer"),
        ("gsm8k", "test.jsonl", [5], "Line 1 of .*test.jsonl: Expected object, got int \\(5\\)"),
        ("gsm8k", "cot_8shot.json", [{}], "cot_8shot.json, field '0': Object missing required field question"),
        ("longbench", "lcc.jsonl", [LCC | {"input": ""}, LCC], "Row 1 of lcc has no field 'question'"),
        ("longbench", "lcc.jsonl", [LCC | {"answers": []}], "field 'answers': Expected array of length >= 1"),
        ("longbench", "lcc.jsonl", [[]], "Line 1 of .*: Expected object, got array"),
        (
            "longbench",
            "passage_count.jsonl",
            [LCC | {"input": ""}],
            "Row 0 of passage_count .* 'y', which holds no num",
        ),
        ("longbench-official", "lcc.jsonl", [LCC], "Row 0 of lcc has no field 'input'"),
        ("ruler-rows", "vt_4096.jsonl", [{"input": "x"}], "Row 0 of vt has no field 'outputs'; it has input"),
        ("ruler-rows", "vt_4096.jsonl", [{}], "Row 0 of vt has no field 'context'; it has none"),
        ("ruler-rows", "vt_4096.jsonl", [None], "Line 1 of .*: Expected object, got null"),
        ("ruler-rows", "vt_4096.jsonl", [{"task": 5}], "Line 1 of .*, field 'task': Expected str, got int"),
        ("ruler-papers", "ruler_4096.jsonl", [{"task": "x"}], "Row 0 is of task 'x'; allowed: niah_single_1"),
    ],
)
def test_rows_that_are_not_as_published_are_named(suite, file, rows, said, tokenizer, tmp_path):
    (tmp_path / "cot_8shot.json").write_text('[{"question": "a", "target": "b"}]')
    content = json.dumps(rows) if file.endswith("json") else "\n".join(map(json.dumps, rows))
    (tmp_path / "test.jsonl").write_text('{"question": "a", "answer": "b"}')
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=said):
        suites.cases(suite, Options(data=str(tmp_path)), tokenizer, 8192)


@pytest.mark.parametrize(
    ("task", "file", "content", "said"),
    [
        ("qa_1", "squad.json", {"data": [{"paragraphs": [{"qas": []}]}]}, "field 'data.0.paragraphs.0': .* context"),
        (
            "qa_1",
            "squad.jsonl",
            {"context": "a", "question": "b"},
            "Line 1 of .*: Object missing required field answers",
        ),
        (
            "qa_2",
            "hotpot.json",
            [{"question": "a", "answer": "b", "context": 5}],
            r"field '0.context': Expected object \| array",
        ),
        (
            "qa_2",
            "hotpot.json",
            [{"question": "a", "answer": "b", "context": {"title": ["c"], "sentences": []}}],
            "Row 0 of HotpotQA has 1 titles for 0 documents",
        ),
    ],
)
def test_documents_that_are_not_as_published_are_named(task, file, content, said, tokenizer, tmp_path):
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=said):
        suites.cases("ruler", Options(tasks=(task,), lengths=(1024,), data=str(tmp_path)), tokenizer, 8192)


def test_a_packed_row_is_unpacked_to_its_limit_alone(tokenizer, tmp_path):
    (tmp_path / "lcc.jsonl.gz").write_bytes(gzip.compress(b"0" * 2**26, 1))
    with pytest.raises(ValueError, match=r"Line 1 of .*lcc.jsonl.gz is larger than 16 MiB"):
        suites.cases("longbench", Options(data=str(tmp_path)), tokenizer, 8192)


def test_a_chat_template_that_fails_or_prints_twice_is_named(tokenizer):
    case = Case("x/1", "t", "Some context.", "Why?")
    other = AutoTokenizer.from_pretrained(str(resources.files("clusterkv_jax.models") / "demo"))
    for template, said in (
        ("{{ messages[0].content }}" * 2, "^Case x/1: The model's chat template does not print a message once"),
        ("{{ raise_exception('no') }}", "^Case x/1: The model's chat template fails: no"),
        ("{{ 1 / 0 }}", "^Case x/1: The model's chat template fails: division by zero"),
    ):
        other.chat_template = template
        with pytest.raises(ValueError, match=said):
            build_prompt(case, other, 512)
