"""Scores of answers between 0 and 1, equal to those of the benchmarks' own scorers.

A metric is a function (output, answers, classes) -> score. LongBench's are those of Bai et al. (2024), RULER's those of
Hsieh et al. (2024), both times 100 in published tables. ROUGE and Chinese word boundaries come from the libraries that
the official scorers use, from the extra `eval`.
"""

import contextlib
import difflib
import functools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType

from clusterkv_jax.evaluation.extras import library

Metric = Callable[[str, Sequence[str], Sequence[str]], float]
PairScore = Callable[[str, str], float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CHINESE_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、"
    "〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_MARKS = str.maketrans("", "", string.punctuation)
_ALL_MARKS = str.maketrans("", "", string.punctuation + _CHINESE_MARKS)
_CONTROL = re.compile(r"[\x00-\x1f]")
_NUMBER = re.compile(r"-?[0-9.,]+")


def score(metric: str, output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The score of one output by a metric's name.

    Raises ValueError for an unknown metric, for no answers, and where a library of the extra `eval` is missing.
    """
    if metric not in METRICS:
        raise ValueError(f"metric {metric!r} is unknown; allowed: {', '.join(METRICS)}.")
    if not answers:
        raise ValueError("An output cannot be scored without any right answer.")
    return float(METRICS[metric](output, answers, classes))


# --- what is compared ---


def normalize(text: str) -> str:
    """Lower case without punctuation, articles and repeated spaces, as in SQuAD's scorer."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_MARKS)).split())


def first_line(text: str) -> str:
    """The first line that is not empty: models go on with another example of a few-shot prompt."""
    return text.lstrip("\n").split("\n")[0]


def _f1(words: Sequence[str], reference: Sequence[str]) -> float:
    """F1 of two bags of words."""
    common = sum((Counter(words) & Counter(reference)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(words), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def f1_english(output: str, answer: str) -> float:
    """F1 of normalised words."""
    return _f1(normalize(output).split(), normalize(answer).split())


def f1_chinese(output: str, answer: str) -> float:
    """F1 of words as jieba finds them, without punctuation."""

    def words(text: str) -> list[str]:
        bare = ("".join(word.lower().translate(_ALL_MARKS).split()) for word in _jieba().cut(text))
        return [word for word in bare if word]

    return _f1(words(output), words(answer))


def rouge_l(output: str, answer: str) -> float:
    """ROUGE-L F1; 0 where either side holds no words."""
    scorer = _rouge()
    try:
        scores = scorer.get_scores([output], [answer], avg=True)
    except (ValueError, RecursionError):  # an empty side; sentences beyond the recursion limit
        return 0.0
    return scores["rouge-l"]["f"]


def rouge_l_chinese(output: str, answer: str) -> float:
    """ROUGE-L F1 of words as jieba finds them."""
    cut = _jieba().cut
    return rouge_l(" ".join(cut(output)), " ".join(cut(answer)))


def number_share(output: str, answer: str) -> float:
    """Which share of the numbers in the output is the one number of the answer."""
    number, numbers = re.findall(r"\d+", answer)[0], re.findall(r"\d+", output)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def code_similarity(output: str, answer: str) -> float:
    """Likeness, in whole per cents, of the answer to the first line of code: one without `, # and //.

    It is the ratio of difflib, which the official scorer falls back to with what its requirements install.
    """
    lines = output.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not code or not answer:
        return 1.0 if code == answer else 0.0
    return round(100 * difflib.SequenceMatcher(None, code, answer).ratio()) / 100


def classification(output: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of class names in the output, if the right one is among them.

    Names that are part of the right one do not count. As in the official scorer, the name after one that was struck
    out is not examined.
    """
    named = [name for name in classes if name in output]
    at = 0
    while at < len(named):
        if named[at] in answer and named[at] != answer:
            del named[at]
        at += 1
    return 1 / len(named) if answer in named else 0.0


# --- from a pair to a metric ---


def _best(pair: PairScore, prepare: Callable[[str], str] = str) -> Metric:
    """The best score over the right answers, never below 0."""

    def metric(output: str, answers: Sequence[str], classes: Sequence[str]) -> float:
        del classes
        return max(pair(prepare(output), answer) for answer in answers)

    return metric


def _best_class(output: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    return max(classification(first_line(output), answer, classes) for answer in answers)


def _clean(output: str) -> str:
    return _CONTROL.sub("", output.strip()).lower()


def string_match_all(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """RULER: share of the answers that the output contains, in any case of letters."""
    del classes
    return sum(answer.lower() in _clean(output) for answer in answers) / len(answers)


def string_match_part(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """RULER's questions: 1 where the output contains one of the answers."""
    del classes
    return float(any(answer.lower() in _clean(output) for answer in answers))


def final_number(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """GSM8K: the number after the first "The answer is", the last number where that is not said, equals the answer."""
    del classes
    said = re.search(r"[Tt]he answer is\s*\$?\s*(-?[0-9.,]+)", output)
    numbers = [said.group(1)] if said else _NUMBER.findall(output)
    values = [value for value in map(_number, numbers) if value is not None]
    return float(bool(values) and any(values[-1] == _number(answer) for answer in answers))


def _number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(unicodedata.normalize("NFKC", text).replace(",", "").rstrip("."))
    return None


METRICS: dict[str, Metric] = {
    "f1": _best(f1_english),
    "f1_first_line": _best(f1_english, first_line),
    "f1_chinese": _best(f1_chinese),
    "rouge_l": _best(rouge_l),
    "rouge_l_first_line": _best(rouge_l, first_line),
    "rouge_l_chinese": _best(rouge_l_chinese),
    "number_share": _best(number_share),
    "code_similarity": _best(code_similarity),
    "classification": _best_class,
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    "final_number": final_number,
}
# Metrics without a library, which are computed again in passing.
CHEAP = frozenset(METRICS) - {"f1_chinese", "rouge_l", "rouge_l_first_line", "rouge_l_chinese"}


# --- libraries ---


@functools.cache
def _jieba() -> ModuleType:
    module = library("jieba", "Scoring Chinese answers")
    module.setLogLevel("ERROR")
    return module


@functools.cache
def _rouge():
    return library("rouge", "Scoring summaries").Rouge()
