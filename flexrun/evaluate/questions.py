"""Questions with known answers: multiple choice by log-likelihood, or free answers compared as text.

One JSON object per line:

- "question": text. "answer": for multiple choice the index (from 0), the letter or the text of the right choice;
  for a free answer the right text, or a list of texts that are all right.
- "choices": a list of two or more texts; with it the question is a multiple choice.
- "category" (text): accuracy is also told per category. "id": names the line.

A choice is scored as the continuation of the prompt; the likeliest wins ("correct"), and so does the likeliest per
UTF-8 byte ("correct_norm"), which does not favour short choices. A free answer is generated greedily up to the
end of the line and compared without case, outer punctuation and repeated spaces.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexrun.jobs.bodies import finite, usage
from flexrun.jobs.kinds import EnginePrompt
from flexrun.jobs.lines import LineError, LineIdentity, json_type, refuse_unknown_fields, shortened
from flexrun.request import RequestOutput, SamplingParams
from flexrun.scoring import Scorer, ScoreWindow, score_of

QUESTION_MARK = "{question}"
DEFAULT_TEMPLATE = f"Question: {QUESTION_MARK}\nAnswer:"
LETTERS = string.ascii_uppercase
_FIELDS = ("id", "custom_id", "question", "choices", "answer", "category")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A checked line. choices: empty for a free answer. answers: right texts; right: index of the right choice."""

    question: str
    choices: tuple[str, ...] = ()
    answers: tuple[str, ...]
    right: int = -1
    category: str | None = None


def read_question(fields: dict[str, Any]) -> Question:
    """A question from a line's JSON object. LineError names the field, what was found and what is valid."""
    refuse_unknown_fields(fields, _FIELDS, "field of a question")
    for name in ("question", "answer"):
        if fields.get(name) is None:
            raise LineError("missing_field", f"field {name!r} is missing; a question has question and answer")
    question, answer, category = fields["question"], fields["answer"], fields.get("category")
    if not isinstance(question, str) or not question.strip():
        raise LineError("invalid_question", f"question must be a non-empty text, found {shortened(question)}")
    if category is not None and not isinstance(category, str):
        raise LineError("invalid_question", f"category must be a string, found {json_type(category)}")
    choices = fields.get("choices")
    if choices is None:
        answers = answer if isinstance(answer, list) else [answer]
        if not answers or not all(isinstance(text, str) and text.strip() for text in answers):
            raise LineError(
                "invalid_answer",
                f"without choices, answer must be a text or a list of texts, found {shortened(answer)}",
            )
        return Question(question=question, answers=tuple(answers), category=category)
    valid = isinstance(choices, list) and all(isinstance(text, str) and text for text in choices)
    if not valid or not 2 <= len(choices) <= len(LETTERS) or len(set(choices)) < len(choices):
        raise LineError(
            "invalid_choices",
            f"choices must be a list of 2 to {len(LETTERS)} different texts, found {shortened(choices)}",
        )
    right = _right_choice(answer, choices)
    return Question(
        question=question, choices=tuple(choices), answers=(choices[right],), right=right, category=category
    )


def _right_choice(answer: Any, choices: list[str]) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    if isinstance(answer, str):
        if answer in choices:
            return choices.index(answer)
        if len(answer) == 1 and answer in LETTERS[: len(choices)]:
            return LETTERS.index(answer)
    raise LineError(
        "invalid_answer",
        f"answer must be an index from 0 to {len(choices) - 1}, a letter from A to {LETTERS[len(choices) - 1]} or the"
        f" text of a choice, found {shortened(answer)}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStyle:
    """How questions become prompts.

    Attributes:
        template: text with the place of the question, "{question}".
        letters: list the choices after the question, and score their letters instead of their texts.
        shots: questions that are shown, answered, before each one.
    """

    template: str = DEFAULT_TEMPLATE
    letters: bool = False
    shots: tuple[Question, ...] = field(default=())

    def __post_init__(self) -> None:
        if QUESTION_MARK not in self.template:
            raise ValueError(f"the template must hold {QUESTION_MARK}, got {self.template!r}")

    def prompt(self, question: Question) -> str:
        """The text before the answer, examples included."""
        parts = [f"{self._ask(shot)} {self.answer(shot, shot.right)}" for shot in self.shots]
        return "\n\n".join([*parts, self._ask(question)])

    def answer(self, question: Question, index: int) -> str:
        """What follows the prompt (after a space) for a choice, or for the right answer of a free question."""
        if not question.choices:
            return question.answers[0]
        return LETTERS[index] if self.letters else question.choices[index]

    def _ask(self, question: Question) -> str:
        text = question.question
        if self.letters and question.choices:
            text += "".join(
                f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, question.choices, strict=False)
            )
        return self.template.replace(QUESTION_MARK, text)


def normalized(text: str) -> str:
    """A free answer for comparison: no case, no outer punctuation, single spaces."""
    return " ".join(text.casefold().split()).strip(string.punctuation + " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """A question ready for the engine: windows of its choices, or one prompt to continue."""

    question: Question
    windows: tuple[ScoreWindow, ...] = ()
    prompt: EnginePrompt | None = None


class EvalJob:
    """The job kind behind ``flexrun eval``.

    Args:
        scorer: makes windows for the model, which must have a tokenizer.
        style: how questions are put.
        encode_chat: (user's message) -> prompt text; None puts questions as plain text.
        max_tokens: most tokens of a free answer.
    """

    name = "eval"

    def __init__(
        self,
        scorer: Scorer,
        style: PromptStyle,
        *,
        encode_chat: Callable[[str], str] | None = None,
        max_tokens: int = 32,
    ) -> None:
        if scorer.tokenizer is None:
            raise ValueError("this model has no tokenizer, which an evaluation needs")
        self._scorer = scorer
        self._tokenizer = scorer.tokenizer
        self._style = style
        self._encode_chat = encode_chat
        self._params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=["\n"])

    def parse(self, fields: dict[str, Any], identity: LineIdentity) -> EvalRequest:
        """See `JobKind`."""
        question = read_question(fields)
        text = self._style.prompt(question)
        gap = " "
        if self._encode_chat is not None:
            text, gap = self._encode_chat(text), ""
        if question.choices:
            answers = [self._style.answer(question, i) for i in range(len(question.choices))]
            return EvalRequest(
                question=question, windows=tuple(self._scorer.pair(text, gap + answer) for answer in answers)
            )
        ids = self._tokenizer.encode(text, add_special_tokens=self._encode_chat is None)
        return EvalRequest(
            question=question, prompt=EnginePrompt(token_ids=ids, params=self._params, text=text)
        )

    def prompts(self, request: EvalRequest) -> list[EnginePrompt]:
        """See `JobKind`."""
        if request.prompt is not None:
            return [request.prompt]
        return [window.prompt() for window in request.windows]

    def body(self, request: EvalRequest, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """See `JobKind`."""
        question = request.question
        common = {"object": "eval", "category": question.category, "usage": usage(results)}
        if request.prompt is not None:
            text = results[0].outputs[0].text
            right = {normalized(answer) for answer in question.answers}
            return {
                **common,
                "kind": "free",
                "text": text,
                "answers": list(question.answers),
                "correct": normalized(text) in right,
            }
        scores = [
            score_of([window], [result]) for window, result in zip(request.windows, results, strict=True)
        ]
        sizes = [len(self._style.answer(question, i).encode()) for i in range(len(question.choices))]
        per_byte = [score.logprob / size for score, size in zip(scores, sizes, strict=True)]
        best = max(range(len(scores)), key=lambda i: scores[i].logprob)
        best_norm = max(range(len(scores)), key=lambda i: per_byte[i])
        return {
            **common,
            "kind": "choice",
            "choices": [
                {
                    "text": choice,
                    "logprob": finite(score.logprob),
                    "num_tokens": len(score.token_ids),
                    "num_bytes": size,
                }
                for choice, score, size in zip(question.choices, scores, sizes, strict=True)
            ],
            "answer": question.right,
            "predicted": best,
            "correct": best == question.right,
            "predicted_norm": best_norm,
            "correct_norm": best_norm == question.right,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """n_correct of n questions, with a Wilson score interval (Wilson 1927) of about 95%."""

    n: int
    n_correct: int

    def __post_init__(self) -> None:
        if not 0 <= self.n_correct <= self.n:
            raise ValueError(f"n_correct must be in 0..{self.n}, got {self.n_correct}")

    @property
    def accuracy_frac(self) -> float:
        return self.n_correct / self.n if self.n else 0.0

    def interval_frac(self, z: float = 1.959964) -> tuple[float, float]:
        """Lower and upper bound; (0, 1) without questions."""
        n, p = self.n, self.accuracy_frac
        if not n:
            return 0.0, 1.0
        centre = p + z * z / (2 * n)
        spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        scale = 1 + z * z / n
        return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)

    def to_dict(self) -> dict[str, Any]:
        low, high = self.interval_frac()
        return {
            "n": self.n,
            "n_correct": self.n_correct,
            "accuracy_frac": self.accuracy_frac,
            "low_frac": low,
            "high_frac": high,
        }


class Tally:
    """Counts results of questions: all, by category, and by the normalised choice."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str | None], list[int]] = {}

    def add(self, body: dict[str, Any]) -> None:
        """Take the body of one result."""
        category = body.get("category")
        for name in ("correct", "correct_norm"):
            if name not in body:
                continue
            keys: list[tuple[str, str | None]] = [(name, None)]
            if category is not None and name == "correct":
                keys.append((name, category))
            for key in keys:
                count = self._counts.setdefault(key, [0, 0])
                count[0] += 1
                count[1] += bool(body[name])

    def _of(self, key: tuple[str, str | None]) -> Accuracy:
        n, n_correct = self._counts.get(key, (0, 0))
        return Accuracy(n=n, n_correct=n_correct)

    @property
    def overall(self) -> Accuracy:
        """All questions."""
        return self._of(("correct", None))

    @property
    def by_bytes(self) -> Accuracy:
        """Multiple choices, by log-probability per byte."""
        return self._of(("correct_norm", None))

    @property
    def categories(self) -> dict[str, Accuracy]:
        """By category, in the order of their names."""
        names = sorted(category for name, category in self._counts if category is not None)
        return {name: self._of(("correct", name)) for name in names}
