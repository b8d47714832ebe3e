"""Read the requests of Tinker's SDK, and write the answers; the SDK declares the form.

A request is checked completely before anything is done with it: a ValueError says what is wrong.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as wire
from torch import Tensor

from lightrft.core.engine import Request, derived_seed
from lightrft.engine.requests import Sampling
from lightrft.extras.tinker.losses import LOSSES, MISSING_LOSSES, Loss
from lightrft.extras.tinker.records import TARGET_TOKENS, Examples, Outputs, Sampled
from lightrft.strategy.checkpoint.atomic import OLD, TEMPORARY

MOST_SAMPLES = 4096
"""Samples of one prompt."""
LARGEST_OPTION = 1e12
"""Options of losses and of the optimizer: torch computes with them and their ratios in float32."""
NAME_PATTERN = re.compile(r"[\w.-]+")
MAX_NAME_BYTES = 200
"""Length of a name in UTF-8: a folder can have 255, with what is appended while it is written."""
SCHEME = "tinker://"
CHECKPOINT_KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""Part of a path -> the SDK's name of such a checkpoint."""
IMPOSSIBLE_OPTIONS = tuple(
    """topk_prompt_logprobs topk_sample_logprobs target_prompt_logprobs prompt_alt_tokens_k
    prompt_logprobs_last_n record_stability_info""".split()
)
"""Options of a request for samples that this server does not have."""
NUMPY = {wire.DTYPE_FLOAT32: np.float32, wire.DTYPE_INT64: np.int64, wire.DTYPE_INT32: np.int32}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of requests."""

    vocabulary: int
    """Number of token ids."""
    media_tokens: frozenset[int]
    """Token ids that stand for images and other media. No request can have one."""
    longest_row: int
    """Tokens of an example, with the last target."""
    longest_sequence: int
    """Tokens of prompt and response together."""
    longest_response: int
    """Tokens of a response whose request does not say how many."""


def read_training(content: bytes, limits: RequestLimits) -> tuple[int, dict[str, Any]]:
    """Return the number of a request of forward() or forward_backward(), and what a worker gets."""
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(content)
    except Exception as error:  # protobuf's error is no ValueError
        raise ValueError(f"the request is no ForwardBackwardRequest: {error}") from error

    name = message.loss_fn
    if name not in LOSSES:
        reason = MISSING_LOSSES.get(name, f"the losses are {', '.join(LOSSES)}")
        raise ValueError(f"loss_fn {name!r:.100} is not possible here: {reason}")

    loss = LOSSES[name]
    if message.seq_id < 1:
        raise ValueError(f"seq_id is from 1 on, not {message.seq_id}")
    if not message.data:
        raise ValueError("the request has no data")
    rows = []
    for index, datum in enumerate(message.data):
        try:
            rows.append(_row(datum, loss, limits))
        except ValueError as error:
            raise ValueError(f"datum {index}: {error}") from error

    return message.seq_id, {
        "name": message.model_id,
        "examples": _examples(rows, loss),
        "loss": name,
        "config": _config(message, loss),
        "learn": not message.forward_only,
    }


def _config(message: wire.ForwardBackwardRequest, loss: Loss) -> dict[str, float]:
    """Return the options of the loss with the defaults filled in."""
    options = {
        name: getattr(value, value.WhichOneof("value") or "text")
        for name, value in message.loss_fn_config_v2.items()
    }

    for name, value in options.items():
        if name not in loss.config:
            allowed = ", ".join(loss.config) or "none"
            raise ValueError(
                f"loss_fn_config {name!r:.100} is not an option of {message.loss_fn}: {allowed}"
            )
        if not isinstance(value, float) or not abs(value) <= LARGEST_OPTION:
            raise ValueError(
                f"loss_fn_config {name} is up to {LARGEST_OPTION:g}, not {value!r:.99}"
            )
    return {**loss.config, **options}


def _row(
    datum: wire.Datum, loss: Loss, limits: RequestLimits
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the tokens of a datum, with the last target, and the columns."""
    tokens = _tokens(datum.model_input, limits)
    inputs = datum.loss_fn_inputs
    needed = {TARGET_TOKENS, *loss.columns}
    if missing := needed - set(inputs):
        raise ValueError(f"loss_fn_inputs lack {', '.join(sorted(missing))}")
    if unknown := set(inputs) - needed - set(loss.per_target):
        raise ValueError(f"loss_fn_inputs have {', '.join(sorted(unknown))}: the loss reads none")

    columns = {}
    for name, tensor in inputs.items():
        values = _values(name, tensor)
        if values.shape != tokens.shape:
            raise ValueError(
                f"{name} has the shape {list(values.shape)}, and model_input {len(tokens)} tokens"
            )
        columns[name] = values

    targets = columns[TARGET_TOKENS]
    _check_tokens(targets, limits, TARGET_TOKENS)
    if len(tokens) + 1 > limits.longest_row:
        raise ValueError(
            f"it has {len(tokens)} tokens, and with the last target {limits.longest_row} fit"
            " (--max_tokens_per_microbatch)"
        )
    return np.append(tokens, targets[-1]), columns


def _values(name: str, tensor: wire.Tensor) -> np.ndarray:
    """Return a column as int64 or float32."""
    if tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
        raise ValueError(
            f"{name} has several values for a token: this server learns one target each"
        )
    if tensor.dtype not in NUMPY:
        raise ValueError(f"{name} is float32 or int64, not dtype {tensor.dtype}")

    kind = np.int64 if name == TARGET_TOKENS else np.float32
    read = NUMPY[tensor.dtype]
    if name == TARGET_TOKENS and read is np.float32:
        raise ValueError(f"{name} is int64, not float32")
    if len(tensor.dense) % np.dtype(read).itemsize:
        raise ValueError(f"{name} has {len(tensor.dense)} bytes, no whole number of values")
    values = np.frombuffer(tensor.dense, read).astype(kind)
    if not np.isfinite(values).all():
        raise ValueError(f"{name} has a value that is not finite")
    return values


def _tokens(chunks: Sequence[wire.Chunk], limits: RequestLimits) -> np.ndarray:
    arrays = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ValueError(f"model_input has {kind or 'an empty chunk'}: this server reads text")
        if len(chunk.encoded_text.tokens) % 4:
            raise ValueError("model_input has bytes that are no whole tokens")
        arrays.append(np.frombuffer(chunk.encoded_text.tokens, np.int32).astype(np.int64))

    tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
    if not len(tokens):
        raise ValueError("model_input has no tokens")
    _check_tokens(tokens, limits, "model_input")
    return tokens


def _check_tokens(tokens: np.ndarray, limits: RequestLimits, name: str) -> None:
    size = limits.vocabulary
    outside = tokens[(tokens < 0) | (tokens >= size)]
    if len(outside):
        raise ValueError(f"{name} has token {outside[0]}, and the vocabulary has {size}")
    media = tokens[np.isin(tokens, list(limits.media_tokens))]
    if len(media):
        raise ValueError(f"{name} has token {media[0]}, a placeholder of media: only text fits")


def _examples(rows: list[tuple[np.ndarray, dict[str, np.ndarray]]], loss: Loss) -> Examples:
    """Join rows end to end. A bound that only some data have is the default in the others."""
    names = {name for _, columns in rows for name in columns}

    def column(name: str) -> Tensor:
        arrays = [
            columns.get(name, np.full(len(tokens) - 1, loss.config.get(name, 0), np.float32))
            for tokens, columns in rows
        ]
        # The first token of a row is no target.
        return torch.from_numpy(np.concatenate([np.insert(array, 0, 0) for array in arrays]))

    return Examples(
        [len(tokens) for tokens, _ in rows],
        torch.from_numpy(np.concatenate([tokens for tokens, _ in rows])),
        {name: column(name) for name in sorted(names)},
    )


def write_outputs(outputs: Outputs) -> bytes:
    """Write the result of a forward pass."""
    values = [each.numpy().astype(np.float32) for each in outputs.logprobs]
    offsets = np.cumsum([0, *(each.nbytes for each in values)], dtype=np.int64)
    field = wire.BatchedTensor(
        data=b"".join(each.tobytes() for each in values),
        offsets=offsets.tobytes(),
        dtype=wire.DTYPE_FLOAT32,
    )
    record = wire.ArrayRecord(
        type_tag="ArrayRecord", fields={"logprobs": field}, num_datums=len(values)
    )
    return wire.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[record],
        metrics={"loss:sum": outputs.loss},
    ).SerializeToString()


def read_adam(request: types.OptimStepRequest) -> dict[str, float]:
    """Return the parameters of a step of AdamW."""
    adam = request.optim_params
    if not isinstance(adam, types.AdamParams):
        if adam.type != "adamw":
            raise ValueError(f"the optimizer is {adam.type!r:.100}: this server has adamw alone")
        adam = types.AdamParams(**adam.model_dump(exclude={"type"}))

    values = adam.model_dump()
    for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"):
        if not 0 <= values[name] <= LARGEST_OPTION:
            raise ValueError(f"{name} is a number from 0 to {LARGEST_OPTION:g}, not {values[name]}")
    for name in ("beta1", "beta2"):
        if values[name] >= 1:
            raise ValueError(f"{name} is below 1, not {values[name]}")
    return values


def read_sampling(request: types.SampleRequest, limits: RequestLimits, seed: int) -> Request:
    """Return what a request asks the engine for; `seed` is used if the request has none."""
    if requested := [name for name in IMPOSSIBLE_OPTIONS if getattr(request, name)]:
        raise ValueError(f"{requested[0]} is not possible here: omit it")

    tokens = request.prompt.to_ints()
    if not tokens:
        raise ValueError("the prompt has no tokens")
    if request.prompt_logprobs and len(tokens) > limits.longest_row:
        raise ValueError(
            f"the log-probs of {len(tokens)} tokens are more than the {limits.longest_row} of"
            " --max_tokens_per_microbatch"
        )
    _check_tokens(np.array(tokens), limits, "the prompt")

    if not 1 <= request.num_samples <= MOST_SAMPLES:
        raise ValueError(f"num_samples is from 1 to {MOST_SAMPLES}, not {request.num_samples}")
    wanted = request.sampling_params
    most = wanted.max_tokens
    if most is None:
        most = min(limits.longest_response, limits.longest_sequence - len(tokens))
    if most < 1 or len(tokens) + most > limits.longest_sequence:
        raise ValueError(
            f"{len(tokens)} tokens and max_tokens {most}: max_tokens is at least 1, and both are at"
            f" most the {limits.longest_sequence} of --prompt_max_len and --generate_max_len together"
        )

    sampling = Sampling(
        n=request.num_samples,
        max_tokens=most,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=max(wanted.top_k, 0),
        **_stops(wanted.stop),
    )
    if problem := sampling.problem(limits.vocabulary):
        raise ValueError(problem)
    chosen = seed if wanted.seed is None else wanted.seed
    seeds = tuple(derived_seed(chosen, index) for index in range(sampling.n))
    return Request(tokens, sampling=sampling, seeds=seeds)


def _stops(stop: str | Sequence[str] | Sequence[int] | None) -> dict[str, Any]:
    if stop is None:
        return {}
    if not stop:
        raise ValueError(
            "stop [] would go on after the end token, and this server does not: omit it"
        )
    if isinstance(stop, str):
        return {"stop": (stop,)}
    if all(isinstance(each, int) for each in stop):
        return {"stop_token_ids": tuple(stop)}
    return {"stop": tuple(str(each) for each in stop)}


def write_sampled(sampled: Sampled) -> bytes:
    """Write the answer to a prompt."""
    reasons = {"stop": wire.STOP_REASON_STOP, "length": wire.STOP_REASON_LENGTH}
    sequences = [
        wire.SampledSequence(
            stop_reason=reasons[completion.finish_reason],
            tokens=np.array(completion.token_ids, np.int32).tobytes(),
            logprobs=np.array(completion.logprobs, np.float32).tobytes(),
        )
        for completion in sampled.completions
    ]
    scores = sampled.prompt_logprobs
    more = {} if scores is None else {"prompt_logprobs": scores.float().numpy().tobytes()}
    return wire.SampleResponse(sequences=sequences, **more).SerializeToString()


def path_of(model: str, kind: str, name: str) -> str:
    return f"{SCHEME}{model}/{kind}/{name}"


def tag_of(path: str) -> str:
    """Return the folder of a path `tinker://MODEL/weights/NAME`, below all checkpoints."""
    names = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(names) != 3 or names[1] not in CHECKPOINT_KINDS:
        raise ValueError(f"{path!r:.200} is no path tinker://MODEL/weights/NAME")
    return f"{folder_of(names[0])}/{names[1]}/{checked_name(names[2])}"


def folder_of(model: str) -> str:
    return checked_name(model.replace(":", "_"))


def checked_name(name: str) -> str:
    """Return a name that can be a folder. Raises ValueError for any other."""
    if not NAME_PATTERN.fullmatch(name) or set(name) == {"."} or name.endswith((TEMPORARY, OLD)):
        raise ValueError(f"{name!r:.200} is no name: use letters, digits, dots, - and _")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"{name!r:.200} has more than {MAX_NAME_BYTES} bytes")
    return name
