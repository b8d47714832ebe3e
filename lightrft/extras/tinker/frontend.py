"""The routes of the server: requests are checked here, and wait in a queue for all ranks."""

import json
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from inspect import isawaitable
from pathlib import Path
from typing import Any

from loguru import logger
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker import types

from lightrft.config.tables import table
from lightrft.core.engine import derived_seed
from lightrft.extras.http_server import MAX_REQUEST, Refusal, answered, check_key, content_of
from lightrft.extras.tinker import protocol
from lightrft.extras.tinker.promises import Jobs, Promises
from lightrft.extras.tinker.protocol import RequestLimits
from lightrft.extras.tinker.records import SamplePrompt
from lightrft.strategy.checkpoint.atomic import OLD, TEMPORARY

API = "/api/v1"
SILENT_SECONDS = 30.0
"""After so long without a heartbeat the models of a session make room. It comes every 10 s."""
ABOUT = "model.json"
"""File beside the checkpoints of a model with what it is."""
CLIENT_CONFIG: dict[str, Any] = table("extras/tinker/client_config")
"""What the SDK is told to do: plain HTTP, and one question for each result."""


@dataclass(slots=True)
class TrainedName:
    """Registration of a model that a client trains."""

    session: str
    asked_for: str
    """Name of the base model, as the client wrote it."""
    metadata: dict[str, Any] | None
    last_request: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Served:
    """Models and limits that the server offers."""

    pretrain: str
    lora_rank: int
    """Rank of the adapters; 0: the model itself is trained."""
    most_models: int
    """Number of models that clients can train at the same time."""
    seed: int
    folder: Path
    """Folder of all checkpoints."""
    limits: RequestLimits
    key: str = ""


class Frontend:
    """Checks requests, and answers those that need no computation."""

    def __init__(self, served: Served):
        self.served = served
        self.jobs = Jobs()
        self._promises = Promises()
        self._sessions: dict[str, float] = {}
        """Session -> time of the last sign of life."""
        self._models: dict[str, TrainedName] = {}
        self._samplers: dict[str, tuple[str | None, Future[Hashable] | Hashable]] = {}
        """Sampling session -> path of a checkpoint, if it has one, and the key of the weights."""
        self._session_numbers: dict[str, int] = {}
        """Session -> how many began before it. Names of sessions are random, and seeds are not."""
        self._num_prompts = 0

    @property
    def model_name(self) -> str:
        return Path(self.served.pretrain).name

    def application(self) -> Starlette:
        posts: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "/client/config": (None, lambda _: CLIENT_CONFIG),
            "/client/dynamic_config": (None, lambda _: {}),
            "/create_session": (None, self.create_session),
            "/session_heartbeat": (types.SessionHeartbeatRequest, self.heartbeat),
            "/create_model": (types.CreateModelRequest, self.create_model),
            "/get_info": (types.GetInfoRequest, self.get_info),
            "/forward_backward": (bytes, self.forward_backward),
            "/optim_step": (types.OptimStepRequest, self.optim_step),
            "/save_weights": (types.SaveWeightsRequest, self.save_weights),
            "/save_weights_for_sampler": (
                types.SaveWeightsForSamplerRequest,
                self.save_for_sampler,
            ),
            "/load_weights": (types.LoadWeightsRequest, self.load_weights),
            "/create_sampling_session": (types.CreateSamplingSessionRequest, self.begin_sampling),
            "/asample": (types.SampleRequest, self.sample),
            "/retrieve_future": (types.FutureRetrieveRequest, self.retrieve),
            "/weights_info": (bytes, self.weights_info),
            "/sessions/{session}/finish": (None, self.finish_session),
            "/cancel_future": (None, lambda _: {}),
            "/telemetry": (None, lambda _: {"status": "accepted"}),
        }
        gets: dict[str, Callable[[Request], Any]] = {
            "/get_server_capabilities": self.capabilities,
            "/samplers/{name}": self.sampler,
            "/training_runs": self.training_runs,
            "/training_runs/{model}": self.training_run,
            "/training_runs/{model}/checkpoints": self.checkpoints,
            "/checkpoints": self.checkpoints,
        }

        checkpoint = "/training_runs/{model}/checkpoints/{kind}/{name}"
        answers = [
            *(("POST", path, *answer) for path, answer in posts.items()),
            *(("GET", path, None, answer) for path, answer in gets.items()),
            ("DELETE", checkpoint, None, self.delete_checkpoint),
        ]
        routes = [
            Route(API + path, self._handler(kind, answer), methods=[method])
            for method, path, kind, answer in answers
        ]
        health = Route(f"{API}/healthz", lambda _: JSONResponse({"status": "ok"}))
        return Starlette(routes=[health, *routes])

    # -- HTTP

    def _handler(
        self, kind: Any, answer: Callable[[Any], Any]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that checks the key, and says what is wrong with a request.

        The answer gets the body: as it is, or JSON of this kind, whose errors are ValueErrors. None
        stands for the request itself.
        """

        async def checked(request: Request) -> Response:
            presented = request.headers.get("x-api-key", "")
            check_key(presented, self.served.key, "that of this server")
            given: Any = request
            if request.method == "POST":
                content = await content_of(request, MAX_REQUEST)
                if kind is not None:
                    given = content if kind is bytes else kind.model_validate_json(content)
            result = answer(given)
            return await result if isawaitable(result) else JSONResponse(result)

        async def handle(request: Request) -> Response:
            response, _ = await answered(checked(request), _refuse)
            return response

        return handle

    async def retrieve(self, body: types.FutureRetrieveRequest) -> Response:
        return await self._promises.answer(body.request_id)

    # -- sessions

    def create_session(self, _: Request) -> dict[str, Any]:
        session = uuid.uuid4().hex
        self._sessions[session] = time.monotonic()
        self._session_numbers[session] = len(self._session_numbers)
        return {"type": "create_session", "session_id": session}

    def heartbeat(self, body: types.SessionHeartbeatRequest) -> dict[str, Any]:
        self._check_session(body.session_id)
        return {"type": "session_heartbeat"}

    def finish_session(self, request: Request) -> dict[str, Any]:
        """Let the models of a session make room."""
        self._sessions.pop(request.path_params["session"], None)
        return {}

    def _check_session(self, session: str) -> None:
        if session not in self._sessions:
            raise Refusal(
                404, f"there is no session {session!r:.100}: it began before this server did"
            )
        self._sessions[session] = time.monotonic()

    # -- models

    def create_model(self, body: types.CreateModelRequest) -> dict[str, Any]:
        self._check_session(body.session_id)
        self._check_optimizer(body.optimizer_config)
        base_model = self._check_base(body.base_model)
        self._check_adapter(body.lora_config)
        name = f"{body.session_id}:train:{body.model_seq_id}"
        model = TrainedName(body.session_id, base_model, body.user_metadata)
        return self._promises.add(
            f"{name}:create",
            lambda: self._begin(name, model),
            lambda _: {"model_id": name, "type": "create_model"},
        )

    def _begin(self, name: str, model: TrainedName) -> Future[Any]:
        """Make room for a model, and begin it."""
        # Requests that wait already come before the model is given up.
        replaced = self._make_room()
        created = self.jobs.add("create", name=name, replaced=replaced)
        for former in replaced:
            del self._models[former]
        self._models[name] = model
        self._write_about(name, model)
        return created

    def _make_room(self) -> list[str]:
        """Return the models to give up. Raises ValueError if all of them are in use."""
        if len(self._models) < self.served.most_models:
            return []

        silent = time.monotonic() - SILENT_SECONDS
        unused = [
            name
            for name, model in self._models.items()
            if self._sessions.get(model.session, 0.0) < silent
        ]
        if unused:
            return unused[:1]
        why = "one model at a time, as it trains all parameters (--lora_rank 0)"
        if self.served.lora_rank:
            why = f"{self.served.most_models} adapters at the same time"
        raise ValueError(
            f"this server trains {why}, and other sessions are using it: a session that ends, or is"
            f" silent for {SILENT_SECONDS:g} s, makes room"
        )

    def _write_about(self, name: str, model: TrainedName) -> None:
        folder = self.served.folder / protocol.folder_of(name)
        folder.mkdir(parents=True, exist_ok=True)
        about = {
            "model_id": name,
            "base_model": model.asked_for,
            "lora_rank": self.served.lora_rank,
            "user_metadata": model.metadata or {},
        }
        (folder / ABOUT).write_text(json.dumps(about))

    def _check_base(self, base_model: str | None) -> str:
        """Return the base model that is asked for. Raises ValueError for another one."""
        wanted = base_model or self.served.pretrain
        if Path(wanted).name.lower() != self.model_name.lower():
            raise ValueError(f"this server has {self.served.pretrain}, not {base_model!r:.200}")
        return wanted

    def _check_adapter(self, config: types.LoraConfig | None) -> None:
        rank = self.served.lora_rank
        if config is None:
            return
        # The SDK has no way to ask for full fine-tuning.
        if rank == 0:
            logger.warning("a client asks for an adapter: all parameters are trained (--lora_rank)")
            return
        if config.rank != rank:
            raise ValueError(f"adapters have rank {rank} here (--lora_rank), not {config.rank}")
        if config.seed not in (None, self.served.seed):
            raise ValueError(f"adapters begin from --seed {self.served.seed}: omit the seed")
        if not (config.train_mlp and config.train_attn):
            raise ValueError("the server's --target_modules say what has adapters")

    def _check_optimizer(self, config: Any) -> None:
        if config is not None and config.type != "adamw":
            raise ValueError(f"the optimizer is {config.type!r:.100}: this server has adamw alone")

    def get_info(self, body: types.GetInfoRequest) -> dict[str, Any]:
        asked_for = self._model(body.model_id).asked_for
        return {
            "type": "get_info",
            "model_id": body.model_id,
            "model_name": asked_for,
            "model_data": {"model_name": asked_for, "tokenizer_id": asked_for},
        } | _adapter(self.served.lora_rank)

    def _model(self, name: str) -> TrainedName:
        if name not in self._models:
            raise Refusal(404, f"there is no model {name!r:.100}: it was not created, or made room")
        model = self._models[name]
        model.last_request = time.time()
        self._sessions[model.session] = time.monotonic()
        return model

    # -- training

    def forward_backward(self, content: bytes) -> dict[str, Any]:
        number, arguments = protocol.read_training(content, self.served.limits)
        model = arguments["name"]
        self._model(model)
        return self._promises.add(
            _request_id(model, number),
            lambda: self.jobs.add("forward_backward", **arguments),
            protocol.write_outputs,
        )

    def optim_step(self, body: types.OptimStepRequest) -> dict[str, Any]:
        adam = protocol.read_adam(body)
        self._model(body.model_id)
        return self._promises.add(
            _request_id(body.model_id, body.seq_id),
            lambda: self.jobs.add("optim_step", name=body.model_id, adam=adam),
            lambda metrics: {"metrics": metrics},
        )

    # -- checkpoints

    def save_weights(self, body: types.SaveWeightsRequest) -> dict[str, Any]:
        return self._save(body.model_id, body.seq_id, "weights", body.path, "save_weights")

    def save_for_sampler(self, body: types.SaveWeightsForSamplerRequest) -> dict[str, Any]:
        """Save weights by name, or keep them in memory for a sampling session."""
        kind = "save_weights_for_sampler"
        if body.path is not None:
            return self._save(body.model_id, body.seq_id, "sampler_weights", body.path, kind)
        if body.kind != "snapshot":
            raise ValueError("this server has sampling clients of the kind snapshot alone")

        model = self._model(body.model_id)
        sampler = f"{model.session}:sample:{body.sampling_session_seq_id}"

        def begin() -> Future[Any]:
            key = self.jobs.add("snapshot", name=body.model_id)
            self._samplers[sampler] = None, key
            return key

        return self._promises.add(
            _request_id(body.model_id, body.seq_id),
            begin,
            lambda _: {"sampling_session_id": sampler, "type": kind},
        )

    def _save(
        self, model: str, seq_id: int | None, kind: str, name: str | None, verb: str
    ) -> dict[str, Any]:
        self._model(model)
        request_id = _request_id(model, seq_id)
        path = protocol.path_of(model, kind, name or f"{seq_id:06d}")
        tag = protocol.tag_of(path)
        return self._promises.add(
            request_id,
            lambda: self.jobs.add("save", name=model, tag=tag, optimizer=kind == "weights"),
            lambda _: {"path": path, "type": verb},
        )

    def load_weights(self, body: types.LoadWeightsRequest) -> dict[str, Any]:
        """Load weights into a model, or into a new one if the request names a session."""
        tag = self._tag(body.path)
        if body.optimizer and "/sampler_weights/" in tag:
            raise ValueError(
                f"{body.path} has no state of the optimizer: it was saved for sampling"
            )

        new = None
        if body.model_id is not None:
            name = body.model_id
            self._model(name)
            request_id = _request_id(name, body.seq_id)
        elif body.session_id is None or body.model_seq_id is None:
            raise ValueError("load_weights needs a model_id, or session_id and model_seq_id")
        else:
            self._check_session(body.session_id)
            self._check_optimizer(body.optimizer_config)
            name = f"{body.session_id}:train:{body.model_seq_id}"
            request_id = f"{name}:create"
            folder = (self.served.folder / tag).parents[1]
            base_model = self._check_base(body.base_model or self._about(folder)["base_model"])
            new = TrainedName(body.session_id, base_model, body.user_metadata)

        def begin() -> Future[Any]:
            if new:
                self._begin(name, new)
            return self.jobs.add("load", name=name, tag=tag, optimizer=body.optimizer)

        return self._promises.add(
            request_id,
            begin,
            lambda _: {"path": body.path, "model_id": name, "type": "load_weights"},
        )

    def weights_info(self, content: bytes) -> dict[str, Any]:
        body = json.loads(content)
        if not isinstance(body, dict) or not isinstance(body.get("tinker_path"), str):
            raise ValueError("weights_info needs a tinker_path")
        about = self._about((self.served.folder / self._tag(body["tinker_path"])).parents[1])
        return {"base_model": about["base_model"]} | _adapter(about["lora_rank"])

    def _tag(self, path: str) -> str:
        """Return the folder of a checkpoint that is there."""
        tag = protocol.tag_of(path)
        if not (self.served.folder / tag).is_dir():
            raise Refusal(404, f"there is no checkpoint {path!r:.200} in {self.served.folder}")
        return tag

    def _about(self, folder: Path) -> dict[str, Any]:
        """Return what a folder of checkpoints says about its model. Raises ValueError."""
        try:
            written = json.loads((folder / ABOUT).read_text())
            about = {key: written[key] for key in ("model_id", "base_model", "lora_rank")}
            if [*map(type, about.values())] != [str, str, int]:
                raise ValueError(about)
            return about
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{folder / ABOUT} cannot be read: {error!r}") from error

    def _folders(self) -> list[Path]:
        """Return the folders of all models that have been trained; broken ones are left out."""
        found = []
        for file in sorted(self.served.folder.glob(f"*/{ABOUT}")):
            try:
                self._about(file.parent)
                found.append(file.parent)
            except ValueError as error:
                logger.warning("{}", error)
        return found

    # -- sampling

    def begin_sampling(self, body: types.CreateSamplingSessionRequest) -> dict[str, Any]:
        self._check_session(body.session_id)
        key = None
        if body.model_path is not None:
            key = self._tag(body.model_path)
        else:
            self._check_base(body.base_model)
        sampler = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        self._samplers[sampler] = body.model_path, key
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def sampler(self, request: Request) -> dict[str, Any]:
        name = request.path_params["name"]
        path, _ = self._sampler(name)
        return {"sampler_id": name, "base_model": self.served.pretrain, "model_path": path}

    def sample(self, body: types.SampleRequest) -> dict[str, Any]:
        if body.sampling_session_id is None:
            raise ValueError("asample needs a sampling_session_id")
        name = body.sampling_session_id
        _, weights = self._sampler(name)
        if isinstance(weights, Future):
            if not weights.done():
                raise ValueError("the weights of this sampling session are not saved yet")
            weights = weights.result()

        session, _, sampler = name.partition(":")
        drawn = self.served.seed, self._session_numbers[session], sampler, body.seq_id
        number = self._num_prompts + 1
        read = protocol.read_sampling(body, self.served.limits, derived_seed(*drawn))
        scored = bool(body.prompt_logprobs)

        def begin() -> Future[Any]:
            self._num_prompts = number
            return self.jobs.add("sample", prompt=SamplePrompt(number, read, weights, scored))

        request_id = _request_id(name, body.seq_id)
        answer = self._promises.add(request_id, begin, protocol.write_sampled)
        ids = [f"{request_id}:{index}" for index in range(body.num_samples)]
        return {**answer, "sample_sequence_ids": ids}

    def _sampler(self, name: str) -> tuple[str | None, Any]:
        if name not in self._samplers:
            raise Refusal(404, f"there is no sampling session {name!r:.100}")
        return self._samplers[name]

    # -- what there is

    def capabilities(self, _: Request) -> dict[str, Any]:
        model = {
            "model_name": self.served.pretrain,
            "max_context_length": self.served.limits.longest_sequence,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    def training_runs(self, _: Request) -> dict[str, Any]:
        found = [self._run(folder) for folder in self._folders()]
        cursor = {"offset": 0, "limit": len(found), "total_count": len(found)}
        return {"training_runs": found, "cursor": cursor}

    def training_run(self, request: Request) -> dict[str, Any]:
        return self._run(self._run_folder(request))

    def checkpoints(self, request: Request) -> dict[str, Any]:
        folders = [self._run_folder(request)] if request.path_params else self._folders()
        return {"checkpoints": [each for folder in folders for each in self._saved(folder)]}

    def delete_checkpoint(self, request: Request) -> dict[str, Any]:
        at = request.path_params
        tag = self._tag(protocol.path_of(at["model"], at["kind"], at["name"]))
        shutil.rmtree(self.served.folder / tag)
        return {}

    def _run_folder(self, request: Request) -> Path:
        name = request.path_params["model"]
        folder = self.served.folder / protocol.folder_of(name)
        if not (folder / ABOUT).exists():
            raise Refusal(404, f"there is no training run {name!r:.100}")
        return folder

    def _run(self, folder: Path) -> dict[str, Any]:
        about = self._about(folder)
        model = self._models.get(about["model_id"])
        last = model.last_request if model else (folder / ABOUT).stat().st_mtime
        return {
            "training_run_id": about["model_id"],
            "base_model": about["base_model"],
            "model_owner": "",
            "last_request_time": datetime.fromtimestamp(last, UTC).isoformat(),
        } | _adapter(about["lora_rank"])

    def _saved(self, folder: Path) -> list[dict[str, Any]]:
        model = self._about(folder)["model_id"]
        return [
            {
                "checkpoint_id": f"{kind}/{path.name}",
                "checkpoint_type": protocol.CHECKPOINT_KINDS[kind],
                "time": datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(),
                "tinker_path": protocol.path_of(model, kind, path.name),
            }
            for kind in protocol.CHECKPOINT_KINDS
            for path in sorted((folder / kind).glob("*"))
            if path.is_dir() and path.suffix not in (TEMPORARY, OLD)
        ]


def _adapter(rank: int) -> dict[str, Any]:
    return {"is_lora": bool(rank), "lora_rank": rank or None}


def _request_id(owner: str, seq_id: int | None) -> str:
    """Return the id of a request. One that comes twice has the same."""
    if seq_id is None:
        raise ValueError("the request needs a seq_id")
    return f"{owner}:{seq_id}"


def _refuse(refusal: Refusal) -> Response:
    """Return the answer of a refusal; the SDK takes 400 and 408 for faults of a proxy, and repeats."""
    status = 422 if refusal.status in (400, 408) else refusal.status
    message = refusal.message
    return JSONResponse({"detail": message, "error": message, "category": "user"}, status)
