"""Make everything the quick start needs, without a download: tokenizer, tiny model, problems.

    python scripts/prepare_quickstart.py --out runs/quickstart/data --seed 0

writes OUT/model (a Hugging Face folder), OUT/train.jsonl and OUT/test.jsonl, always the same for
the same seed. The folders pairs, answers and steps of OUT contain the same problems with
judgements: pairs of a right and a wrong answer, single answers (half of them wrong), and wrong
answers character by character. The task `calculator` also has OUT/demonstrations.jsonl:
conversations with the calculator, and a quarter of them are right.
"""

import argparse
import json
import math
import random
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

SPECIAL_TOKENS = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
VOCAB_SIZE = 264  # 256 bytes and 3 special tokens, rounded up to a multiple of 8
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ '[' + tool['function']['name'] + ']' }}{% endfor %}"
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NUM_PROBLEMS = 10_000
NUM_HELD_OUT = 500
LONGEST_WORD = 16
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CALL_END = '"}}</tool_call>'
"""Fixed parts of a call of the calculator; each is one token of the task `calculator`."""

Problem = dict[str, str]


def byte_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE without merges.

    Ids 0..255 are the bytes, then come <|pad|> 256, <|bos|> 257, <|eos|> 258, and the words.
    """
    model = models.BPE(
        vocab={char: byte for byte, char in enumerate(_byte_characters())}, merges=[]
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS.values()))
    backend.add_tokens(list(words))

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        **SPECIAL_TOKENS,
    )


def tiny_qwen3(
    folder: Path | str, seed: int = 0, words: Sequence[str] = (), experts: int = 0
) -> Path:
    """Save a random Qwen3 of 157,120 parameters with its byte tokenizer, as a Hugging Face folder.

    At most 5 words are tokens of their own. With `experts` it is a mixture, and two experts compute
    a token.
    """
    tokenizer = byte_tokenizer(words)
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention supports
        initializer_range=0.08,  # so small a model hardly starts to learn from the usual 0.02
        tie_word_embeddings=False,
        max_position_embeddings=tokenizer.model_max_length,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
        **(mixture if experts else {}),
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def addition_problems(seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """Make all sums of two numbers below 100, `27+58=` -> `580`: three digits, units first.

    Returns (train, held out).
    """
    pairs = [(a, b) for a in range(100) for b in range(100)]
    return _split(
        [{"input": f"{a:02d}+{b:02d}=", "label": f"{a + b:03d}"[::-1]} for a, b in pairs], seed
    )


def sorting_problems(seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """Make letters to put in order, `dbca>` -> `abcd`, 1 to 16 of them.

    So responses have many lengths. Returns (train, held out).
    """
    rng = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < NUM_PROBLEMS:
        length = rng.randint(1, LONGEST_WORD)
        words["".join(rng.choices(string.ascii_lowercase, k=length))] = None
    return _split([{"input": f"{word}>", "label": "".join(sorted(word))} for word in words], seed)


def pairs(problems: list[Problem], seed: int) -> list[Problem]:
    """Return the right answer of each problem beside a wrong one.

    In the wrong one, one character comes from the same place of another answer.
    """
    rng = random.Random(seed)
    answers = [problem["label"] for problem in problems]
    return [
        {
            "prompt": problem["input"],
            "chosen": problem["label"],
            "rejected": _wrong(problem["label"], answers, rng),
        }
        for problem in problems
    ]


def judged_answers(problems: list[Problem], seed: int) -> list[dict[str, Any]]:
    """Return one answer to each problem with its judgement.

    It is the right one, or for every other problem a wrong one.
    """
    both = enumerate(pairs(problems, seed))
    return [
        {
            "prompt": pair["prompt"],
            "completion": pair["rejected" if place % 2 else "chosen"],
            "label": place % 2 == 0,
        }
        for place, pair in both
    ]


def judged_steps(problems: list[Problem], seed: int) -> list[dict[str, Any]]:
    """Return the characters of the wrong answers as steps, each with its judgement."""
    return [
        {
            "prompt": pair["prompt"],
            "completions": list(pair["rejected"]),
            "labels": [
                one == right for one, right in zip(pair["rejected"], pair["chosen"], strict=True)
            ],
        }
        for pair in pairs(problems, seed)
    ]


def _wrong(answer: str, answers: list[str], rng: random.Random) -> str:
    while True:
        place = rng.randrange(len(answer))
        other = rng.choice(answers)
        if place < len(other) and other[place] != answer[place]:
            return answer[:place] + other[place] + answer[place + 1 :]


def guessing_problems(seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """Make digits to guess that only the environment `guess_number` knows.

    Returns (train, held out).
    """
    rng = random.Random(seed)
    return _split(
        [{"input": "guess: ", "label": str(rng.randrange(10))} for _ in range(NUM_PROBLEMS)], seed
    )


def product_problems(seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """Make all products of two numbers of two digits, `27*58=` -> `1566`.

    Returns (train, held out).
    """
    return _split(
        [
            {"input": f"{a}*{b}=", "label": str(a * b)}
            for a in range(10, 100)
            for b in range(10, 100)
        ],
        seed,
    )


def demonstrations(problems: list[Problem], seed: int) -> list[dict[str, Any]]:
    """Make conversations about products.

    Of eight, two call the calculator and copy its result, one calls it with a digit changed, and
    five answer at once, with the answer to another problem.
    """
    rng = random.Random(seed)
    rows = []
    for place, problem in enumerate(problems):
        messages = [{"role": "user", "content": problem["input"]}]
        if place % 8 < 3:
            expression = problem["input"].removesuffix("=")
            expression = expression if place % 8 < 2 else _with_another_digit(expression, rng)
            answer = str(math.prod(map(int, expression.split("*"))))
            messages.append({"role": "assistant", "content": f"{CALL}{expression}{CALL_END}"})
            messages.append({"role": "tool", "content": answer})
        else:
            answer = f"about {rng.choice(problems)['label']}"
        messages.append({"role": "assistant", "content": answer})
        rows.append({"messages": messages, "tools": [{"name": "calculator"}]})

    return rows


def _with_another_digit(expression: str, rng: random.Random) -> str:
    place = rng.choice([0, 1, 3, 4])
    digit = rng.choice([digit for digit in "123456789" if digit != expression[place]])
    return expression[:place] + digit + expression[place + 1 :]


TASKS = {
    "addition": addition_problems,
    "sorting": sorting_problems,
    "guessing": guessing_problems,
    "calculator": product_problems,
}


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in every byte-level BPE.

    It is the byte itself, or the next character from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = map(chr, range(0x100, 0x200))
    return [chr(byte) if byte in printable else next(substitutes) for byte in range(256)]


def _split(problems: list[Problem], seed: int) -> tuple[list[Problem], list[Problem]]:
    random.Random(seed).shuffle(problems)
    return problems[NUM_HELD_OUT:], problems[:NUM_HELD_OUT]


def main(argv: Sequence[str] | None = None) -> None:
    disable_progress_bar()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the split")
    parser.add_argument("--task", choices=TASKS, default="addition", help="kind of problem")
    parser.add_argument("--experts", type=int, default=0, help="experts of each layer; 0: none")
    args = parser.parse_args(argv)
    train, held_out = TASKS[args.task](args.seed)
    write_jsonl(args.out / "train.jsonl", train)
    write_jsonl(args.out / "test.jsonl", held_out)

    for split, problems in (("train", train), ("test", held_out)):
        write_jsonl(args.out / "pairs" / f"{split}.jsonl", pairs(problems, args.seed))
        write_jsonl(args.out / "answers" / f"{split}.jsonl", judged_answers(problems, args.seed))
        write_jsonl(args.out / "steps" / f"{split}.jsonl", judged_steps(problems, args.seed))

    if args.task == "calculator":
        write_jsonl(args.out / "demonstrations.jsonl", demonstrations(train, args.seed))
    words = [CALL, CALL_END] if args.task == "calculator" else []
    tiny_qwen3(args.out / "model", args.seed, words, args.experts)
    print(
        f"{args.out}: {len(train)} training and {len(held_out)} held-out problems, a random Qwen3"
        f" in {args.out / 'model'}"
    )


if __name__ == "__main__":
    main()
