"""Make preference pairs of the answers that a model has sampled itself.

    lightrft evaluate --pretrain MODEL --eval_data train=TRAIN,test=TEST --eval_n_samples 8 \\
        --save_path SAMPLED
    python scripts/prepare_pairs.py --responses SAMPLED/responses.jsonl --out PAIRS

Each different right answer to a prompt is paired with each different wrong one to the same prompt.
So a reward model also learns about the rare answers, which a policy finds when it is trained with
it. An answer is right if its reward is above 0.5. Each set of the evaluation becomes OUT/SET.jsonl, and data without
a name OUT/train.jsonl. The prompts are texts as the model read them: train on the pairs without
--apply_chat_template.

Greedy answers, blank answers and answers that were cut off are in no pair: training adds the end
token to an answer, and a cut one would be learned as complete.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def pairs(responses: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the pairs of each set, in the order of its prompts."""
    # Dictionaries keep the order; sets of texts have another one in each process.
    answers: dict[tuple[str, int], tuple[dict[str, str], dict[str, str]]]
    answers = defaultdict(lambda: ({}, {}))
    found: dict[str, list[Row]] = {}
    for response in responses:
        name = response.get("set", "train")
        found.setdefault(name, [])
        complete = response["response"].strip() and response["finish_reason"] != "length"
        if complete and response["sample"] != "greedy":
            wrong, right = answers[name, response["row"]]
            (right if response["reward"] > 0.5 else wrong)[response["response"]] = response[
                "prompt"
            ]

    for (name, _), (wrong, right) in answers.items():
        found[name] += [
            {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            for chosen, prompt in right.items()
            for rejected in wrong
        ]

    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--responses", type=Path, required=True, help="responses.jsonl of `lightrft evaluate`"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    args = parser.parse_args(argv)
    found = pairs(json.loads(line) for line in args.responses.read_text().splitlines())

    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in found.items():
        if not rows:
            sys.exit(
                f"{args.responses}: no prompt of {name} has both a right and a wrong answer."
                " Sample more with --eval_n_samples, or begin with a better model."
            )
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{args.out / name}.jsonl: {len(rows)} pairs")


if __name__ == "__main__":
    main()
