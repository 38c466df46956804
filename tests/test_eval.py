import json
import math
from pathlib import Path

import pytest
from eval_helpers import TEXTS, make_tiny_model

from flexrun.cli import main
from flexrun.evaluate.questions import (
    Accuracy,
    EvalJob,
    PromptStyle,
    Question,
    Tally,
    normalized,
    read_question,
)
from flexrun.jobs.lines import LineError
from flexrun.llm import LLM
from flexrun.request import SamplingParams

FLAGS = ["--device", "cpu", "--dtype", "float32", "--cpu-mem", "512MiB"]
EXAMPLES = Path(__file__).parents[1] / "examples"
CHOICE = {"question": "Which?", "choices": ["yes", "no more"], "answer": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), max_len=256)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, device="cpu", dtype="float32", cpu_mem="512MiB") as llm:
        yield llm


@pytest.fixture
def evaluate(folder, tmp_path, capsys):
    """A function that evaluates lines: (exit status, the printed object, result bodies by id)."""
    source, target = tmp_path / "questions.jsonl", tmp_path / "results.jsonl"

    def run(lines, *flags):
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = ["eval", str(source), "-m", str(folder), "-o", str(target), "--json", *FLAGS, *flags]
        status = main(words)
        out = capsys.readouterr().out
        records = [json.loads(line) for line in target.read_text().splitlines()]
        return status, json.loads(out) if out else None, {r["custom_id"]: r for r in records}

    run.target = target
    return run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": None}, "'answer' is missing"),
        ({"question": "  "}, "non-empty text"),
        ({"choices": ["a"]}, "2 to 26 different"),
        ({"choices": ["a", "a"]}, "2 to 26 different"),
        ({"answer": 2}, "index from 0 to 1, a letter from A to B"),
        ({"answer": "maybe"}, "the text of a choice"),
        ({"answer": True}, "the text of a choice"),
        ({"choices": None, "answer": 3}, "a text or a list of texts"),
        ({"category": 1}, "category must be a string"),
        ({"choice": []}, "did you mean choices"),
    ],
)
def test_bad_questions_are_refused_with_the_reason(changes, message):
    with pytest.raises(LineError, match=message):
        read_question({**CHOICE, **changes})


def test_an_answer_may_be_an_index_a_letter_or_the_text():
    assert [read_question({**CHOICE, "answer": a}).right for a in (1, "B", "no more")] == [1, 1, 1]
    # A choice that looks like a letter is a text first.
    assert read_question({"question": "q", "choices": ["B", "A"], "answer": "A"}).right == 1


def test_prompts_show_examples_and_choices():
    shot = read_question({"question": "one?", "choices": ["a", "b"], "answer": 1})
    free = read_question({"question": "who?", "answer": ["me", "I"]})
    plain = PromptStyle(shots=(shot, free))
    assert plain.prompt(read_question(CHOICE)) == (
        "Question: one?\nAnswer: b\n\nQuestion: who?\nAnswer: me\n\nQuestion: Which?\nAnswer:"
    )
    letters = PromptStyle(template="{question} =", letters=True, shots=(shot,))
    assert letters.prompt(read_question(CHOICE)) == "one?\nA. a\nB. b = B\n\nWhich?\nA. yes\nB. no more ="
    assert letters.answer(read_question(CHOICE), 1) == "B"
    with pytest.raises(ValueError, match="question"):
        PromptStyle(template="no place")


def test_free_answers_are_compared_without_case_punctuation_and_spaces():
    assert normalized("  The  New York City. ") == normalized("the new york city")
    assert normalized("Paris") != normalized("Paris, France")


def test_the_interval_is_wilsons():
    # Wilson's interval by its defining property: both ends are z standard errors (of the end) away.
    accuracy, z = Accuracy(n=40, n_correct=31), 1.959964
    for bound in accuracy.interval_frac():
        assert abs(31 / 40 - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / 40), rel=1e-6)
    assert Accuracy(n=10, n_correct=0).interval_frac()[0] == 0.0
    assert Accuracy(n=0, n_correct=0).interval_frac() == (0.0, 1.0)
    with pytest.raises(ValueError, match="n_correct"):
        Accuracy(n=1, n_correct=2)


def test_choices_are_scored_as_the_python_api_scores_them(evaluate, llm):
    lines = [
        {
            "id": f"q{i}",
            "question": TEXTS[i % 4][: 10 + i],
            "choices": ["yes", "no more", "A"],
            "answer": i % 3,
        }
        for i in range(9)
    ]
    lines[4]["category"] = lines[5]["category"] = "odd"
    status, result, records = evaluate(lines)
    assert status == 0
    n_correct = 0
    for line in lines:
        body = records[line["id"]]["response"]["body"]
        scores = llm.score([(f"Question: {line['question']}\nAnswer:", f" {c}") for c in line["choices"]])
        found = [choice["logprob"] for choice in body["choices"]]
        assert found == pytest.approx([score.logprob for score in scores], abs=1e-3)
        assert body["predicted"] == max(range(3), key=lambda i: found[i])
        per_byte = [value / len(c) for value, c in zip(found, line["choices"], strict=True)]
        assert body["predicted_norm"] == max(range(3), key=lambda i: per_byte[i])
        n_correct += body["correct"]
        assert body["correct"] is (body["predicted"] == line["answer"])
    assert result["accuracy"]["n"] == 9 and result["accuracy"]["n_correct"] == n_correct
    assert result["categories"]["odd"]["n"] == 2
    assert result["total_tokens_per_s"] > 0 and result["n_errors"] == 0


def test_free_answers_are_the_models_own_words(evaluate, llm):
    prompt = "Question: one two\nAnswer:"
    params = SamplingParams(temperature=0, max_tokens=4, stop=["\n"])
    text = llm.generate([prompt], params)[0].outputs[0].text
    right = text.strip() or "?"
    lines = [
        {"id": "right", "question": "one two", "answer": ["something else", right.upper()]},
        {"id": "wrong", "question": "one two", "answer": "something else"},
        {"id": "bad", "question": "one two"},
    ]
    status, result, records = evaluate(lines, "--max-tokens", "4")
    assert status == 1 and result["n_errors"] == 1
    assert records["right"]["response"]["body"]["text"] == text
    assert normalized(text) == "" or records["right"]["response"]["body"]["correct"]
    assert not records["wrong"]["response"]["body"]["correct"]
    assert result["accuracy"]["n"] == 2 and result["accuracy_by_bytes"]["n"] == 0


def test_other_prompts_are_not_mixed_and_the_same_are_resumed(evaluate, tmp_path):
    status, result, _ = evaluate([CHOICE])
    assert status == 0
    shots = tmp_path / "shots.jsonl"
    shots.write_text(json.dumps(CHOICE) + "\n" + json.dumps({**CHOICE, "answer": 0}) + "\n")
    assert evaluate([CHOICE])[1]["resumed"] == 1
    for flags in (["--shots", str(shots)], ["--letters"], ["--template", "{question}"], ["--chat"]):
        assert evaluate([CHOICE], *flags)[0] == 2
    one = evaluate([CHOICE], "--shots", str(shots), "--num-shots", "1", "--overwrite", "--letters", "--chat")
    assert one[0] == 0
    assert evaluate([CHOICE], "--num-shots", "1")[0] == 2
    shots.write_text('{"question": "x"}\n')
    assert evaluate([CHOICE], "--shots", str(shots))[0] == 2


def test_a_chat_asks_through_the_template(llm):
    job = EvalJob(
        llm.scorer, PromptStyle(), encode_chat=lambda text: f"<|im|>user: {text}\n<|im|>assistant: "
    )
    request = job.parse(CHOICE, None)
    text = llm.tokenizer.decode(request.windows[1].token_ids, skip_special_tokens=False)
    assert text == "<|im|>user: Question: Which?\nAnswer:\n<|im|>assistant: no more"


def test_results_are_counted_by_category():
    tally = Tally()
    for category, correct in (("b", True), ("a", False), ("b", False)):
        tally.add({"category": category, "correct": correct, "correct_norm": True})
    assert tally.overall == Accuracy(n=3, n_correct=1) and tally.by_bytes == Accuracy(n=3, n_correct=3)
    assert tally.categories == {"a": Accuracy(n=1, n_correct=0), "b": Accuracy(n=2, n_correct=1)}
    assert list(tally.categories) == ["a", "b"]


@pytest.mark.parametrize("name", ["entity_matching", "imputation", "error_detection", "multiple_choice"])
def test_the_examples_are_valid_and_balanced(name):
    questions: list[Question] = []
    names = set()
    for line in (EXAMPLES / f"{name}.jsonl").read_text().splitlines():
        fields = json.loads(line)
        names.add(fields["id"])
        questions.append(read_question(fields))
    assert len(names) == len(questions) and 20 <= len(questions) <= 40
    assert all(question.category for question in questions)
    if name in ("entity_matching", "error_detection"):
        assert 0.4 <= sum(question.right == 0 for question in questions) / len(questions) <= 0.6
    shots = EXAMPLES / f"{name}_shots.jsonl"
    if shots.exists():
        shown = [read_question(json.loads(line)) for line in shots.read_text().splitlines()]
        assert shown and not {s.question for s in shown} & {q.question for q in questions}
