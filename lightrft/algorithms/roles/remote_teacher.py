"""A teacher behind an HTTP endpoint with OpenAI's completions API.

The API echoes the tokens of a prompt with log-probs:

    POST URL/completions  {"prompt": [ids], "echo": true, "logprobs": 1, "max_tokens": 0, ...}

Servers of vLLM and SGLang support it. Nothing is generated.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.algorithms.roles.endpoint import AWAY_SECONDS, Endpoint
from lightrft.core.batch import Batch, Rows
from lightrft.models.parallel.collectives import Axis

TEACHER_KEY_VARIABLE = "TEACHER_API_KEY"
MAX_REQUESTS = 32
"""Number of requests of one rank that are under way at the same time."""
NUM_PROBED = 64
"""Number of tokens, spread over the vocabulary, whose ids are compared with the server's."""


class RemoteTeacher:
    """Teacher on a server, with log-probs at temperature 1.

    Raises ValueError at once for a server that does not answer, or has another vocabulary.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Tokenizer,
        model_parallel: Axis,
        *,
        patience: float = AWAY_SECONDS,
    ):
        """Connect to the server. `patience`: seconds that the server may be away or busy.

        `url` is like `http://host:8000/v1`. `model_parallel` has the ranks with the same batches;
        they divide the requests.
        """
        self.model_parallel = model_parallel
        self._server = Endpoint("--teacher_url", url, TEACHER_KEY_VARIABLE, patience=patience)
        self._model = self._server.ask("GET", "models")["data"][0]["id"]
        self._check_vocabulary(tokenizer)

    def logprobs(self, batch: Batch, rows: Rows) -> Tensor:
        """Return log p of every learned token, 0 elsewhere: [T] float32.

        One request for each sequence with learned tokens.
        """
        columns = batch.input_ids, batch.loss_mask
        ids, masks = (column.split(batch.lengths.tolist()) for column in columns)

        # Ranks of one replica hold the same batch, so each asks for a share of the sequences.
        scored_indices = [index for index, mask in enumerate(masks) if mask.any()]
        local = scored_indices[self.model_parallel.rank :: self.model_parallel.size]
        with ThreadPoolExecutor(MAX_REQUESTS) as pool:
            answers = pool.map(lambda index: self._score(ids[index].tolist())[0], local)
            scored = dict(zip(local, answers, strict=True))

        values = torch.zeros(batch.num_tokens)
        for share in self.model_parallel.gather(scored):
            for index, logprobs in share.items():
                values[batch.offsets[index] : batch.offsets[index + 1]] = torch.tensor(logprobs)

        return torch.where(batch.loss_mask, values, 0.0)

    def _score(self, ids: list[int]) -> tuple[list[float], list[str]]:
        """Return the log-prob of every token, and the tokens as the server writes them.

        The first log-prob is 0.
        """
        options = {"echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 1.0}
        request = {"model": self._model, "prompt": ids, **options}
        answer = self._server.ask("POST", "completions", request)
        logprobs = answer["choices"][0].get("logprobs") or {}
        values, tokens = (
            (logprobs.get(name) or [])[: len(ids)] for name in ("token_logprobs", "tokens")
        )
        # The first token has nothing before it, so its log-prob is null.
        if len(values) != len(ids) or None in values[1:]:
            raise ValueError(
                f"{self._server.named}: {len(ids)} tokens were sent, but {len(values)} log-probs"
                " were returned"
            )

        return [0.0, *values[1:]], tokens

    def _check_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Compare the ids of tokens that are plain text.

        Bytes of a character and special tokens are printed in different ways.
        """
        step = max(len(tokenizer) // NUM_PROBED, 1)
        special = tokenizer.all_special_ids
        ids = [token for token in range(0, len(tokenizer), step) if token not in special]

        _, server_tokens = self._score(ids)
        for token, server_token in zip(ids, server_tokens, strict=True):
            text = tokenizer.decode([token])
            if text.isascii() and text.isprintable() and text.strip() != server_token.strip():
                raise ValueError(
                    f"{self._server.named} has another vocabulary: token {token} is"
                    f" {server_token!r} there and {text!r} in the tokenizer of --pretrain; the"
                    " teacher needs the same vocabulary"
                )
