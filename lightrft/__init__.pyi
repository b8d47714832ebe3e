"""Types of the public names, for editors and type checkers. Written by scripts/python_stub.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from transformers import PreTrainedTokenizerBase

from lightrft.config.errors import ConfigError as ConfigError
from lightrft.config.errors import DataError as DataError
from lightrft.config.sections import Config as Config
from lightrft.app.trainer.python import ConfigOrFile, Model, Reward, Rows
from lightrft.app.trainer.python import TrainedRun as TrainedRun

__version__: str

class TrainPpoFlags(TypedDict, total=False):
    pretrain: str | Path
    """Model to start from: a Hugging Face folder, a GGUF file or a hub name, as for all models here."""
    critic_pretrain: str | Path
    """Model that initialises the critic: a folder or hub name. A reward model also initialises the value head. Empty: --pretrain."""
    reward_pretrain: list[str] | str
    """Reward models: frozen models with a head of one score and the tokenizer of --pretrain. Each is a folder or hub name in the form PATH, PATH:WEIGHT or LABEL=PATH:WEIGHT. The scores are added to the result of --reward; with --reward none they are the only reward."""
    process_reward_pretrain: list[str] | str
    """Process reward models, in the same form: the score at the end of each step of a response is the logit of the probability that the step is correct. --step_separator ends a step, and --step_rewards converts the probabilities to rewards."""
    teacher_pretrain: str | list[str]
    """Teacher model for --distill_coef, frozen, with the tokenizer of --pretrain: a folder or hub name. Several teachers have labels, LABEL=PATH,LABEL=PATH, and --teacher_key selects one for each prompt."""
    teacher_url: str | Path
    """Teacher model for --distill_coef on an OpenAI-compatible server that returns the log-probs of the prompt (echo), such as http://host:8000/v1. If the server needs a key, set the environment variable TEACHER_API_KEY."""
    self_teacher: Literal['none', 'actor', 'average']
    """Teacher for --distill_coef that is the model itself, with the prompt of --teacher_prompt_key: the actor before the update, or its moving average (--enable_ema, --ema_beta)."""
    bf16: bool
    """Compute in bfloat16 with float32 master weights; otherwise everything is float32. On a GPU with fast bfloat16 (NVIDIA from A100 and L4 on) this is the default; --no_bf16 turns it off."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_policy: Literal['full', 'selective', 'offload']
    """Activations to keep of each block: full keeps only the input; selective also keeps attention; offload keeps the input in host memory."""
    fused_kernels: Literal['none', 'liger']
    """liger: compute norms, rotary embeddings and feed-forward layers of Llama, Qwen, Gemma, OLMo and similar models with fused kernels, on an accelerator; requires the package liger-kernel. In float32, log-probs and gradients change by at most 1e-5."""
    fp8_training: bool
    """Multiply in FP8 in the linear layers of the blocks (torchao, pip install '.[fp8]'), with a scale for each row; weights and optimizer keep their precision. For Hopper and later GPUs; a CPU emulates it."""
    trust_remote_code: bool
    """Run Python code that comes with the model. Use it only for sources that you trust."""
    lora_rank: int
    """Train low-rank adapters (LoRA) of this rank while the model stays frozen; 0: train the model itself."""
    lora_alpha: float
    """Scale of the adapters: the output is multiplied by lora_alpha / lora_rank."""
    lora_rank_pattern: str | dict[str, Any]
    """Other ranks of some layers, by names or ends of names, as JSON: {'down_proj': 4}."""
    lora_alpha_pattern: str | dict[str, Any]
    """Other values of lora_alpha for some layers, in the same form."""
    rslora: bool
    """Multiply by lora_alpha / sqrt(lora_rank) instead, so that larger ranks learn as fast (arXiv 2312.03732)."""
    lora_init: Literal['kaiming', 'gaussian']
    """Distribution of A at the start, as in peft: uniform (kaiming), or normal with a standard deviation of 1 / lora_rank (gaussian). B is 0."""
    lora_lr_ratio: float
    """LoRA+: learning rate of B as a multiple of --learning_rate, which A has (arXiv 2402.12354; 16 is usual)."""
    lora_dropout: float
    """Dropout probability on the input of an adapter in training."""
    target_modules: list[str] | str
    """Names, or ends of names, of the linear layers that get adapters; all-linear: all except the output layer."""
    load_in_4bit: bool
    """With lora_rank: keep the frozen linear layers in four bits (QLoRA: NF4 with double quantisation), so that the model takes about a quarter of the memory of bfloat16. Embeddings, norms and the head keep the dtype of the run. The engine and the saved model have the matrices that these bits stand for. Requires bitsandbytes: pip install '.[qlora]'."""
    freeze_prefix: list[str] | str
    """Prefixes of the names of parameters that are not trained; with lora_rank, these get no adapters."""
    freeze_vision_tower: bool
    """With a key of media: do not train the parameters that only images, videos or sound use. These are the towers and the projections into the language model."""
    prompt_data_probs: list[float] | str
    """Probability of each data set of --prompt_data, another form of NAME:PROBABILITY."""
    prompt_split: str | Path
    """Split of the training data."""
    eval_data: Rows
    """Held-out data in the same form, for --eval_steps and the end of the run; empty: no evaluation. Several sets with numbers of their own are NAME=SOURCE, separated by commas or a list in YAML. Sets with the name of a benchmark, such as gsm8k, or NAME:BENCHMARK=SOURCE, have the benchmark's columns, instruction and verifier (docs/evaluation.md)."""
    eval_split: str | Path
    """Split of the held-out data."""
    pretrain_data: Rows
    """Prompts with answers for the supervised loss of --ptx_coef, in the same form; empty: none."""
    pretrain_split: str | Path
    """Split of --pretrain_data."""
    input_key: str | Path | None
    """Column of the prompt: a text, or chat messages as a list or JSON text. Unset: input, or the columns of a known form (docs/data.md)."""
    json_chats: Literal['auto', 'always', 'never']
    """Texts that are chat messages as JSON. auto: prompts whose objects have nothing but the keys of a message and known roles are messages, and answers are texts; always: prompts and answers whose objects have roles are messages; never: a text is a text."""
    images_key: str | Path | None
    """Column of a prompt's images: one path or a list of paths, relative to the folder of the data, or images of the datasets package; a row without images is a text prompt. In a chat, an image takes the place of <image> in the text, or precedes the text. The model must accept images."""
    videos_key: str | Path | None
    """Column of a prompt's videos: a file (.gif, .webp, or another one that FFmpeg reads), a list of images as frames, or a list of several. Unset: no videos."""
    audios_key: str | Path | None
    """Column of a prompt's clips of sound: a .wav file or another one that FFmpeg reads, one of the datasets package, or a list of several. Unset: no sound."""
    video_fps: float
    """Frames per second sampled from a video."""
    video_max_frames: int
    """Maximum number of frames sampled from a video, evenly spaced."""
    audio_sampling_rate: int
    """Sampling rate in Hz of the model, for example 16000: audio clips are resampled to it with the package av. 0: clips are not resampled, and one with another rate is a bad row."""
    check_media: Literal['all', 'first', 'none']
    """Images, videos and clips that are read completely when the data are loaded, in parallel processes: all of them, or only the ones in the first rows. A row with one that cannot be read is a bad row (--bad_rows). The start of each file is read in any case."""
    media_max_mb: float
    """Maximum size in MB of an image, video or audio file; a row with a larger file is a bad row."""
    media_urls: bool
    """Allow HTTP(S) URLs in the columns of media: each is fetched once on each host, into the temporary folder."""
    media_root: str | Path
    """Folder that the paths of images are relative to; no file outside of it is read. Empty: paths are relative to the folder of the data, and any path is allowed."""
    label_key: str | Path | None
    """Column of the correct answer: reward functions receive it as `label`, and SFT trains on it. For SFT, a row that ends in an answer needs none. For KTO it is true for a good answer, and for train_prm it is a list with a value for each step. Unset: label, or the column of a known form (docs/data.md)."""
    eval_input_key: str | Path | None
    """Column of the prompt in --eval_data; unset: --input_key."""
    eval_label_key: str | Path | None
    """Column of the correct answer in --eval_data; unset: --label_key."""
    reference_key: str | Path | None
    """Column of a reference answer: reward functions receive it as `reference`."""
    input_template: str | Path | None
    """Template with one {} of prompts that are text: in a shell $'Question: {}\\nAnswer: ', with a line break. Chat messages are not changed."""
    apply_chat_template: bool
    """Render prompts with the tokenizer's chat template. A response then also stops at the token that ends a turn of the template."""
    system_prompt: str | Path | None
    """System message for the chat template. A row with a system message of its own uses that one."""
    chat_template_kwargs: str | dict[str, Any]
    """Additional variables for the chat template as a JSON object: '{'enable_thinking': false}'. The column `chat_template_kwargs` of a row replaces them."""
    chat_template_date: str | Path
    """Date as YYYY-MM-DD for chat templates that write it; empty: the first day of the run, also after it is resumed."""
    teacher_key: str | Path | None
    """Column with the label of the teacher in --teacher_pretrain that scores the samples of a prompt."""
    teacher_prompt_key: str | Path | None
    """Column of the prompt that the teacher sees in place of the actor's, in the same form, such as the prompt with a reference solution. The teacher scores the same responses."""
    prompt_max_len: int
    """Maximum length of a prompt in tokens; a row with a longer prompt is a bad row."""
    max_samples: int | None
    """Use only this number of rows from the beginning of each training data set."""
    max_eval_samples: int | None
    """Use only this number of rows from the beginning of the held-out data."""
    data_cache: str | Path
    """Folder for tokenized data in Arrow files that are mapped into memory and used again, for data larger than memory; empty: every process tokenizes the data and holds them in memory."""
    deduplicate: Literal['none', 'exact', 'whitespace']
    """Omit training rows whose prompt (in SFT: prompt and answer) repeats an earlier row, and report their number: exact compares texts as they are, whitespace ignores differences in the white space between words."""
    step_separator: str | Path
    """For process reward models: text that ends each step of an answer except the last. It is part of the step, and the score of the step is at its last token."""
    learned_turns: Literal['all', 'last']
    """Turns of the assistant that SFT and --pretrain_data train on in a conversation: all, or the last one. A turn with `weight`, `train` or `loss` 0 is not learned."""
    expand_turns: bool
    """SFT and --pretrain_data train on each turn of the assistant as the last one of an example of its own, which ends with it, for chat templates that write earlier turns differently, such as without their thinking."""
    learn_empty_thinking: bool
    """Train on an empty thinking that a chat template writes before an answer. Without it an answer to a row without thoughts teaches nothing about thinking."""
    bad_rows: Literal['stop', 'skip']
    """Handling of a malformed or too long row: stop ends the run before a model is loaded and names the file and line, skip omits it and reports how many there are, and the first ones. With skip, train_ppo also leaves out prompts whose media cannot be read any more when they are drawn."""
    strategy: str | Path
    """Distributed backend: fsdp, deepspeed, or a subclass of StrategyBase as module:Class or file.py:Class. auto: deepspeed with --fsdp false or a flag that only ZeRO has, else fsdp."""
    fsdp: bool
    """Shard with FSDP2: short for --strategy fsdp; --fsdp false is short for --strategy deepspeed."""
    fsdp_cpu_offload: bool
    """Keep parameters and optimizer states in host memory, and copy shards to the device when they are used."""
    reduce_gradients_once: bool
    """FSDP2: reduce gradients over the ranks only after the last micro-batch of an optimizer step. This communicates less, but until then every rank keeps the gradient of the whole model, four bytes per parameter. By default gradients are sharded after every micro-batch."""
    gather_parameters_once: bool
    """FSDP2: keep gathered parameters on the device from the first micro-batch of an optimizer step until the last one. This communicates less, but until then every rank keeps the whole model, with --bf16 two bytes per parameter. By default each micro-batch gathers each block twice."""
    zero_stage: Literal[0, 1, 2, 3]
    """Stage of ZeRO: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    zpg: int
    """ZeRO-3: number of consecutive ranks, usually one node, that keep a secondary copy of the parameters and gather them within the group."""
    adam_offload: bool
    """ZeRO: keep optimizer states in host memory and update the parameters there."""
    param_offload: bool
    """ZeRO-3: keep parameters in host memory and copy them to the device layer by layer."""
    overlap_comm: bool
    """ZeRO: reduce gradients during the backward pass; uses more memory."""
    reduce_dtype: Literal['fp32', 'bf16']
    """With --bf16: dtype of the gradients while they are reduced over ranks; bf16 halves the traffic. FSDP2 accumulates them over micro-batches in float32 either way, ZeRO in this dtype."""
    offload_idle: bool
    """Keep only the models and optimizers of the current phase in device memory; all others wait in host memory."""
    dp_replicate: int
    """Hybrid sharding: number of replicas of the model; each one is sharded over a share of the data ranks. 0: every data rank has a replica of its own. That is the fastest for a model that fits on each: only gradients are communicated."""
    tp_size: int
    """Tensor parallelism: number of consecutive ranks that split each layer of the trained models; they process the same data."""
    tp_sequence_parallel: bool
    """Split the tokens between attention and feed-forward layers over the --tp_size ranks: less memory, same traffic."""
    ep_size: int
    """Expert parallelism: number of consecutive ranks that divide the experts of each layer of a mixture; each token visits the ranks of its experts. The other parameters are sharded as without it."""
    sp_size: int
    """Sequence parallelism: number of ranks that split the tokens of each micro-batch of the trained models."""
    sp_impl: Literal['auto', 'ulysses', 'zigzag']
    """Implementation of attention with --sp_size: ulysses exchanges tokens for heads (all-to-all), zigzag gathers keys and values. auto: ulysses."""
    cp_size: int
    """Context parallelism: short for --sp_size N --sp_impl zigzag."""
    sample_store: Literal['memory', 'transfer_queue']
    """Transport of samples between ranks within a step: memory sends each value directly to the rank that computes with it; transfer_queue writes all of them to a TransferQueue on a Ray cluster (RAY_ADDRESS), where other programs can read them."""
    deterministic: bool
    """On an accelerator, train only with kernels that give bitwise equal results in every run, as a CPU always does: attention's backward pass is slower and uses more memory. Torch raises an error for an operation without such a kernel. The engine's kernels are not covered. Turns of episodes begin together, as on a CPU, so each waits for the slowest program of the turns before."""
    timeout_minutes: float
    """End the run when a collective waits longer than this; every rank then logs which ranks are late and the position of each rank."""
    arrival_minutes: float
    """End the run when a rank waits longer than this for the others at the start; the message names the missing ranks."""
    phase_minutes: float
    """End the run when a phase, such as generate or train, takes longer than this on all ranks; every rank then logs the position of each rank."""
    engine_type: str | Path
    """Generation engine: vllm, sglang, hf (transformers), or a subclass of Engine as module:Class or file.py:Class. auto: the first of vllm and sglang that is installed, else hf."""
    engine_tp_size: int
    """Tensor parallelism of the engine: number of consecutive ranks that share the weights of one engine."""
    engine_mem_util: float
    """Fraction of an accelerator's memory for the engine while it is awake: vLLM counts everything it uses, SGLang weights and cache."""
    engine_kv_cache_gb: float
    """Size of the key-value cache of vLLM or SGLang on a CPU, in GB."""
    enable_engine_sleep: bool
    """Put the engine to sleep during training, so that both fit on one device."""
    engine_sleep_level: Literal[1, 2]
    """Level 1 keeps the weights of the sleeping engine in host memory; level 2 discards them, because they are streamed in again in any case. If the engine gets only adapters (lora_sync), the default is 1, and level 2 makes each stream bring all weights. With --speculative eagle3 or mtp on an accelerator it is 1 too, because vLLM loses memory of these at level 2."""
    engine_enforce_eager: bool
    """Run vLLM or SGLang without CUDA graphs. A CPU has none; there, vLLM compiles its forward pass with --engine_args '{'enforce_eager': false}'."""
    engine_args: str | dict[str, Any]
    """More arguments of vLLM (EngineArgs) or SGLang (ServerArgs) as a JSON object: '{'kv_cache_dtype': 'fp8', 'max_num_seqs': 512}'. They replace arguments that are set here, except those that a flag sets or that samples depend on."""
    limit_mm_image_per_prompt: int
    """Maximum number of images in one prompt; the engine reserves memory for them."""
    limit_mm_video_per_prompt: int
    """Maximum number of videos in one prompt. The default is 0, because vLLM reserves memory for the longest video that would fit."""
    limit_mm_audio_per_prompt: int
    """Maximum number of audio clips in one prompt."""
    micro_rollout_batch_size: int
    """Number of prompts that the hf engine generates at once."""
    router_replay: bool
    """For a mixture of experts: the trainer uses the experts that the engine chose for each token, so that rounding in one of them changes no choice."""
    speculative: Literal['none', 'ngram', 'group', 'draft', 'eagle3', 'mtp']
    """Source of draft tokens for speculative decoding in vLLM. It does not change the sampled distribution. ngram, the prompt and the response itself; group, all responses to the same prompt; draft, a small model; eagle3, an EAGLE-3 head; mtp, the layers of the model that predict several tokens. No drafts are verified at batch sizes where measurements show no gain."""
    num_draft_tokens: int
    """With speculative: maximum number of tokens in one draft."""
    draft_pretrain: str | Path
    """Model of --speculative draft, with the vocabulary of --pretrain, or head of --speculative eagle3: a folder or hub name."""
    weight_sync_bucket_mb: int
    """Size of one bucket of the weight stream in MB; the peak of additional memory is about two buckets. 0: an eighth of the free device memory at the beginning of the stream, on the rank that has the least; 512 on a CPU."""
    lora_sync: Literal['auto', 'adapter', 'merged']
    """With lora_rank: what the engine gets after every step. adapter: only the adapters, for an engine that holds them beside the weights (vllm, hf); a response ends under the adapters that began it, so that --weight_update in_flight changes later responses alone in vLLM. merged: all weights, with the adapters merged into them. auto: adapter if the engine can do that with the model, else merged."""
    rollout_quantization: Literal['none', 'int8', 'fp8']
    """INT8 or FP8 for the matrices of attention and MLP layers in vLLM: their weights are quantised in the stream, with a scale for each output channel, and their inputs for each token. --rollout_correction is tis then, unless it is set. int8 runs on CPUs and accelerators, fp8 on accelerators that have it (Ada, Hopper and later)."""
    exact: bool
    """Compute log-probs in engine and trainer with the same bits: attention reads keys in fixed blocks, and the rows of a product do not depend on their number. With --engine_type hf, or vllm on a CPU; FSDP2 and dense models of text. A step with any difference ends the run, unless responses continue under newer weights. See docs/exact.md."""
    verify_weight_sync: bool
    """Compare fingerprints of the weights that were sent with those in the engine after every stream, and stop the run if they differ. The first time and every 128th time all weights are compared, otherwise every 128th row of each, so that 128 streams verify every element again."""
    rollout_batch_size: int
    """Number of prompts in one step, over all ranks. Unset: 128, or fewer if the data would otherwise give fewer than 50 steps."""
    n_samples_per_prompt: int
    """Number of responses sampled for each prompt; they form a group."""
    scheduler: str | Path
    """What chooses the prompts of a step: fixed_batch, rounds, ledger, which draws prompts in proportion to the signal that their earlier responses let expect, or a class of your own as module:Class or file.py:Class. auto: rounds with a flag that needs them, else fixed_batch."""
    generate_max_len: int
    """Maximum length of a response in tokens."""
    temperature: float
    """Sampling temperature; all log-probs are computed at this temperature."""
    top_p: float
    """Sample only from the most likely tokens whose probabilities add up to this; all log-probs are computed over these tokens."""
    top_k: int
    """Sample only from the k most likely tokens; all log-probs are computed over these tokens. 0: all tokens."""
    min_p: float
    """Sample only from tokens with at least this share of the probability of the most likely one; all log-probs are computed over these tokens. 0: all tokens."""
    stop: list[str] | str
    """Texts that end a response, including special tokens; the token that completes one is the last of the response. As texts may contain commas, several are separated by spaces, or are a list in YAML."""
    stop_token_ids: list[int] | str
    """Tokens that end a response, in addition to the model's end tokens."""
    bad_words: list[str] | str
    """Words that are never sampled as one token, also after a space; all log-probs are computed accordingly. A word of several tokens is refused. As words may contain commas, several are separated by spaces, or are a list in YAML."""
    banned_token_ids: list[int] | str
    """Tokens that are never sampled; all log-probs are computed without them."""
    min_tokens: int
    """Minimum length of a response in tokens: before it, no token is sampled that would end the response; all log-probs are computed accordingly."""
    first_token_temperature: float | None
    """Sample the first token of a response at this temperature, for diversity (FIRE; 30 in the paper). This token is not trained on."""
    eval_temperature: float | None
    """Temperature of the samples of --eval_n_samples; unset: --temperature."""
    eval_n_samples: int
    """Number of responses that evaluation also samples for each prompt, to report how often any of k is correct (pass@k)."""
    dynamic_sampling: bool
    """Replace prompts whose responses all got the same reward by other prompts, until a step is full (DAPO)."""
    dynamic_sampling_rounds: int
    """Maximum number of rounds of dynamic_sampling; groups that are masked in the loss then fill the step."""
    over_sampling: float
    """Factor by which a step starts more prompts than it needs; it stops as soon as enough groups are complete."""
    early_stop_every: int
    """With over_sampling, longest_first or overlap: number of engine steps (one token of each response) between two exchanges between the ranks about complete groups. Generation continues during the exchange, and the decision follows as many steps later."""
    rollout_schedule: Literal['fifo', 'longest_first', 'tail_rounds']
    """Order of the prompts of a step. fifo: all begin at once, each on one rank. longest_first: ranks share the responses to each prompt, and a response begins as soon as a rank has room. The ones that are expected to be longest begin first, judged by other responses to the prompt, in this pass over the data or the last one. The trained samples are the same. tail_rounds: with over_sampling, prompts that are not complete when enough others are complete start again from the beginning, together, in later steps, so that all responses come from one version of the weights."""
    partial_rollout: bool
    """With over_sampling: responses that were stopped are continued in the next step instead of discarded. With dynamic_sampling: surplus groups are also used in the next step."""
    overlap: bool
    """Compute log-probs, values and the scores of reward models of complete groups in a separate thread while the engine decodes others. The models stay in device memory beside the engine."""
    dump_rollouts: str | Path
    """Folder for the samples of each step with log-probs and rewards, for --replay_rollouts."""
    replay_rollouts: str | Path
    """Folder with the samples of a run that had --dump_rollouts: the steps learn from them, without an engine and rewards, and with the same numbers if models, data and flags are the same."""
    curriculum: list[float] | str
    """Two shares: a prompt is skipped for curriculum_rest passes when the share of correct responses to it is below the first or above the second."""
    curriculum_rest: int
    """Number of passes over the data that curriculum skips a prompt."""
    rollout_ranks: int
    """Number of ranks, the last ones, that only generate. The others train and have no engine: prompts and weights are sent to these ranks. 0: every rank does both in turn."""
    max_staleness: int
    """With rollout_ranks: maximum number of steps between the weights that sample a token and the policy that is trained on it. Up to this many later steps are generated while a step is trained on; 0: engines wait during training."""
    weight_update: Literal['wait', 'in_flight', 'in_flight_exact']
    """With max_staleness: effect of new weights on responses that are being generated. wait: the update waits until these responses have ended. in_flight: weights are loaded between two tokens, and responses continue with the keys and values that they have. in_flight_exact: the keys and values of these responses are computed again with the new weights, so each update costs a prefill of all of them."""
    environment: str | Path
    """Class or async function that makes a response an episode of several turns: file.py:Class, file.py:function or module:object; verifiers:NAME is an environment of verifiers, openenv:URL an OpenEnv server, and harbor:FOLDER a folder with tasks of Harbor. --reward environment takes the rewards from it. Empty: a response is one turn."""
    agent: str | Path
    """Async function (client, row) that makes a response an episode, and returns the reward: file.py:function or module:function. The client is openai.AsyncOpenAI, connected to a server in the same process that answers with turns of the trained model, also to Anthropic's Messages."""
    tools: list[str] | str
    """Functions that the model may call: file.py, file.py:function, module:function, calculator or python. The chat template describes them from types and docstrings. mcp:COMMAND and mcp:http://host:8000/mcp are the tools of an MCP server; each episode has a connection of its own, and with a command a server process of its own."""
    tool_parser: str | Path
    """Format of tool calls. hermes: <tool_call>{'name': ..., 'arguments': {...}}</tool_call>, as Qwen models write them too. Others are parsers of the engine by name, such as vLLM's llama3_json, pythonic or deepseek_v3 and SGLang's llama3."""
    max_turns: int
    """Maximum number of turns of an episode. All tokens of turns and observations count for generate_max_len."""
    agent_sampling: Literal['run', 'refuse']
    """Answer to an agent's request with other sampling parameters than the run's. run: the turn is sampled as the run says, and agent/overridden_NAME counts such requests. refuse: an error. Both honour the largest number of tokens and stop texts of a request."""
    agent_branches: int
    """Maximum number of other conversations of an episode, beside the first one: of sub-agents, after a history was summarized or edited, or of requests at the same time. A request for one more is refused."""
    agent_record: str | Path
    """SQLite file for each request to an agent's server, with the reply, tokens and log-probs; with several ranks, each has its own: agent.rank0.sqlite for agent.sqlite. `lightrft agents replay` sends the requests again."""
    turn_max_len: int | None
    """Maximum length of a turn in tokens; unset: all tokens that are left in the episode."""
    episode_minutes: float | None
    """Time limit in minutes for an episode: the turn that reaches it is the last one. Unset: no limit."""
    tool_seconds: float
    """Time limit in seconds for a call of a tool. If a call takes longer, the model reads an error instead of the result."""
    environment_minutes: float
    """Time limit in minutes for an environment to ask for the next turn. If an environment takes longer, the process is killed, and nothing is learned from the episode."""
    environment_workers: int
    """Largest number of episodes that run on a rank at the same time, each in a process of its own."""
    environment_memory_gb: float
    """Memory in GB that the process of an episode may allocate; 0: no limit."""
    reward_key: str | Path | None
    """Column that names the rewards and reward models for the row: a label, or a list of labels. Unset: all of them score every row."""
    reward_workers: int | None
    """Number of worker processes of each rank that call the reward function while other responses are generated. 0: call it in the rank's own process, when all responses are complete. Unset: 2, but 0 if none of the functions is slow: exact_match, number, choice, f1, format, length and none take microseconds."""
    reward_memory_gb: float
    """Memory in GB that a worker process may allocate for calls; 0: no limit."""
    reward_minutes: float
    """Time limit in minutes for a call of the reward function for one prompt. A call that takes longer fails, and the worker process is killed."""
    reward_failure: Literal['stop', 'zero', 'drop']
    """Action if a reward call raises, crashes, takes too long, or does not return a finite number for each response. The call is repeated for each response alone, to name one that fails. stop: end the run. zero: give 0 to the responses that fail. drop: do not train on any response to the prompt."""
    judge_url: str | Path
    """Address of the language model of --reward judge: an OpenAI-compatible server, such as http://host:8000/v1. If the server needs a key, set the environment variable JUDGE_API_KEY. engine: the trained model judges its own responses."""
    judge_model: str | Path
    """Name of the judge's model on the server."""
    judge_template: str | Path
    """File with the text that the judge gets, with {prompt}, {response} and any column of the data, such as {label}. Empty: a request to rate the response."""
    judge_pattern: str | Path
    """Regular expression with one group, the score; the last match in the judge's reply counts."""
    judge_range: list[float] | str
    """Lowest and highest score of the judge; the reward is 0 at the lowest and 1 at the highest one."""
    judge_max_tokens: int
    """Maximum length of the judge's reply in tokens."""
    server_minutes: float
    """Requests to a server of --reward, --judge_url or --teacher_url are repeated for this time in minutes while it is unreachable or busy."""
    reward_model_coef: float
    """Coefficient of the scores of --reward_pretrain and of the rewards of --process_reward_pretrain."""
    step_rewards: Literal['sum', 'mean', 'difference', 'min']
    """Rewards of the K steps of a response, computed from the probabilities p that they are correct. sum: p, so that long responses get more; mean: p / K; difference: the increase of p over the step before, so that the sum is the last p; min: only the least p, at that step."""
    overlong_buffer: bool
    """Lower the reward of a response whose length is close to generate_max_len."""
    overlong_buffer_len: int | None
    """The penalty begins this number of tokens before generate_max_len, and grows linearly. Unset: a fifth of generate_max_len, as in DAPO."""
    overlong_buffer_penalty_factor: float
    """Penalty at generate_max_len."""
    reward_running_norm: bool
    """Divide rewards by the standard deviation of all rewards of the run so far."""
    reward_running_norm_minus_mean: bool
    """Subtract the mean of all rewards of the run before the division of reward_running_norm."""
    reward_clip: float | None
    """Clip rewards to [-reward_clip, reward_clip], after the penalty and the running normalisation."""
    reward_group_norm: bool
    """Standardise rewards within each group, before the estimator uses them."""
    advantage_estimator: str | Callable[..., Any] | None
    """Estimator of advantages, with a recipe (--help NAME shows it): a name, module:function or file.py:function."""
    policy_loss: str | Callable[..., Any] | None
    """Loss of one token: a name, module:function or file.py:function."""
    eps_clip_low: float
    """Lower clip range: the ratio is clipped below at 1 - eps_clip_low."""
    eps_clip_high: float
    """Upper clip range: the ratio is clipped above at 1 + eps_clip_high."""
    eps_clip: float | None
    """Sets eps_clip_low and eps_clip_high to the same value."""
    dual_clip: float | None
    """For negative advantages, limit the loss to -dual_clip times the advantage (3 in the paper)."""
    sapo_tau_positive: float
    """Temperature of sapo's gate for positive advantages; the larger it is, the faster the gradient decays."""
    sapo_tau_negative: float
    """Temperature of sapo's gate for negative advantages; the larger it is, the faster the gradient decays."""
    vespo_power: list[float] | str
    """Exponents of vespo's weight for positive and for negative advantages; the larger one is, the less a sequence counts that has become improbable."""
    vespo_decay: list[float] | str
    """Decay rates of vespo's weight for positive and for negative advantages; the larger one is, the less a sequence counts that has become more probable."""
    policy_drift_coef: float
    """Coefficient of the divergence from the policy before the step, in cpgd and dro."""
    policy_drift_clip: float | None
    """Upper limit of a token's divergence in cpgd, before the coefficient; above it the gradient is zero."""
    cov_ratio: float
    """Share of the tokens of an optimizer step that kl_cov and clip_cov select by high covariance of log-prob and advantage."""
    kl_cov_coef: float
    """Coefficient of the |log ratio| that kl_cov adds to the loss of the selected tokens."""
    clip_cov_range: list[float] | str
    """clip_cov draws the tokens that it masks from this range of the covariance: two numbers."""
    high_entropy_token_ratio: float
    """Train only on the tokens with the highest entropy: this share of the tokens of an optimizer step (0.2 in the paper); 0: all tokens."""
    observation_coef: float
    """Learn also to predict what the environment, the tools or the agent's program answer: the coefficient of the mean negative log-likelihood of these tokens (0.05 in the paper)."""
    entropy_coef: float
    """Coefficient of the entropy bonus."""
    entropy_target: float | None
    """Adapt the coefficient so that the entropy per token, in nats, does not fall below this value: each step below it raises the coefficient, each step above it lowers it and has no bonus."""
    entropy_step: float
    """How much a step raises or lowers the adapted coefficient of the entropy."""
    rollout_correction: str | Callable[..., Any] | None
    """Weight of a token from the ratio p_trainer / p_engine: tis, mis, icepop, module:function or file.py:function; none, also with rollout_quantization."""
    rollout_correction_level: Literal['token', 'sequence']
    """Ratio to use: of each token, or the product over the sequence."""
    rollout_correction_low: float
    """Lower limit of the ratio: tokens with a smaller ratio are masked."""
    rollout_correction_high: float
    """Upper limit of the ratio: larger ratios are truncated (tis), or the tokens are masked."""
    rollout_mask: Literal['none', 'sequence', 'geometric']
    """Mask sequences by the product (sequence) or the geometric mean (geometric) of the ratios p_trainer / p_engine, in addition to any weights of tokens."""
    rollout_mask_low: float | None
    """Lower limit for rollout_mask; unset: 0.5 for the product, 0.999 for the geometric mean."""
    rollout_mask_high: float | None
    """Upper limit for rollout_mask; unset: 2 for the product, 1.002 for the geometric mean."""
    off_policy_delta: float | None
    """Mask tokens with a negative advantage in sequences whose mean of log p_engine - log p_trainer exceeds this number (0.5 is a start); unset: none."""
    use_engine_logprobs: bool
    """Use the engine's log-probs as the old log-probs of the ratio: this saves one forward pass, and the clip is relative to the engine's policy."""
    aux_loss_coef: float
    """Coefficient of the load-balancing loss for the experts of a mixture-of-experts model; it takes one more forward pass. 0: none."""
    router_bias_rate: float
    """Balance the experts of a mixture without a loss: after each optimizer step, this is added to the biases of experts with less than the mean load and subtracted from others (0.001 in the paper). 0: biases stay as they are."""
    ptx_coef: float
    """Coefficient of the supervised loss on --pretrain_data, added in each optimizer step of the actor."""
    ptx_teacher: bool
    """Learn the teacher's distributions over the answers of --pretrain_data, as --distill_top_k does over samples, in place of their tokens. A share L of samples, as in GKD, is --distill_coef L with --ptx_coef 1 - L."""
    loss_agg_mode: Literal['token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum', 'seq-mean-token-sum-norm', 'prompt-mean']
    """Aggregation of token losses into one number, always over all ranks and micro-batches of an optimizer step."""
    branch_weight: Literal['branch', 'episode']
    """Weight of an episode with several conversations in loss_agg_mode. branch: each conversation counts like a whole episode with one, so an episode with more of them counts more. episode: they share the weight that an episode with one conversation has."""
    role_advantage: Literal['role', 'group']
    """Comparison of rewards if an agent returns one for each role. role: a reward is compared with rewards of this role in the group, since roles may be rewarded differently. group: all rewards of the group are compared, with one baseline."""
    train_roles: list[str] | str
    """Roles to learn from, such as solver for the conversations of the model policy:solver. The rewards of the others are compared and reported. Unset: all roles."""
    gamma: float
    """Discount of rewards per token."""
    lambd: float
    """GAE: trade-off between the observed rewards (1) and the critic's value of the next token (0)."""
    value_clip: float
    """Clip range of the critic's loss: a new value is clipped to the old value plus and minus this; 0: no clipping."""
    pass_k: int
    """Number of draws k of the estimator pass_at_k."""
    distill_coef: float
    """On-policy distillation: coefficient of the log p_teacher - log p_actor that is added to the advantage of each token; 0: no teacher. With --distill_top_k, coefficient of the divergence from the teacher in the loss."""
    distill_top_k: int
    """Distil the teacher's distribution over this number of its likeliest tokens, with one more probability for all others (64 is usual; as many as the vocabulary has: the whole distribution); 0: only the log-prob of the sampled token."""
    distill_beta: float
    """Divergence for --distill_top_k: 0 is KL(teacher || actor), 1 is KL(actor || teacher), and numbers between are the generalised Jensen-Shannon divergence."""
    advantages_norm: bool
    """Normalise advantages to mean 0 and standard deviation 1 over all trained tokens of the step."""
    advantage_clip: float | None
    """Clip advantages to [-advantage_clip, advantage_clip], after the normalisation."""
    mask_truncated: bool
    """Do not train on responses that were truncated at generate_max_len; the rewards still count for the group."""
    length_filter: list[int] | str
    """Train only on responses whose length is in this range of tokens: two numbers, both included."""
    difficulty_filter: list[float] | str
    """Train only on groups whose share of correct responses (a reward above 0.5) is in this range: two numbers, both included."""
    difficulty_weights: list[float] | str
    """Range of the weights of advantages: two numbers. The weight is near the second number for a correct sample of a group whose samples are rarely correct, and for a wrong sample of a group whose samples are mostly correct."""
    entropy_filter: list[float] | str
    """Train only on responses whose mean entropy per token, in nats, is in this range: two numbers."""
    use_kl_loss: bool
    """Add the KL penalty to the loss; otherwise it is subtracted from the reward of each token."""
    init_kl_coef: float
    """Coefficient of the KL penalty, the divergence from a reference model; 0: no reference model."""
    measure_kl: bool
    """Keep a reference model and report the KL divergence from it, even with --init_kl_coef 0."""
    kl_estimator: Literal['k1', 'k2', 'k3', 'k3+']
    """Estimator of the KL divergence: k1 is unbiased, k2 has the right gradient, k3 is unbiased and positive, k3+ is k3 with the gradient of k2."""
    kl_after_baseline: bool
    """With rloo and the KL penalty in the reward: subtract it from each token after the baseline, instead of from the rewards before it."""
    kl_target: float | None
    """Adapt the coefficient so that the KL divergence per token approaches this value."""
    kl_horizon: int
    """The adapted coefficient changes by at most a fifth within this number of samples."""
    ref_refresh_steps: int
    """The reference becomes a copy of the actor after every N steps; 0: never."""
    ref_ema: float
    """The reference follows the actor: after each step it is this times itself plus the rest times the actor (0.99 is slow); 1: it does not move."""
    learning_rate: float
    """Peak learning rate; --actor_learning_rate is another name of it. Unset: 1e-6 in train_ppo, 1e-5 in train_sft (LIMA, arXiv 2305.11206), 5e-7 in train_dpo (Zephyr, arXiv 2310.16944) and train_kto (as in TRL's example), 9e-6 in train_rm (InstructGPT, arXiv 2203.02155), 1e-5 in train_prm (as in TRL); with --lora_rank ten times that (Schulman et al., LoRA Without Regret, 2025)."""
    critic_learning_rate: float
    """Peak learning rate of the critic, if there is one."""
    draft_learning_rate: float
    """Peak learning rate of the model of --speculative draft. It learns from the responses of each step, so that more drafts are accepted. 0: --draft_pretrain is not trained."""
    lr_scheduler: Literal['cosine', 'constant', 'linear', 'wsd', 'inverse_sqrt', 'polynomial']
    """Schedule after the warm-up, as transformers computes it. linear ends at 0, inverse_sqrt falls from the warm-up on, and wsd is constant until it decays in the last steps (arXiv 2404.06395)."""
    lr_min_ratio: float
    """Share of the peak at which the schedule ends."""
    lr_decay_ratio: float
    """Share of all optimizer steps that the decay of wsd takes, a cosine."""
    lr_power: float
    """Exponent of the polynomial. 1: a line."""
    lr_warmup_ratio: float
    """Share of all optimizer steps used for the warm-up."""
    optimizer: Literal['adamw', 'muon', 'sgd', 'lion', 'adamw_8bit']
    """Optimizer of all models that learn; all but adamw need --fsdp. muon orthogonalises the updates of the matrices in the blocks (arXiv 2502.16982), at the learning rate and weight decay of AdamW, and trains all other parameters with AdamW. sgd has no momentum; lion and adamw_8bit come from bitsandbytes. A parameter takes 8 bytes of states with adamw, 4 with muon and lion, about 2 with adamw_8bit, and none with sgd."""
    adam_betas: list[float] | str
    """Two decay rates of AdamW and lion. The momentum of --optimizer muon is always 0.95."""
    l2: float
    """Weight decay, applied to matrices only (not to norms and biases)."""
    max_norm: float
    """Clip the global gradient norm to this value; 0: no clipping."""
    seed: int
    """Seed of all random numbers."""
    num_episodes: int
    """Number of passes over the training data. The run ends after them, or earlier at --max_steps. Unset: 3 for given examples, as in TRL, and 1 in train_ppo."""
    max_steps: int | None
    """Largest number of steps; the end of --num_episodes may come earlier."""
    max_epochs: int
    """Number of passes over the samples of each step."""
    freezing_actor_steps: int
    """Number of first steps that train only the critic; the actor's schedule begins after them."""
    train_batch_size: int
    """Number of samples in one optimizer step, over all ranks. Unset: the samples of a step in train_ppo, 64 in train_sft, train_rm and train_prm, 32 in train_dpo and train_kto, from the sources of --learning_rate; fewer if the data would otherwise give fewer than 50 steps."""
    micro_train_batch_size: int | None
    """Maximum number of sequences in one forward and backward pass on one rank; unset: max_tokens_per_microbatch is the only limit."""
    max_tokens_per_microbatch: int
    """Maximum number of tokens in one forward and backward pass on one rank; with --sp_size, the ranks of a group split this number."""
    max_tokens_per_logprob_microbatch: int | None
    """Maximum number of tokens in one forward pass without gradients on one rank: log-probs of actor and reference, values, scores of reward models. Unset: max_tokens_per_microbatch, and the same micro-batches as in training."""
    batching: Literal['packed', 'dynamic', 'plain']
    """Grouping of sequences into micro-batches: packed combines any sequences so that all ranks finish together, dynamic combines similar lengths, plain keeps the order."""
    enable_ema: bool
    """Keep an exponential moving average of the actor's parameters, update it after each step, and save it too: model_ema."""
    ema_beta: float
    """Decay of the moving average per step."""
    save_path: str | Path
    """Folder of the run: final model, metrics, report, resolved configuration."""
    ckpt_path: str | Path | None
    """Folder of the checkpoints; unset: save_path/checkpoints."""
    save_steps: int
    """Number of steps between checkpoints; -1: no checkpoints."""
    save_minutes: float | None
    """Write a checkpoint also after the step in which so many minutes since the last one have passed, for machines that may vanish; unset: by steps alone."""
    max_ckpt_num: int
    """Maximum number of checkpoints to keep."""
    max_ckpt_mem: float
    """Maximum total size of the checkpoints to keep, in GB; the newest is always kept."""
    save_hf_ckpt: bool
    """Also write the model of each checkpoint into the folder `hf` beside it, in the format that from_pretrained and engines load."""
    async_save: bool
    """Write checkpoints in the background from a copy in host memory, while training continues; if the free memory of a host is less than twice the copy, training waits."""
    save_adapter_only: bool
    """With lora_rank: the final model is only the adapter in peft's format, not the model with the adapter merged into it."""
    push_to_hub: str | Path
    """Upload the final model with a card to this repository on the Hugging Face hub, owner/name. It is created as a private one if it does not exist. Empty: no upload."""
    load_checkpoint: bool
    """Resume from the newest complete checkpoint; start from the beginning if there is none. A run that torchrun restarts after the failure of a rank or the loss of a node resumes without this flag."""
    fork_from: str | Path
    """Folder of another run to continue from, in the folder --save_path and with the flags of this run. Its checkpoint is the one that --at names."""
    at: int | None
    """Number of steps that the checkpoint of --fork_from covers; unset: the newest one."""
    dry_run: bool
    """Print the plan of the run on the processes that were started (problems, layout, bytes of a rank in each phase, seconds), as `lightrft plan` does, and exit."""
    overwrite: bool
    """Start from the beginning in a folder that has the results of an earlier run; they are moved to FOLDER.previous."""
    mismatch_limit: float | None
    """End the run when the mean difference between the log-probs of engine and trainer in a step is larger than this; unset: only warn of a difference far above the previous steps."""
    eval_steps: int
    """Number of steps between evaluations, with one more at the end; -1: only at the end."""
    logging_steps: int
    """Number of steps between reports of metrics."""
    report_to: str | list[str]
    """Destinations of metrics and samples, separated by commas, or a list in YAML: tensorboard (files in save_path/tensorboard), wandb, mlflow, swanlab, trackio, comet_ml, and jsonl for the files metrics.jsonl and samples.jsonl, always written."""
    tracker_project: str | Path
    """Project of the run in the trackers of --report_to; in MLflow the experiment."""
    tracker_run_name: str | Path | None
    """Name of the run in the trackers of --report_to; unset: the name of the folder --save_path."""
    tracker_org: str | Path | None
    """Team or user that owns the project, in Weights & Biases, SwanLab and Comet; unset: your own."""
    tracker_group: str | Path | None
    """Group of runs in Weights & Biases, SwanLab and Trackio."""
    trace_steps: int
    """Number of steps in the timeline save_path/trace.json, the first ones after every start or resume: the activity of each rank over time, for https://ui.perfetto.dev. 0: none."""
    digests: bool
    """Write 16 bytes for each phase of each step to save_path/digests.jsonl, from which `lightrft bisect` finds where two runs begin to differ."""
    num_trajectories_to_save: int
    """Number of samples of each step in save_path/samples.jsonl, in the order of the prompts; 0: none."""
    canaries: float
    """Share of prompts in a step, such as 0.02, that are added with a reward that cannot be earned honestly: the label of another row. Nothing learns from them. If their rewards rise, the reward is being gamed, and an alarm says so (docs/canaries.md)."""
    canary_data: str | list[str]
    """Rows whose reward cannot be earned, in the form of --prompt_data; empty: rows of --prompt_data, each with the label of another row."""
    canary_baseline: int
    """Number of responses before training that measure the reward of an honest run on canaries, or how far the rewards differ (--shadow_reward)."""
    canary_chance: float | None
    """Largest mean reward of an honest run on canaries, as a share of the reward's range; unset: what --canary_baseline and the most frequent label leave possible."""
    canary_alpha: float
    """Probability that an honest run ever raises an alarm, however long it is."""
    canary_range: list[float] | str
    """Lowest and highest reward."""
    shadow_reward: str | list[str]
    """A second, stricter reward, in the form of --reward, that nothing learns from. An alarm says when the reward has risen above it."""
    shadow_share: float
    """Share of prompts whose samples get the reward of --shadow_reward."""
    ledger: bool
    """Write what each row of the data was worth to save_path/ledger.sqlite, for `lightrft ledger`."""
    measure_noise: int
    """Measure how much of the policy's gradient is noise in each N-th step, for `noise/*` metrics and `lightrft tune --advice`; 0: never."""
    on_alarm: Literal['warn', 'stop', 'fork']
    """What an alarm does: warn goes on; stop ends the run after the step; fork also keeps the last checkpoint from before the reward was gamed, for --fork_from."""
    train_dataset: Rows
    eval_dataset: Rows
    reward_funcs: Reward
    args: Any
    peft_config: Any
    processing_class: Any

def train_ppo(
    config: ConfigOrFile = ...,
    *,
    model: Model | None = ...,
    tokenizer: PreTrainedTokenizerBase | None = ...,
    prompt_data: Rows | None = ...,
    reward: Reward | None = ...,
    **values: Unpack[TrainPpoFlags],
) -> TrainedRun: ...

class TrainSftFlags(TypedDict, total=False):
    pretrain: str | Path
    """Model to start from: a Hugging Face folder, a GGUF file or a hub name, as for all models here."""
    bf16: bool
    """Compute in bfloat16 with float32 master weights; otherwise everything is float32. On a GPU with fast bfloat16 (NVIDIA from A100 and L4 on) this is the default; --no_bf16 turns it off."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_policy: Literal['full', 'selective', 'offload']
    """Activations to keep of each block: full keeps only the input; selective also keeps attention; offload keeps the input in host memory."""
    fused_kernels: Literal['none', 'liger']
    """liger: compute norms, rotary embeddings and feed-forward layers of Llama, Qwen, Gemma, OLMo and similar models with fused kernels, on an accelerator; requires the package liger-kernel. In float32, log-probs and gradients change by at most 1e-5."""
    fp8_training: bool
    """Multiply in FP8 in the linear layers of the blocks (torchao, pip install '.[fp8]'), with a scale for each row; weights and optimizer keep their precision. For Hopper and later GPUs; a CPU emulates it."""
    trust_remote_code: bool
    """Run Python code that comes with the model. Use it only for sources that you trust."""
    lora_rank: int
    """Train low-rank adapters (LoRA) of this rank while the model stays frozen; 0: train the model itself."""
    lora_alpha: float
    """Scale of the adapters: the output is multiplied by lora_alpha / lora_rank."""
    lora_rank_pattern: str | dict[str, Any]
    """Other ranks of some layers, by names or ends of names, as JSON: {'down_proj': 4}."""
    lora_alpha_pattern: str | dict[str, Any]
    """Other values of lora_alpha for some layers, in the same form."""
    rslora: bool
    """Multiply by lora_alpha / sqrt(lora_rank) instead, so that larger ranks learn as fast (arXiv 2312.03732)."""
    lora_init: Literal['kaiming', 'gaussian']
    """Distribution of A at the start, as in peft: uniform (kaiming), or normal with a standard deviation of 1 / lora_rank (gaussian). B is 0."""
    lora_lr_ratio: float
    """LoRA+: learning rate of B as a multiple of --learning_rate, which A has (arXiv 2402.12354; 16 is usual)."""
    lora_dropout: float
    """Dropout probability on the input of an adapter in training."""
    target_modules: list[str] | str
    """Names, or ends of names, of the linear layers that get adapters; all-linear: all except the output layer."""
    load_in_4bit: bool
    """With lora_rank: keep the frozen linear layers in four bits (QLoRA: NF4 with double quantisation), so that the model takes about a quarter of the memory of bfloat16. Embeddings, norms and the head keep the dtype of the run. The engine and the saved model have the matrices that these bits stand for. Requires bitsandbytes: pip install '.[qlora]'."""
    freeze_prefix: list[str] | str
    """Prefixes of the names of parameters that are not trained; with lora_rank, these get no adapters."""
    freeze_vision_tower: bool
    """With a key of media: do not train the parameters that only images, videos or sound use. These are the towers and the projections into the language model."""
    prompt_data: Rows
    """Training data: a JSONL, JSON or parquet file, a folder of them or of Dataset.save_to_disk, a hub name, tasks, reasoning_gym:NAME or verifiers:NAME, or rows of Python, module:object or file.py:object. Several are separated by commas, or a list in YAML; each row is then drawn once in an epoch. In the form NAME:PROBABILITY, each row of a batch is drawn from a data set with this probability."""
    prompt_data_probs: list[float] | str
    """Probability of each data set of --prompt_data, another form of NAME:PROBABILITY."""
    prompt_split: str | Path
    """Split of the training data."""
    eval_data: Rows
    """Held-out data in the same form, for --eval_steps and the end of the run; empty: no evaluation. Several sets with numbers of their own are NAME=SOURCE, separated by commas or a list in YAML. Sets with the name of a benchmark, such as gsm8k, or NAME:BENCHMARK=SOURCE, have the benchmark's columns, instruction and verifier (docs/evaluation.md)."""
    eval_split: str | Path
    """Split of the held-out data."""
    input_key: str | Path | None
    """Column of the prompt: a text, or chat messages as a list or JSON text. Unset: input, or the columns of a known form (docs/data.md)."""
    json_chats: Literal['auto', 'always', 'never']
    """Texts that are chat messages as JSON. auto: prompts whose objects have nothing but the keys of a message and known roles are messages, and answers are texts; always: prompts and answers whose objects have roles are messages; never: a text is a text."""
    images_key: str | Path | None
    """Column of a prompt's images: one path or a list of paths, relative to the folder of the data, or images of the datasets package; a row without images is a text prompt. In a chat, an image takes the place of <image> in the text, or precedes the text. The model must accept images."""
    videos_key: str | Path | None
    """Column of a prompt's videos: a file (.gif, .webp, or another one that FFmpeg reads), a list of images as frames, or a list of several. Unset: no videos."""
    audios_key: str | Path | None
    """Column of a prompt's clips of sound: a .wav file or another one that FFmpeg reads, one of the datasets package, or a list of several. Unset: no sound."""
    video_fps: float
    """Frames per second sampled from a video."""
    video_max_frames: int
    """Maximum number of frames sampled from a video, evenly spaced."""
    audio_sampling_rate: int
    """Sampling rate in Hz of the model, for example 16000: audio clips are resampled to it with the package av. 0: clips are not resampled, and one with another rate is a bad row."""
    check_media: Literal['all', 'first', 'none']
    """Images, videos and clips that are read completely when the data are loaded, in parallel processes: all of them, or only the ones in the first rows. A row with one that cannot be read is a bad row (--bad_rows). The start of each file is read in any case."""
    media_max_mb: float
    """Maximum size in MB of an image, video or audio file; a row with a larger file is a bad row."""
    media_urls: bool
    """Allow HTTP(S) URLs in the columns of media: each is fetched once on each host, into the temporary folder."""
    media_root: str | Path
    """Folder that the paths of images are relative to; no file outside of it is read. Empty: paths are relative to the folder of the data, and any path is allowed."""
    label_key: str | Path | None
    """Column of the correct answer: reward functions receive it as `label`, and SFT trains on it. For SFT, a row that ends in an answer needs none. For KTO it is true for a good answer, and for train_prm it is a list with a value for each step. Unset: label, or the column of a known form (docs/data.md)."""
    eval_input_key: str | Path | None
    """Column of the prompt in --eval_data; unset: --input_key."""
    eval_label_key: str | Path | None
    """Column of the correct answer in --eval_data; unset: --label_key."""
    input_template: str | Path | None
    """Template with one {} of prompts that are text: in a shell $'Question: {}\\nAnswer: ', with a line break. Chat messages are not changed."""
    apply_chat_template: bool
    """Render prompts with the tokenizer's chat template. A response then also stops at the token that ends a turn of the template."""
    system_prompt: str | Path | None
    """System message for the chat template. A row with a system message of its own uses that one."""
    chat_template_kwargs: str | dict[str, Any]
    """Additional variables for the chat template as a JSON object: '{'enable_thinking': false}'. The column `chat_template_kwargs` of a row replaces them."""
    chat_template_date: str | Path
    """Date as YYYY-MM-DD for chat templates that write it; empty: the first day of the run, also after it is resumed."""
    prompt_max_len: int
    """Maximum length of a prompt in tokens; a row with a longer prompt is a bad row."""
    max_samples: int | None
    """Use only this number of rows from the beginning of each training data set."""
    max_eval_samples: int | None
    """Use only this number of rows from the beginning of the held-out data."""
    data_cache: str | Path
    """Folder for tokenized data in Arrow files that are mapped into memory and used again, for data larger than memory; empty: every process tokenizes the data and holds them in memory."""
    deduplicate: Literal['none', 'exact', 'whitespace']
    """Omit training rows whose prompt (in SFT: prompt and answer) repeats an earlier row, and report their number: exact compares texts as they are, whitespace ignores differences in the white space between words."""
    learned_turns: Literal['all', 'last']
    """Turns of the assistant that SFT and --pretrain_data train on in a conversation: all, or the last one. A turn with `weight`, `train` or `loss` 0 is not learned."""
    expand_turns: bool
    """SFT and --pretrain_data train on each turn of the assistant as the last one of an example of its own, which ends with it, for chat templates that write earlier turns differently, such as without their thinking."""
    learn_empty_thinking: bool
    """Train on an empty thinking that a chat template writes before an answer. Without it an answer to a row without thoughts teaches nothing about thinking."""
    bad_rows: Literal['stop', 'skip']
    """Handling of a malformed or too long row: stop ends the run before a model is loaded and names the file and line, skip omits it and reports how many there are, and the first ones. With skip, train_ppo also leaves out prompts whose media cannot be read any more when they are drawn."""
    strategy: str | Path
    """Distributed backend: fsdp, deepspeed, or a subclass of StrategyBase as module:Class or file.py:Class. auto: deepspeed with --fsdp false or a flag that only ZeRO has, else fsdp."""
    fsdp: bool
    """Shard with FSDP2: short for --strategy fsdp; --fsdp false is short for --strategy deepspeed."""
    fsdp_cpu_offload: bool
    """Keep parameters and optimizer states in host memory, and copy shards to the device when they are used."""
    reduce_gradients_once: bool
    """FSDP2: reduce gradients over the ranks only after the last micro-batch of an optimizer step. This communicates less, but until then every rank keeps the gradient of the whole model, four bytes per parameter. By default gradients are sharded after every micro-batch."""
    gather_parameters_once: bool
    """FSDP2: keep gathered parameters on the device from the first micro-batch of an optimizer step until the last one. This communicates less, but until then every rank keeps the whole model, with --bf16 two bytes per parameter. By default each micro-batch gathers each block twice."""
    zero_stage: Literal[0, 1, 2, 3]
    """Stage of ZeRO: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    zpg: int
    """ZeRO-3: number of consecutive ranks, usually one node, that keep a secondary copy of the parameters and gather them within the group."""
    adam_offload: bool
    """ZeRO: keep optimizer states in host memory and update the parameters there."""
    param_offload: bool
    """ZeRO-3: keep parameters in host memory and copy them to the device layer by layer."""
    overlap_comm: bool
    """ZeRO: reduce gradients during the backward pass; uses more memory."""
    reduce_dtype: Literal['fp32', 'bf16']
    """With --bf16: dtype of the gradients while they are reduced over ranks; bf16 halves the traffic. FSDP2 accumulates them over micro-batches in float32 either way, ZeRO in this dtype."""
    offload_idle: bool
    """Keep only the models and optimizers of the current phase in device memory; all others wait in host memory."""
    dp_replicate: int
    """Hybrid sharding: number of replicas of the model; each one is sharded over a share of the data ranks. 0: every data rank has a replica of its own. That is the fastest for a model that fits on each: only gradients are communicated."""
    tp_size: int
    """Tensor parallelism: number of consecutive ranks that split each layer of the trained models; they process the same data."""
    tp_sequence_parallel: bool
    """Split the tokens between attention and feed-forward layers over the --tp_size ranks: less memory, same traffic."""
    ep_size: int
    """Expert parallelism: number of consecutive ranks that divide the experts of each layer of a mixture; each token visits the ranks of its experts. The other parameters are sharded as without it."""
    sp_size: int
    """Sequence parallelism: number of ranks that split the tokens of each micro-batch of the trained models."""
    sp_impl: Literal['auto', 'ulysses', 'zigzag']
    """Implementation of attention with --sp_size: ulysses exchanges tokens for heads (all-to-all), zigzag gathers keys and values. auto: ulysses."""
    cp_size: int
    """Context parallelism: short for --sp_size N --sp_impl zigzag."""
    sample_store: Literal['memory', 'transfer_queue']
    """Transport of samples between ranks within a step: memory sends each value directly to the rank that computes with it; transfer_queue writes all of them to a TransferQueue on a Ray cluster (RAY_ADDRESS), where other programs can read them."""
    deterministic: bool
    """On an accelerator, train only with kernels that give bitwise equal results in every run, as a CPU always does: attention's backward pass is slower and uses more memory. Torch raises an error for an operation without such a kernel. The engine's kernels are not covered. Turns of episodes begin together, as on a CPU, so each waits for the slowest program of the turns before."""
    timeout_minutes: float
    """End the run when a collective waits longer than this; every rank then logs which ranks are late and the position of each rank."""
    arrival_minutes: float
    """End the run when a rank waits longer than this for the others at the start; the message names the missing ranks."""
    phase_minutes: float
    """End the run when a phase, such as generate or train, takes longer than this on all ranks; every rank then logs the position of each rank."""
    learning_rate: float
    """Peak learning rate; --actor_learning_rate is another name of it. Unset: 1e-6 in train_ppo, 1e-5 in train_sft (LIMA, arXiv 2305.11206), 5e-7 in train_dpo (Zephyr, arXiv 2310.16944) and train_kto (as in TRL's example), 9e-6 in train_rm (InstructGPT, arXiv 2203.02155), 1e-5 in train_prm (as in TRL); with --lora_rank ten times that (Schulman et al., LoRA Without Regret, 2025)."""
    lr_scheduler: Literal['cosine', 'constant', 'linear', 'wsd', 'inverse_sqrt', 'polynomial']
    """Schedule after the warm-up, as transformers computes it. linear ends at 0, inverse_sqrt falls from the warm-up on, and wsd is constant until it decays in the last steps (arXiv 2404.06395)."""
    lr_min_ratio: float
    """Share of the peak at which the schedule ends."""
    lr_decay_ratio: float
    """Share of all optimizer steps that the decay of wsd takes, a cosine."""
    lr_power: float
    """Exponent of the polynomial. 1: a line."""
    lr_warmup_ratio: float
    """Share of all optimizer steps used for the warm-up."""
    optimizer: Literal['adamw', 'muon', 'sgd', 'lion', 'adamw_8bit']
    """Optimizer of all models that learn; all but adamw need --fsdp. muon orthogonalises the updates of the matrices in the blocks (arXiv 2502.16982), at the learning rate and weight decay of AdamW, and trains all other parameters with AdamW. sgd has no momentum; lion and adamw_8bit come from bitsandbytes. A parameter takes 8 bytes of states with adamw, 4 with muon and lion, about 2 with adamw_8bit, and none with sgd."""
    adam_betas: list[float] | str
    """Two decay rates of AdamW and lion. The momentum of --optimizer muon is always 0.95."""
    l2: float
    """Weight decay, applied to matrices only (not to norms and biases)."""
    max_norm: float
    """Clip the global gradient norm to this value; 0: no clipping."""
    seed: int
    """Seed of all random numbers."""
    num_episodes: int
    """Number of passes over the training data. The run ends after them, or earlier at --max_steps. Unset: 3 for given examples, as in TRL, and 1 in train_ppo."""
    max_steps: int | None
    """Largest number of steps; the end of --num_episodes may come earlier."""
    train_batch_size: int
    """Number of samples in one optimizer step, over all ranks. Unset: the samples of a step in train_ppo, 64 in train_sft, train_rm and train_prm, 32 in train_dpo and train_kto, from the sources of --learning_rate; fewer if the data would otherwise give fewer than 50 steps."""
    micro_train_batch_size: int | None
    """Maximum number of sequences in one forward and backward pass on one rank; unset: max_tokens_per_microbatch is the only limit."""
    max_tokens_per_microbatch: int
    """Maximum number of tokens in one forward and backward pass on one rank; with --sp_size, the ranks of a group split this number."""
    max_tokens_per_logprob_microbatch: int | None
    """Maximum number of tokens in one forward pass without gradients on one rank: log-probs of actor and reference, values, scores of reward models. Unset: max_tokens_per_microbatch, and the same micro-batches as in training."""
    batching: Literal['packed', 'dynamic', 'plain']
    """Grouping of sequences into micro-batches: packed combines any sequences so that all ranks finish together, dynamic combines similar lengths, plain keeps the order."""
    enable_ema: bool
    """Keep an exponential moving average of the actor's parameters, update it after each step, and save it too: model_ema."""
    ema_beta: float
    """Decay of the moving average per step."""
    save_path: str | Path
    """Folder of the run: final model, metrics, report, resolved configuration."""
    ckpt_path: str | Path | None
    """Folder of the checkpoints; unset: save_path/checkpoints."""
    save_steps: int
    """Number of steps between checkpoints; -1: no checkpoints."""
    save_minutes: float | None
    """Write a checkpoint also after the step in which so many minutes since the last one have passed, for machines that may vanish; unset: by steps alone."""
    max_ckpt_num: int
    """Maximum number of checkpoints to keep."""
    max_ckpt_mem: float
    """Maximum total size of the checkpoints to keep, in GB; the newest is always kept."""
    save_hf_ckpt: bool
    """Also write the model of each checkpoint into the folder `hf` beside it, in the format that from_pretrained and engines load."""
    async_save: bool
    """Write checkpoints in the background from a copy in host memory, while training continues; if the free memory of a host is less than twice the copy, training waits."""
    save_adapter_only: bool
    """With lora_rank: the final model is only the adapter in peft's format, not the model with the adapter merged into it."""
    push_to_hub: str | Path
    """Upload the final model with a card to this repository on the Hugging Face hub, owner/name. It is created as a private one if it does not exist. Empty: no upload."""
    load_checkpoint: bool
    """Resume from the newest complete checkpoint; start from the beginning if there is none. A run that torchrun restarts after the failure of a rank or the loss of a node resumes without this flag."""
    fork_from: str | Path
    """Folder of another run to continue from, in the folder --save_path and with the flags of this run. Its checkpoint is the one that --at names."""
    at: int | None
    """Number of steps that the checkpoint of --fork_from covers; unset: the newest one."""
    dry_run: bool
    """Print the plan of the run on the processes that were started (problems, layout, bytes of a rank in each phase, seconds), as `lightrft plan` does, and exit."""
    overwrite: bool
    """Start from the beginning in a folder that has the results of an earlier run; they are moved to FOLDER.previous."""
    stop_loss: float | None
    """In supervised training: end the run when the loss of a step is below this value."""
    eval_generate: str | Path
    """Evaluate by responses, too: flags of `lightrft evaluate` such as '--eval_data gsm8k=test.jsonl --generate_max_len 512', or a file with its configuration. The model answers these prompts at --eval_steps and at the end."""
    eval_steps: int
    """Number of steps between evaluations, with one more at the end; -1: only at the end."""
    logging_steps: int
    """Number of steps between reports of metrics."""
    report_to: str | list[str]
    """Destinations of metrics and samples, separated by commas, or a list in YAML: tensorboard (files in save_path/tensorboard), wandb, mlflow, swanlab, trackio, comet_ml, and jsonl for the files metrics.jsonl and samples.jsonl, always written."""
    tracker_project: str | Path
    """Project of the run in the trackers of --report_to; in MLflow the experiment."""
    tracker_run_name: str | Path | None
    """Name of the run in the trackers of --report_to; unset: the name of the folder --save_path."""
    tracker_org: str | Path | None
    """Team or user that owns the project, in Weights & Biases, SwanLab and Comet; unset: your own."""
    tracker_group: str | Path | None
    """Group of runs in Weights & Biases, SwanLab and Trackio."""
    trace_steps: int
    """Number of steps in the timeline save_path/trace.json, the first ones after every start or resume: the activity of each rank over time, for https://ui.perfetto.dev. 0: none."""
    digests: bool
    """Write 16 bytes for each phase of each step to save_path/digests.jsonl, from which `lightrft bisect` finds where two runs begin to differ."""
    model: Model
    tokenizer: PreTrainedTokenizerBase
    train_dataset: Rows
    eval_dataset: Rows
    reward_funcs: Reward
    args: Any
    peft_config: Any
    processing_class: Any

def train_sft(
    config: ConfigOrFile = ...,
    **values: Unpack[TrainSftFlags],
) -> TrainedRun: ...

class TrainRmFlags(TypedDict, total=False):
    pretrain: str | Path
    """Model to start from: a Hugging Face folder, a GGUF file or a hub name, as for all models here."""
    bf16: bool
    """Compute in bfloat16 with float32 master weights; otherwise everything is float32. On a GPU with fast bfloat16 (NVIDIA from A100 and L4 on) this is the default; --no_bf16 turns it off."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_policy: Literal['full', 'selective', 'offload']
    """Activations to keep of each block: full keeps only the input; selective also keeps attention; offload keeps the input in host memory."""
    fused_kernels: Literal['none', 'liger']
    """liger: compute norms, rotary embeddings and feed-forward layers of Llama, Qwen, Gemma, OLMo and similar models with fused kernels, on an accelerator; requires the package liger-kernel. In float32, log-probs and gradients change by at most 1e-5."""
    fp8_training: bool
    """Multiply in FP8 in the linear layers of the blocks (torchao, pip install '.[fp8]'), with a scale for each row; weights and optimizer keep their precision. For Hopper and later GPUs; a CPU emulates it."""
    trust_remote_code: bool
    """Run Python code that comes with the model. Use it only for sources that you trust."""
    lora_rank: int
    """Train low-rank adapters (LoRA) of this rank while the model stays frozen; 0: train the model itself."""
    lora_alpha: float
    """Scale of the adapters: the output is multiplied by lora_alpha / lora_rank."""
    lora_rank_pattern: str | dict[str, Any]
    """Other ranks of some layers, by names or ends of names, as JSON: {'down_proj': 4}."""
    lora_alpha_pattern: str | dict[str, Any]
    """Other values of lora_alpha for some layers, in the same form."""
    rslora: bool
    """Multiply by lora_alpha / sqrt(lora_rank) instead, so that larger ranks learn as fast (arXiv 2312.03732)."""
    lora_init: Literal['kaiming', 'gaussian']
    """Distribution of A at the start, as in peft: uniform (kaiming), or normal with a standard deviation of 1 / lora_rank (gaussian). B is 0."""
    lora_lr_ratio: float
    """LoRA+: learning rate of B as a multiple of --learning_rate, which A has (arXiv 2402.12354; 16 is usual)."""
    lora_dropout: float
    """Dropout probability on the input of an adapter in training."""
    target_modules: list[str] | str
    """Names, or ends of names, of the linear layers that get adapters; all-linear: all except the output layer."""
    load_in_4bit: bool
    """With lora_rank: keep the frozen linear layers in four bits (QLoRA: NF4 with double quantisation), so that the model takes about a quarter of the memory of bfloat16. Embeddings, norms and the head keep the dtype of the run. The engine and the saved model have the matrices that these bits stand for. Requires bitsandbytes: pip install '.[qlora]'."""
    freeze_prefix: list[str] | str
    """Prefixes of the names of parameters that are not trained; with lora_rank, these get no adapters."""
    freeze_vision_tower: bool
    """With a key of media: do not train the parameters that only images, videos or sound use. These are the towers and the projections into the language model."""
    prompt_data: Rows
    """Training data: a JSONL, JSON or parquet file, a folder of them or of Dataset.save_to_disk, a hub name, tasks, reasoning_gym:NAME or verifiers:NAME, or rows of Python, module:object or file.py:object. Several are separated by commas, or a list in YAML; each row is then drawn once in an epoch. In the form NAME:PROBABILITY, each row of a batch is drawn from a data set with this probability."""
    prompt_data_probs: list[float] | str
    """Probability of each data set of --prompt_data, another form of NAME:PROBABILITY."""
    prompt_split: str | Path
    """Split of the training data."""
    eval_data: Rows
    """Held-out data in the same form, for --eval_steps and the end of the run; empty: no evaluation. Several sets with numbers of their own are NAME=SOURCE, separated by commas or a list in YAML. Sets with the name of a benchmark, such as gsm8k, or NAME:BENCHMARK=SOURCE, have the benchmark's columns, instruction and verifier (docs/evaluation.md)."""
    eval_split: str | Path
    """Split of the held-out data."""
    input_key: str | Path | None
    """Column of the prompt: a text, or chat messages as a list or JSON text. Unset: input, or the columns of a known form (docs/data.md)."""
    json_chats: Literal['auto', 'always', 'never']
    """Texts that are chat messages as JSON. auto: prompts whose objects have nothing but the keys of a message and known roles are messages, and answers are texts; always: prompts and answers whose objects have roles are messages; never: a text is a text."""
    images_key: str | Path | None
    """Column of a prompt's images: one path or a list of paths, relative to the folder of the data, or images of the datasets package; a row without images is a text prompt. In a chat, an image takes the place of <image> in the text, or precedes the text. The model must accept images."""
    videos_key: str | Path | None
    """Column of a prompt's videos: a file (.gif, .webp, or another one that FFmpeg reads), a list of images as frames, or a list of several. Unset: no videos."""
    audios_key: str | Path | None
    """Column of a prompt's clips of sound: a .wav file or another one that FFmpeg reads, one of the datasets package, or a list of several. Unset: no sound."""
    video_fps: float
    """Frames per second sampled from a video."""
    video_max_frames: int
    """Maximum number of frames sampled from a video, evenly spaced."""
    audio_sampling_rate: int
    """Sampling rate in Hz of the model, for example 16000: audio clips are resampled to it with the package av. 0: clips are not resampled, and one with another rate is a bad row."""
    check_media: Literal['all', 'first', 'none']
    """Images, videos and clips that are read completely when the data are loaded, in parallel processes: all of them, or only the ones in the first rows. A row with one that cannot be read is a bad row (--bad_rows). The start of each file is read in any case."""
    media_max_mb: float
    """Maximum size in MB of an image, video or audio file; a row with a larger file is a bad row."""
    media_urls: bool
    """Allow HTTP(S) URLs in the columns of media: each is fetched once on each host, into the temporary folder."""
    media_root: str | Path
    """Folder that the paths of images are relative to; no file outside of it is read. Empty: paths are relative to the folder of the data, and any path is allowed."""
    eval_input_key: str | Path | None
    """Column of the prompt in --eval_data; unset: --input_key."""
    input_template: str | Path | None
    """Template with one {} of prompts that are text: in a shell $'Question: {}\\nAnswer: ', with a line break. Chat messages are not changed."""
    apply_chat_template: bool
    """Render prompts with the tokenizer's chat template. A response then also stops at the token that ends a turn of the template."""
    system_prompt: str | Path | None
    """System message for the chat template. A row with a system message of its own uses that one."""
    chat_template_kwargs: str | dict[str, Any]
    """Additional variables for the chat template as a JSON object: '{'enable_thinking': false}'. The column `chat_template_kwargs` of a row replaces them."""
    chat_template_date: str | Path
    """Date as YYYY-MM-DD for chat templates that write it; empty: the first day of the run, also after it is resumed."""
    prompt_max_len: int
    """Maximum length of a prompt in tokens; a row with a longer prompt is a bad row."""
    max_samples: int | None
    """Use only this number of rows from the beginning of each training data set."""
    max_eval_samples: int | None
    """Use only this number of rows from the beginning of the held-out data."""
    data_cache: str | Path
    """Folder for tokenized data in Arrow files that are mapped into memory and used again, for data larger than memory; empty: every process tokenizes the data and holds them in memory."""
    deduplicate: Literal['none', 'exact', 'whitespace']
    """Omit training rows whose prompt (in SFT: prompt and answer) repeats an earlier row, and report their number: exact compares texts as they are, whitespace ignores differences in the white space between words."""
    bad_rows: Literal['stop', 'skip']
    """Handling of a malformed or too long row: stop ends the run before a model is loaded and names the file and line, skip omits it and reports how many there are, and the first ones. With skip, train_ppo also leaves out prompts whose media cannot be read any more when they are drawn."""
    strategy: str | Path
    """Distributed backend: fsdp, deepspeed, or a subclass of StrategyBase as module:Class or file.py:Class. auto: deepspeed with --fsdp false or a flag that only ZeRO has, else fsdp."""
    fsdp: bool
    """Shard with FSDP2: short for --strategy fsdp; --fsdp false is short for --strategy deepspeed."""
    fsdp_cpu_offload: bool
    """Keep parameters and optimizer states in host memory, and copy shards to the device when they are used."""
    reduce_gradients_once: bool
    """FSDP2: reduce gradients over the ranks only after the last micro-batch of an optimizer step. This communicates less, but until then every rank keeps the gradient of the whole model, four bytes per parameter. By default gradients are sharded after every micro-batch."""
    gather_parameters_once: bool
    """FSDP2: keep gathered parameters on the device from the first micro-batch of an optimizer step until the last one. This communicates less, but until then every rank keeps the whole model, with --bf16 two bytes per parameter. By default each micro-batch gathers each block twice."""
    zero_stage: Literal[0, 1, 2, 3]
    """Stage of ZeRO: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    zpg: int
    """ZeRO-3: number of consecutive ranks, usually one node, that keep a secondary copy of the parameters and gather them within the group."""
    adam_offload: bool
    """ZeRO: keep optimizer states in host memory and update the parameters there."""
    param_offload: bool
    """ZeRO-3: keep parameters in host memory and copy them to the device layer by layer."""
    overlap_comm: bool
    """ZeRO: reduce gradients during the backward pass; uses more memory."""
    reduce_dtype: Literal['fp32', 'bf16']
    """With --bf16: dtype of the gradients while they are reduced over ranks; bf16 halves the traffic. FSDP2 accumulates them over micro-batches in float32 either way, ZeRO in this dtype."""
    offload_idle: bool
    """Keep only the models and optimizers of the current phase in device memory; all others wait in host memory."""
    dp_replicate: int
    """Hybrid sharding: number of replicas of the model; each one is sharded over a share of the data ranks. 0: every data rank has a replica of its own. That is the fastest for a model that fits on each: only gradients are communicated."""
    tp_size: int
    """Tensor parallelism: number of consecutive ranks that split each layer of the trained models; they process the same data."""
    tp_sequence_parallel: bool
    """Split the tokens between attention and feed-forward layers over the --tp_size ranks: less memory, same traffic."""
    ep_size: int
    """Expert parallelism: number of consecutive ranks that divide the experts of each layer of a mixture; each token visits the ranks of its experts. The other parameters are sharded as without it."""
    sp_size: int
    """Sequence parallelism: number of ranks that split the tokens of each micro-batch of the trained models."""
    sp_impl: Literal['auto', 'ulysses', 'zigzag']
    """Implementation of attention with --sp_size: ulysses exchanges tokens for heads (all-to-all), zigzag gathers keys and values. auto: ulysses."""
    cp_size: int
    """Context parallelism: short for --sp_size N --sp_impl zigzag."""
    sample_store: Literal['memory', 'transfer_queue']
    """Transport of samples between ranks within a step: memory sends each value directly to the rank that computes with it; transfer_queue writes all of them to a TransferQueue on a Ray cluster (RAY_ADDRESS), where other programs can read them."""
    deterministic: bool
    """On an accelerator, train only with kernels that give bitwise equal results in every run, as a CPU always does: attention's backward pass is slower and uses more memory. Torch raises an error for an operation without such a kernel. The engine's kernels are not covered. Turns of episodes begin together, as on a CPU, so each waits for the slowest program of the turns before."""
    timeout_minutes: float
    """End the run when a collective waits longer than this; every rank then logs which ranks are late and the position of each rank."""
    arrival_minutes: float
    """End the run when a rank waits longer than this for the others at the start; the message names the missing ranks."""
    phase_minutes: float
    """End the run when a phase, such as generate or train, takes longer than this on all ranks; every rank then logs the position of each rank."""
    chosen_key: str | Path
    """Column of the preferred answer: a text, a list of chat messages, or a whole conversation that begins like the other one."""
    rejected_key: str | Path
    """Column of the other answer, in the same form."""
    margin_key: str | Path | None
    """Column of a margin: the score of the chosen answer should exceed the other one by this number."""
    tie_key: str | Path | None
    """Column that is true for rows whose answers are equally good, for --rm_loss ties."""
    head_key: str | Path | None
    """Column with the name of the head that learns from the row, one of --reward_heads."""
    rm_loss: Literal['sigmoid', 'logexp', 'ties']
    """Loss of a reward model: sigmoid is Bradley-Terry, with the margin of --margin_key; logexp is log(1 + exp(rejected - chosen)), without margins; ties is Rao-Kupper, and also learns from rows of --tie_key."""
    tie_threshold: float
    """Threshold theta of Rao-Kupper: at equal scores a tie has the probability (theta - 1) / (theta + 1)."""
    reward_heads: list[str] | str
    """Names of the heads of a reward model, each with a score of its own; unset: the heads of --pretrain, or one."""
    learn_scale: bool
    """Multiply each head's score by a positive factor that is learned with the model, and is not part of the exported model."""
    learning_rate: float
    """Peak learning rate; --actor_learning_rate is another name of it. Unset: 1e-6 in train_ppo, 1e-5 in train_sft (LIMA, arXiv 2305.11206), 5e-7 in train_dpo (Zephyr, arXiv 2310.16944) and train_kto (as in TRL's example), 9e-6 in train_rm (InstructGPT, arXiv 2203.02155), 1e-5 in train_prm (as in TRL); with --lora_rank ten times that (Schulman et al., LoRA Without Regret, 2025)."""
    lr_scheduler: Literal['cosine', 'constant', 'linear', 'wsd', 'inverse_sqrt', 'polynomial']
    """Schedule after the warm-up, as transformers computes it. linear ends at 0, inverse_sqrt falls from the warm-up on, and wsd is constant until it decays in the last steps (arXiv 2404.06395)."""
    lr_min_ratio: float
    """Share of the peak at which the schedule ends."""
    lr_decay_ratio: float
    """Share of all optimizer steps that the decay of wsd takes, a cosine."""
    lr_power: float
    """Exponent of the polynomial. 1: a line."""
    lr_warmup_ratio: float
    """Share of all optimizer steps used for the warm-up."""
    optimizer: Literal['adamw', 'muon', 'sgd', 'lion', 'adamw_8bit']
    """Optimizer of all models that learn; all but adamw need --fsdp. muon orthogonalises the updates of the matrices in the blocks (arXiv 2502.16982), at the learning rate and weight decay of AdamW, and trains all other parameters with AdamW. sgd has no momentum; lion and adamw_8bit come from bitsandbytes. A parameter takes 8 bytes of states with adamw, 4 with muon and lion, about 2 with adamw_8bit, and none with sgd."""
    adam_betas: list[float] | str
    """Two decay rates of AdamW and lion. The momentum of --optimizer muon is always 0.95."""
    l2: float
    """Weight decay, applied to matrices only (not to norms and biases)."""
    max_norm: float
    """Clip the global gradient norm to this value; 0: no clipping."""
    seed: int
    """Seed of all random numbers."""
    num_episodes: int
    """Number of passes over the training data. The run ends after them, or earlier at --max_steps. Unset: 3 for given examples, as in TRL, and 1 in train_ppo."""
    max_steps: int | None
    """Largest number of steps; the end of --num_episodes may come earlier."""
    train_batch_size: int
    """Number of samples in one optimizer step, over all ranks. Unset: the samples of a step in train_ppo, 64 in train_sft, train_rm and train_prm, 32 in train_dpo and train_kto, from the sources of --learning_rate; fewer if the data would otherwise give fewer than 50 steps."""
    micro_train_batch_size: int | None
    """Maximum number of sequences in one forward and backward pass on one rank; unset: max_tokens_per_microbatch is the only limit."""
    max_tokens_per_microbatch: int
    """Maximum number of tokens in one forward and backward pass on one rank; with --sp_size, the ranks of a group split this number."""
    max_tokens_per_logprob_microbatch: int | None
    """Maximum number of tokens in one forward pass without gradients on one rank: log-probs of actor and reference, values, scores of reward models. Unset: max_tokens_per_microbatch, and the same micro-batches as in training."""
    batching: Literal['packed', 'dynamic', 'plain']
    """Grouping of sequences into micro-batches: packed combines any sequences so that all ranks finish together, dynamic combines similar lengths, plain keeps the order."""
    enable_ema: bool
    """Keep an exponential moving average of the actor's parameters, update it after each step, and save it too: model_ema."""
    ema_beta: float
    """Decay of the moving average per step."""
    save_path: str | Path
    """Folder of the run: final model, metrics, report, resolved configuration."""
    ckpt_path: str | Path | None
    """Folder of the checkpoints; unset: save_path/checkpoints."""
    save_steps: int
    """Number of steps between checkpoints; -1: no checkpoints."""
    save_minutes: float | None
    """Write a checkpoint also after the step in which so many minutes since the last one have passed, for machines that may vanish; unset: by steps alone."""
    max_ckpt_num: int
    """Maximum number of checkpoints to keep."""
    max_ckpt_mem: float
    """Maximum total size of the checkpoints to keep, in GB; the newest is always kept."""
    save_hf_ckpt: bool
    """Also write the model of each checkpoint into the folder `hf` beside it, in the format that from_pretrained and engines load."""
    async_save: bool
    """Write checkpoints in the background from a copy in host memory, while training continues; if the free memory of a host is less than twice the copy, training waits."""
    push_to_hub: str | Path
    """Upload the final model with a card to this repository on the Hugging Face hub, owner/name. It is created as a private one if it does not exist. Empty: no upload."""
    load_checkpoint: bool
    """Resume from the newest complete checkpoint; start from the beginning if there is none. A run that torchrun restarts after the failure of a rank or the loss of a node resumes without this flag."""
    fork_from: str | Path
    """Folder of another run to continue from, in the folder --save_path and with the flags of this run. Its checkpoint is the one that --at names."""
    at: int | None
    """Number of steps that the checkpoint of --fork_from covers; unset: the newest one."""
    dry_run: bool
    """Print the plan of the run on the processes that were started (problems, layout, bytes of a rank in each phase, seconds), as `lightrft plan` does, and exit."""
    overwrite: bool
    """Start from the beginning in a folder that has the results of an earlier run; they are moved to FOLDER.previous."""
    stop_loss: float | None
    """In supervised training: end the run when the loss of a step is below this value."""
    eval_steps: int
    """Number of steps between evaluations, with one more at the end; -1: only at the end."""
    logging_steps: int
    """Number of steps between reports of metrics."""
    report_to: str | list[str]
    """Destinations of metrics and samples, separated by commas, or a list in YAML: tensorboard (files in save_path/tensorboard), wandb, mlflow, swanlab, trackio, comet_ml, and jsonl for the files metrics.jsonl and samples.jsonl, always written."""
    tracker_project: str | Path
    """Project of the run in the trackers of --report_to; in MLflow the experiment."""
    tracker_run_name: str | Path | None
    """Name of the run in the trackers of --report_to; unset: the name of the folder --save_path."""
    tracker_org: str | Path | None
    """Team or user that owns the project, in Weights & Biases, SwanLab and Comet; unset: your own."""
    tracker_group: str | Path | None
    """Group of runs in Weights & Biases, SwanLab and Trackio."""
    trace_steps: int
    """Number of steps in the timeline save_path/trace.json, the first ones after every start or resume: the activity of each rank over time, for https://ui.perfetto.dev. 0: none."""
    digests: bool
    """Write 16 bytes for each phase of each step to save_path/digests.jsonl, from which `lightrft bisect` finds where two runs begin to differ."""
    model: Model
    tokenizer: PreTrainedTokenizerBase
    train_dataset: Rows
    eval_dataset: Rows
    reward_funcs: Reward
    args: Any
    peft_config: Any
    processing_class: Any

def train_rm(
    config: ConfigOrFile = ...,
    **values: Unpack[TrainRmFlags],
) -> TrainedRun: ...

class TrainPrmFlags(TypedDict, total=False):
    pretrain: str | Path
    """Model to start from: a Hugging Face folder, a GGUF file or a hub name, as for all models here."""
    bf16: bool
    """Compute in bfloat16 with float32 master weights; otherwise everything is float32. On a GPU with fast bfloat16 (NVIDIA from A100 and L4 on) this is the default; --no_bf16 turns it off."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_policy: Literal['full', 'selective', 'offload']
    """Activations to keep of each block: full keeps only the input; selective also keeps attention; offload keeps the input in host memory."""
    fused_kernels: Literal['none', 'liger']
    """liger: compute norms, rotary embeddings and feed-forward layers of Llama, Qwen, Gemma, OLMo and similar models with fused kernels, on an accelerator; requires the package liger-kernel. In float32, log-probs and gradients change by at most 1e-5."""
    fp8_training: bool
    """Multiply in FP8 in the linear layers of the blocks (torchao, pip install '.[fp8]'), with a scale for each row; weights and optimizer keep their precision. For Hopper and later GPUs; a CPU emulates it."""
    trust_remote_code: bool
    """Run Python code that comes with the model. Use it only for sources that you trust."""
    lora_rank: int
    """Train low-rank adapters (LoRA) of this rank while the model stays frozen; 0: train the model itself."""
    lora_alpha: float
    """Scale of the adapters: the output is multiplied by lora_alpha / lora_rank."""
    lora_rank_pattern: str | dict[str, Any]
    """Other ranks of some layers, by names or ends of names, as JSON: {'down_proj': 4}."""
    lora_alpha_pattern: str | dict[str, Any]
    """Other values of lora_alpha for some layers, in the same form."""
    rslora: bool
    """Multiply by lora_alpha / sqrt(lora_rank) instead, so that larger ranks learn as fast (arXiv 2312.03732)."""
    lora_init: Literal['kaiming', 'gaussian']
    """Distribution of A at the start, as in peft: uniform (kaiming), or normal with a standard deviation of 1 / lora_rank (gaussian). B is 0."""
    lora_lr_ratio: float
    """LoRA+: learning rate of B as a multiple of --learning_rate, which A has (arXiv 2402.12354; 16 is usual)."""
    lora_dropout: float
    """Dropout probability on the input of an adapter in training."""
    target_modules: list[str] | str
    """Names, or ends of names, of the linear layers that get adapters; all-linear: all except the output layer."""
    load_in_4bit: bool
    """With lora_rank: keep the frozen linear layers in four bits (QLoRA: NF4 with double quantisation), so that the model takes about a quarter of the memory of bfloat16. Embeddings, norms and the head keep the dtype of the run. The engine and the saved model have the matrices that these bits stand for. Requires bitsandbytes: pip install '.[qlora]'."""
    freeze_prefix: list[str] | str
    """Prefixes of the names of parameters that are not trained; with lora_rank, these get no adapters."""
    freeze_vision_tower: bool
    """With a key of media: do not train the parameters that only images, videos or sound use. These are the towers and the projections into the language model."""
    prompt_data: Rows
    """Training data: a JSONL, JSON or parquet file, a folder of them or of Dataset.save_to_disk, a hub name, tasks, reasoning_gym:NAME or verifiers:NAME, or rows of Python, module:object or file.py:object. Several are separated by commas, or a list in YAML; each row is then drawn once in an epoch. In the form NAME:PROBABILITY, each row of a batch is drawn from a data set with this probability."""
    prompt_data_probs: list[float] | str
    """Probability of each data set of --prompt_data, another form of NAME:PROBABILITY."""
    prompt_split: str | Path
    """Split of the training data."""
    eval_data: Rows
    """Held-out data in the same form, for --eval_steps and the end of the run; empty: no evaluation. Several sets with numbers of their own are NAME=SOURCE, separated by commas or a list in YAML. Sets with the name of a benchmark, such as gsm8k, or NAME:BENCHMARK=SOURCE, have the benchmark's columns, instruction and verifier (docs/evaluation.md)."""
    eval_split: str | Path
    """Split of the held-out data."""
    input_key: str | Path | None
    """Column of the prompt: a text, or chat messages as a list or JSON text. Unset: input, or the columns of a known form (docs/data.md)."""
    json_chats: Literal['auto', 'always', 'never']
    """Texts that are chat messages as JSON. auto: prompts whose objects have nothing but the keys of a message and known roles are messages, and answers are texts; always: prompts and answers whose objects have roles are messages; never: a text is a text."""
    images_key: str | Path | None
    """Column of a prompt's images: one path or a list of paths, relative to the folder of the data, or images of the datasets package; a row without images is a text prompt. In a chat, an image takes the place of <image> in the text, or precedes the text. The model must accept images."""
    videos_key: str | Path | None
    """Column of a prompt's videos: a file (.gif, .webp, or another one that FFmpeg reads), a list of images as frames, or a list of several. Unset: no videos."""
    audios_key: str | Path | None
    """Column of a prompt's clips of sound: a .wav file or another one that FFmpeg reads, one of the datasets package, or a list of several. Unset: no sound."""
    video_fps: float
    """Frames per second sampled from a video."""
    video_max_frames: int
    """Maximum number of frames sampled from a video, evenly spaced."""
    audio_sampling_rate: int
    """Sampling rate in Hz of the model, for example 16000: audio clips are resampled to it with the package av. 0: clips are not resampled, and one with another rate is a bad row."""
    check_media: Literal['all', 'first', 'none']
    """Images, videos and clips that are read completely when the data are loaded, in parallel processes: all of them, or only the ones in the first rows. A row with one that cannot be read is a bad row (--bad_rows). The start of each file is read in any case."""
    media_max_mb: float
    """Maximum size in MB of an image, video or audio file; a row with a larger file is a bad row."""
    media_urls: bool
    """Allow HTTP(S) URLs in the columns of media: each is fetched once on each host, into the temporary folder."""
    media_root: str | Path
    """Folder that the paths of images are relative to; no file outside of it is read. Empty: paths are relative to the folder of the data, and any path is allowed."""
    label_key: str | Path | None
    """Column of the correct answer: reward functions receive it as `label`, and SFT trains on it. For SFT, a row that ends in an answer needs none. For KTO it is true for a good answer, and for train_prm it is a list with a value for each step. Unset: label, or the column of a known form (docs/data.md)."""
    eval_input_key: str | Path | None
    """Column of the prompt in --eval_data; unset: --input_key."""
    eval_label_key: str | Path | None
    """Column of the correct answer in --eval_data; unset: --label_key."""
    input_template: str | Path | None
    """Template with one {} of prompts that are text: in a shell $'Question: {}\\nAnswer: ', with a line break. Chat messages are not changed."""
    apply_chat_template: bool
    """Render prompts with the tokenizer's chat template. A response then also stops at the token that ends a turn of the template."""
    system_prompt: str | Path | None
    """System message for the chat template. A row with a system message of its own uses that one."""
    chat_template_kwargs: str | dict[str, Any]
    """Additional variables for the chat template as a JSON object: '{'enable_thinking': false}'. The column `chat_template_kwargs` of a row replaces them."""
    chat_template_date: str | Path
    """Date as YYYY-MM-DD for chat templates that write it; empty: the first day of the run, also after it is resumed."""
    prompt_max_len: int
    """Maximum length of a prompt in tokens; a row with a longer prompt is a bad row."""
    max_samples: int | None
    """Use only this number of rows from the beginning of each training data set."""
    max_eval_samples: int | None
    """Use only this number of rows from the beginning of the held-out data."""
    data_cache: str | Path
    """Folder for tokenized data in Arrow files that are mapped into memory and used again, for data larger than memory; empty: every process tokenizes the data and holds them in memory."""
    deduplicate: Literal['none', 'exact', 'whitespace']
    """Omit training rows whose prompt (in SFT: prompt and answer) repeats an earlier row, and report their number: exact compares texts as they are, whitespace ignores differences in the white space between words."""
    step_separator: str | Path
    """For process reward models: text that ends each step of an answer except the last. It is part of the step, and the score of the step is at its last token."""
    bad_rows: Literal['stop', 'skip']
    """Handling of a malformed or too long row: stop ends the run before a model is loaded and names the file and line, skip omits it and reports how many there are, and the first ones. With skip, train_ppo also leaves out prompts whose media cannot be read any more when they are drawn."""
    strategy: str | Path
    """Distributed backend: fsdp, deepspeed, or a subclass of StrategyBase as module:Class or file.py:Class. auto: deepspeed with --fsdp false or a flag that only ZeRO has, else fsdp."""
    fsdp: bool
    """Shard with FSDP2: short for --strategy fsdp; --fsdp false is short for --strategy deepspeed."""
    fsdp_cpu_offload: bool
    """Keep parameters and optimizer states in host memory, and copy shards to the device when they are used."""
    reduce_gradients_once: bool
    """FSDP2: reduce gradients over the ranks only after the last micro-batch of an optimizer step. This communicates less, but until then every rank keeps the gradient of the whole model, four bytes per parameter. By default gradients are sharded after every micro-batch."""
    gather_parameters_once: bool
    """FSDP2: keep gathered parameters on the device from the first micro-batch of an optimizer step until the last one. This communicates less, but until then every rank keeps the whole model, with --bf16 two bytes per parameter. By default each micro-batch gathers each block twice."""
    zero_stage: Literal[0, 1, 2, 3]
    """Stage of ZeRO: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    zpg: int
    """ZeRO-3: number of consecutive ranks, usually one node, that keep a secondary copy of the parameters and gather them within the group."""
    adam_offload: bool
    """ZeRO: keep optimizer states in host memory and update the parameters there."""
    param_offload: bool
    """ZeRO-3: keep parameters in host memory and copy them to the device layer by layer."""
    overlap_comm: bool
    """ZeRO: reduce gradients during the backward pass; uses more memory."""
    reduce_dtype: Literal['fp32', 'bf16']
    """With --bf16: dtype of the gradients while they are reduced over ranks; bf16 halves the traffic. FSDP2 accumulates them over micro-batches in float32 either way, ZeRO in this dtype."""
    offload_idle: bool
    """Keep only the models and optimizers of the current phase in device memory; all others wait in host memory."""
    dp_replicate: int
    """Hybrid sharding: number of replicas of the model; each one is sharded over a share of the data ranks. 0: every data rank has a replica of its own. That is the fastest for a model that fits on each: only gradients are communicated."""
    tp_size: int
    """Tensor parallelism: number of consecutive ranks that split each layer of the trained models; they process the same data."""
    tp_sequence_parallel: bool
    """Split the tokens between attention and feed-forward layers over the --tp_size ranks: less memory, same traffic."""
    ep_size: int
    """Expert parallelism: number of consecutive ranks that divide the experts of each layer of a mixture; each token visits the ranks of its experts. The other parameters are sharded as without it."""
    sp_size: int
    """Sequence parallelism: number of ranks that split the tokens of each micro-batch of the trained models."""
    sp_impl: Literal['auto', 'ulysses', 'zigzag']
    """Implementation of attention with --sp_size: ulysses exchanges tokens for heads (all-to-all), zigzag gathers keys and values. auto: ulysses."""
    cp_size: int
    """Context parallelism: short for --sp_size N --sp_impl zigzag."""
    sample_store: Literal['memory', 'transfer_queue']
    """Transport of samples between ranks within a step: memory sends each value directly to the rank that computes with it; transfer_queue writes all of them to a TransferQueue on a Ray cluster (RAY_ADDRESS), where other programs can read them."""
    deterministic: bool
    """On an accelerator, train only with kernels that give bitwise equal results in every run, as a CPU always does: attention's backward pass is slower and uses more memory. Torch raises an error for an operation without such a kernel. The engine's kernels are not covered. Turns of episodes begin together, as on a CPU, so each waits for the slowest program of the turns before."""
    timeout_minutes: float
    """End the run when a collective waits longer than this; every rank then logs which ranks are late and the position of each rank."""
    arrival_minutes: float
    """End the run when a rank waits longer than this for the others at the start; the message names the missing ranks."""
    phase_minutes: float
    """End the run when a phase, such as generate or train, takes longer than this on all ranks; every rank then logs the position of each rank."""
    completion_key: str | Path | None
    """Column of a single answer that --label_key judges: a text, a list of chat messages, or a whole conversation; for train_prm a list of texts, the steps, and the label is a list, too. Unset: completion, or completions for train_prm."""
    learning_rate: float
    """Peak learning rate; --actor_learning_rate is another name of it. Unset: 1e-6 in train_ppo, 1e-5 in train_sft (LIMA, arXiv 2305.11206), 5e-7 in train_dpo (Zephyr, arXiv 2310.16944) and train_kto (as in TRL's example), 9e-6 in train_rm (InstructGPT, arXiv 2203.02155), 1e-5 in train_prm (as in TRL); with --lora_rank ten times that (Schulman et al., LoRA Without Regret, 2025)."""
    lr_scheduler: Literal['cosine', 'constant', 'linear', 'wsd', 'inverse_sqrt', 'polynomial']
    """Schedule after the warm-up, as transformers computes it. linear ends at 0, inverse_sqrt falls from the warm-up on, and wsd is constant until it decays in the last steps (arXiv 2404.06395)."""
    lr_min_ratio: float
    """Share of the peak at which the schedule ends."""
    lr_decay_ratio: float
    """Share of all optimizer steps that the decay of wsd takes, a cosine."""
    lr_power: float
    """Exponent of the polynomial. 1: a line."""
    lr_warmup_ratio: float
    """Share of all optimizer steps used for the warm-up."""
    optimizer: Literal['adamw', 'muon', 'sgd', 'lion', 'adamw_8bit']
    """Optimizer of all models that learn; all but adamw need --fsdp. muon orthogonalises the updates of the matrices in the blocks (arXiv 2502.16982), at the learning rate and weight decay of AdamW, and trains all other parameters with AdamW. sgd has no momentum; lion and adamw_8bit come from bitsandbytes. A parameter takes 8 bytes of states with adamw, 4 with muon and lion, about 2 with adamw_8bit, and none with sgd."""
    adam_betas: list[float] | str
    """Two decay rates of AdamW and lion. The momentum of --optimizer muon is always 0.95."""
    l2: float
    """Weight decay, applied to matrices only (not to norms and biases)."""
    max_norm: float
    """Clip the global gradient norm to this value; 0: no clipping."""
    seed: int
    """Seed of all random numbers."""
    num_episodes: int
    """Number of passes over the training data. The run ends after them, or earlier at --max_steps. Unset: 3 for given examples, as in TRL, and 1 in train_ppo."""
    max_steps: int | None
    """Largest number of steps; the end of --num_episodes may come earlier."""
    train_batch_size: int
    """Number of samples in one optimizer step, over all ranks. Unset: the samples of a step in train_ppo, 64 in train_sft, train_rm and train_prm, 32 in train_dpo and train_kto, from the sources of --learning_rate; fewer if the data would otherwise give fewer than 50 steps."""
    micro_train_batch_size: int | None
    """Maximum number of sequences in one forward and backward pass on one rank; unset: max_tokens_per_microbatch is the only limit."""
    max_tokens_per_microbatch: int
    """Maximum number of tokens in one forward and backward pass on one rank; with --sp_size, the ranks of a group split this number."""
    max_tokens_per_logprob_microbatch: int | None
    """Maximum number of tokens in one forward pass without gradients on one rank: log-probs of actor and reference, values, scores of reward models. Unset: max_tokens_per_microbatch, and the same micro-batches as in training."""
    batching: Literal['packed', 'dynamic', 'plain']
    """Grouping of sequences into micro-batches: packed combines any sequences so that all ranks finish together, dynamic combines similar lengths, plain keeps the order."""
    enable_ema: bool
    """Keep an exponential moving average of the actor's parameters, update it after each step, and save it too: model_ema."""
    ema_beta: float
    """Decay of the moving average per step."""
    save_path: str | Path
    """Folder of the run: final model, metrics, report, resolved configuration."""
    ckpt_path: str | Path | None
    """Folder of the checkpoints; unset: save_path/checkpoints."""
    save_steps: int
    """Number of steps between checkpoints; -1: no checkpoints."""
    save_minutes: float | None
    """Write a checkpoint also after the step in which so many minutes since the last one have passed, for machines that may vanish; unset: by steps alone."""
    max_ckpt_num: int
    """Maximum number of checkpoints to keep."""
    max_ckpt_mem: float
    """Maximum total size of the checkpoints to keep, in GB; the newest is always kept."""
    save_hf_ckpt: bool
    """Also write the model of each checkpoint into the folder `hf` beside it, in the format that from_pretrained and engines load."""
    async_save: bool
    """Write checkpoints in the background from a copy in host memory, while training continues; if the free memory of a host is less than twice the copy, training waits."""
    push_to_hub: str | Path
    """Upload the final model with a card to this repository on the Hugging Face hub, owner/name. It is created as a private one if it does not exist. Empty: no upload."""
    load_checkpoint: bool
    """Resume from the newest complete checkpoint; start from the beginning if there is none. A run that torchrun restarts after the failure of a rank or the loss of a node resumes without this flag."""
    fork_from: str | Path
    """Folder of another run to continue from, in the folder --save_path and with the flags of this run. Its checkpoint is the one that --at names."""
    at: int | None
    """Number of steps that the checkpoint of --fork_from covers; unset: the newest one."""
    dry_run: bool
    """Print the plan of the run on the processes that were started (problems, layout, bytes of a rank in each phase, seconds), as `lightrft plan` does, and exit."""
    overwrite: bool
    """Start from the beginning in a folder that has the results of an earlier run; they are moved to FOLDER.previous."""
    stop_loss: float | None
    """In supervised training: end the run when the loss of a step is below this value."""
    eval_steps: int
    """Number of steps between evaluations, with one more at the end; -1: only at the end."""
    logging_steps: int
    """Number of steps between reports of metrics."""
    report_to: str | list[str]
    """Destinations of metrics and samples, separated by commas, or a list in YAML: tensorboard (files in save_path/tensorboard), wandb, mlflow, swanlab, trackio, comet_ml, and jsonl for the files metrics.jsonl and samples.jsonl, always written."""
    tracker_project: str | Path
    """Project of the run in the trackers of --report_to; in MLflow the experiment."""
    tracker_run_name: str | Path | None
    """Name of the run in the trackers of --report_to; unset: the name of the folder --save_path."""
    tracker_org: str | Path | None
    """Team or user that owns the project, in Weights & Biases, SwanLab and Comet; unset: your own."""
    tracker_group: str | Path | None
    """Group of runs in Weights & Biases, SwanLab and Trackio."""
    trace_steps: int
    """Number of steps in the timeline save_path/trace.json, the first ones after every start or resume: the activity of each rank over time, for https://ui.perfetto.dev. 0: none."""
    digests: bool
    """Write 16 bytes for each phase of each step to save_path/digests.jsonl, from which `lightrft bisect` finds where two runs begin to differ."""
    model: Model
    tokenizer: PreTrainedTokenizerBase
    train_dataset: Rows
    eval_dataset: Rows
    reward_funcs: Reward
    args: Any
    peft_config: Any
    processing_class: Any

def train_prm(
    config: ConfigOrFile = ...,
    **values: Unpack[TrainPrmFlags],
) -> TrainedRun: ...

class TrainDpoFlags(TypedDict, total=False):
    pretrain: str | Path
    """Model to start from: a Hugging Face folder, a GGUF file or a hub name, as for all models here."""
    bf16: bool
    """Compute in bfloat16 with float32 master weights; otherwise everything is float32. On a GPU with fast bfloat16 (NVIDIA from A100 and L4 on) this is the default; --no_bf16 turns it off."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_policy: Literal['full', 'selective', 'offload']
    """Activations to keep of each block: full keeps only the input; selective also keeps attention; offload keeps the input in host memory."""
    fused_kernels: Literal['none', 'liger']
    """liger: compute norms, rotary embeddings and feed-forward layers of Llama, Qwen, Gemma, OLMo and similar models with fused kernels, on an accelerator; requires the package liger-kernel. In float32, log-probs and gradients change by at most 1e-5."""
    fp8_training: bool
    """Multiply in FP8 in the linear layers of the blocks (torchao, pip install '.[fp8]'), with a scale for each row; weights and optimizer keep their precision. For Hopper and later GPUs; a CPU emulates it."""
    trust_remote_code: bool
    """Run Python code that comes with the model. Use it only for sources that you trust."""
    lora_rank: int
    """Train low-rank adapters (LoRA) of this rank while the model stays frozen; 0: train the model itself."""
    lora_alpha: float
    """Scale of the adapters: the output is multiplied by lora_alpha / lora_rank."""
    lora_rank_pattern: str | dict[str, Any]
    """Other ranks of some layers, by names or ends of names, as JSON: {'down_proj': 4}."""
    lora_alpha_pattern: str | dict[str, Any]
    """Other values of lora_alpha for some layers, in the same form."""
    rslora: bool
    """Multiply by lora_alpha / sqrt(lora_rank) instead, so that larger ranks learn as fast (arXiv 2312.03732)."""
    lora_init: Literal['kaiming', 'gaussian']
    """Distribution of A at the start, as in peft: uniform (kaiming), or normal with a standard deviation of 1 / lora_rank (gaussian). B is 0."""
    lora_lr_ratio: float
    """LoRA+: learning rate of B as a multiple of --learning_rate, which A has (arXiv 2402.12354; 16 is usual)."""
    lora_dropout: float
    """Dropout probability on the input of an adapter in training."""
    target_modules: list[str] | str
    """Names, or ends of names, of the linear layers that get adapters; all-linear: all except the output layer."""
    load_in_4bit: bool
    """With lora_rank: keep the frozen linear layers in four bits (QLoRA: NF4 with double quantisation), so that the model takes about a quarter of the memory of bfloat16. Embeddings, norms and the head keep the dtype of the run. The engine and the saved model have the matrices that these bits stand for. Requires bitsandbytes: pip install '.[qlora]'."""
    freeze_prefix: list[str] | str
    """Prefixes of the names of parameters that are not trained; with lora_rank, these get no adapters."""
    freeze_vision_tower: bool
    """With a key of media: do not train the parameters that only images, videos or sound use. These are the towers and the projections into the language model."""
    prompt_data: Rows
    """Training data: a JSONL, JSON or parquet file, a folder of them or of Dataset.save_to_disk, a hub name, tasks, reasoning_gym:NAME or verifiers:NAME, or rows of Python, module:object or file.py:object. Several are separated by commas, or a list in YAML; each row is then drawn once in an epoch. In the form NAME:PROBABILITY, each row of a batch is drawn from a data set with this probability."""
    prompt_data_probs: list[float] | str
    """Probability of each data set of --prompt_data, another form of NAME:PROBABILITY."""
    prompt_split: str | Path
    """Split of the training data."""
    eval_data: Rows
    """Held-out data in the same form, for --eval_steps and the end of the run; empty: no evaluation. Several sets with numbers of their own are NAME=SOURCE, separated by commas or a list in YAML. Sets with the name of a benchmark, such as gsm8k, or NAME:BENCHMARK=SOURCE, have the benchmark's columns, instruction and verifier (docs/evaluation.md)."""
    eval_split: str | Path
    """Split of the held-out data."""
    input_key: str | Path | None
    """Column of the prompt: a text, or chat messages as a list or JSON text. Unset: input, or the columns of a known form (docs/data.md)."""
    json_chats: Literal['auto', 'always', 'never']
    """Texts that are chat messages as JSON. auto: prompts whose objects have nothing but the keys of a message and known roles are messages, and answers are texts; always: prompts and answers whose objects have roles are messages; never: a text is a text."""
    images_key: str | Path | None
    """Column of a prompt's images: one path or a list of paths, relative to the folder of the data, or images of the datasets package; a row without images is a text prompt. In a chat, an image takes the place of <image> in the text, or precedes the text. The model must accept images."""
    videos_key: str | Path | None
    """Column of a prompt's videos: a file (.gif, .webp, or another one that FFmpeg reads), a list of images as frames, or a list of several. Unset: no videos."""
    audios_key: str | Path | None
    """Column of a prompt's clips of sound: a .wav file or another one that FFmpeg reads, one of the datasets package, or a list of several. Unset: no sound."""
    video_fps: float
    """Frames per second sampled from a video."""
    video_max_frames: int
    """Maximum number of frames sampled from a video, evenly spaced."""
    audio_sampling_rate: int
    """Sampling rate in Hz of the model, for example 16000: audio clips are resampled to it with the package av. 0: clips are not resampled, and one with another rate is a bad row."""
    check_media: Literal['all', 'first', 'none']
    """Images, videos and clips that are read completely when the data are loaded, in parallel processes: all of them, or only the ones in the first rows. A row with one that cannot be read is a bad row (--bad_rows). The start of each file is read in any case."""
    media_max_mb: float
    """Maximum size in MB of an image, video or audio file; a row with a larger file is a bad row."""
    media_urls: bool
    """Allow HTTP(S) URLs in the columns of media: each is fetched once on each host, into the temporary folder."""
    media_root: str | Path
    """Folder that the paths of images are relative to; no file outside of it is read. Empty: paths are relative to the folder of the data, and any path is allowed."""
    eval_input_key: str | Path | None
    """Column of the prompt in --eval_data; unset: --input_key."""
    input_template: str | Path | None
    """Template with one {} of prompts that are text: in a shell $'Question: {}\\nAnswer: ', with a line break. Chat messages are not changed."""
    apply_chat_template: bool
    """Render prompts with the tokenizer's chat template. A response then also stops at the token that ends a turn of the template."""
    system_prompt: str | Path | None
    """System message for the chat template. A row with a system message of its own uses that one."""
    chat_template_kwargs: str | dict[str, Any]
    """Additional variables for the chat template as a JSON object: '{'enable_thinking': false}'. The column `chat_template_kwargs` of a row replaces them."""
    chat_template_date: str | Path
    """Date as YYYY-MM-DD for chat templates that write it; empty: the first day of the run, also after it is resumed."""
    prompt_max_len: int
    """Maximum length of a prompt in tokens; a row with a longer prompt is a bad row."""
    max_samples: int | None
    """Use only this number of rows from the beginning of each training data set."""
    max_eval_samples: int | None
    """Use only this number of rows from the beginning of the held-out data."""
    data_cache: str | Path
    """Folder for tokenized data in Arrow files that are mapped into memory and used again, for data larger than memory; empty: every process tokenizes the data and holds them in memory."""
    deduplicate: Literal['none', 'exact', 'whitespace']
    """Omit training rows whose prompt (in SFT: prompt and answer) repeats an earlier row, and report their number: exact compares texts as they are, whitespace ignores differences in the white space between words."""
    learned_turns: Literal['all', 'last']
    """Turns of the assistant that SFT and --pretrain_data train on in a conversation: all, or the last one. A turn with `weight`, `train` or `loss` 0 is not learned."""
    learn_empty_thinking: bool
    """Train on an empty thinking that a chat template writes before an answer. Without it an answer to a row without thoughts teaches nothing about thinking."""
    bad_rows: Literal['stop', 'skip']
    """Handling of a malformed or too long row: stop ends the run before a model is loaded and names the file and line, skip omits it and reports how many there are, and the first ones. With skip, train_ppo also leaves out prompts whose media cannot be read any more when they are drawn."""
    strategy: str | Path
    """Distributed backend: fsdp, deepspeed, or a subclass of StrategyBase as module:Class or file.py:Class. auto: deepspeed with --fsdp false or a flag that only ZeRO has, else fsdp."""
    fsdp: bool
    """Shard with FSDP2: short for --strategy fsdp; --fsdp false is short for --strategy deepspeed."""
    fsdp_cpu_offload: bool
    """Keep parameters and optimizer states in host memory, and copy shards to the device when they are used."""
    reduce_gradients_once: bool
    """FSDP2: reduce gradients over the ranks only after the last micro-batch of an optimizer step. This communicates less, but until then every rank keeps the gradient of the whole model, four bytes per parameter. By default gradients are sharded after every micro-batch."""
    gather_parameters_once: bool
    """FSDP2: keep gathered parameters on the device from the first micro-batch of an optimizer step until the last one. This communicates less, but until then every rank keeps the whole model, with --bf16 two bytes per parameter. By default each micro-batch gathers each block twice."""
    zero_stage: Literal[0, 1, 2, 3]
    """Stage of ZeRO: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    zpg: int
    """ZeRO-3: number of consecutive ranks, usually one node, that keep a secondary copy of the parameters and gather them within the group."""
    adam_offload: bool
    """ZeRO: keep optimizer states in host memory and update the parameters there."""
    param_offload: bool
    """ZeRO-3: keep parameters in host memory and copy them to the device layer by layer."""
    overlap_comm: bool
    """ZeRO: reduce gradients during the backward pass; uses more memory."""
    reduce_dtype: Literal['fp32', 'bf16']
    """With --bf16: dtype of the gradients while they are reduced over ranks; bf16 halves the traffic. FSDP2 accumulates them over micro-batches in float32 either way, ZeRO in this dtype."""
    offload_idle: bool
    """Keep only the models and optimizers of the current phase in device memory; all others wait in host memory."""
    dp_replicate: int
    """Hybrid sharding: number of replicas of the model; each one is sharded over a share of the data ranks. 0: every data rank has a replica of its own. That is the fastest for a model that fits on each: only gradients are communicated."""
    tp_size: int
    """Tensor parallelism: number of consecutive ranks that split each layer of the trained models; they process the same data."""
    tp_sequence_parallel: bool
    """Split the tokens between attention and feed-forward layers over the --tp_size ranks: less memory, same traffic."""
    ep_size: int
    """Expert parallelism: number of consecutive ranks that divide the experts of each layer of a mixture; each token visits the ranks of its experts. The other parameters are sharded as without it."""
    sp_size: int
    """Sequence parallelism: number of ranks that split the tokens of each micro-batch of the trained models."""
    sp_impl: Literal['auto', 'ulysses', 'zigzag']
    """Implementation of attention with --sp_size: ulysses exchanges tokens for heads (all-to-all), zigzag gathers keys and values. auto: ulysses."""
    cp_size: int
    """Context parallelism: short for --sp_size N --sp_impl zigzag."""
    sample_store: Literal['memory', 'transfer_queue']
    """Transport of samples between ranks within a step: memory sends each value directly to the rank that computes with it; transfer_queue writes all of them to a TransferQueue on a Ray cluster (RAY_ADDRESS), where other programs can read them."""
    deterministic: bool
    """On an accelerator, train only with kernels that give bitwise equal results in every run, as a CPU always does: attention's backward pass is slower and uses more memory. Torch raises an error for an operation without such a kernel. The engine's kernels are not covered. Turns of episodes begin together, as on a CPU, so each waits for the slowest program of the turns before."""
    timeout_minutes: float
    """End the run when a collective waits longer than this; every rank then logs which ranks are late and the position of each rank."""
    arrival_minutes: float
    """End the run when a rank waits longer than this for the others at the start; the message names the missing ranks."""
    phase_minutes: float
    """End the run when a phase, such as generate or train, takes longer than this on all ranks; every rank then logs the position of each rank."""
    chosen_key: str | Path
    """Column of the preferred answer: a text, a list of chat messages, or a whole conversation that begins like the other one."""
    rejected_key: str | Path
    """Column of the other answer, in the same form."""
    dpo_loss: Literal['sigmoid', 'ipo', 'hinge', 'robust', 'exo', 'bco', 'apo_zero', 'apo_down', 'cpo', 'slic', 'simpo', 'orpo']
    """Loss of DPO as a function of the implicit rewards of a pair. cpo, slic, simpo and orpo need no reference."""
    simpo_gamma: float
    """Difference of the rewards that --dpo_loss simpo aims at."""
    ld_alpha: float
    """DPO: factor of the log-probs of tokens beyond the length of the shorter answer (LD-DPO)."""
    beta: float
    """DPO and KTO: factor of the log-ratio of policy and reference in the implicit reward; a larger value keeps the policy closer to the reference."""
    label_smoothing: float
    """DPO with the losses sigmoid (cDPO), robust, exo or cpo: assumed share of rows with a reversed preference, below 0.5."""
    length_normalized: bool
    """DPO: use the mean log-prob of an answer's tokens instead of the sum."""
    sft_coef: float
    """DPO: coefficient of the mean negative log-likelihood per token of the chosen answers."""
    precompute_reference: bool
    """DPO: compute the log-probs of the reference once before training, with the model that training starts from, so that no second model is kept."""
    learning_rate: float
    """Peak learning rate; --actor_learning_rate is another name of it. Unset: 1e-6 in train_ppo, 1e-5 in train_sft (LIMA, arXiv 2305.11206), 5e-7 in train_dpo (Zephyr, arXiv 2310.16944) and train_kto (as in TRL's example), 9e-6 in train_rm (InstructGPT, arXiv 2203.02155), 1e-5 in train_prm (as in TRL); with --lora_rank ten times that (Schulman et al., LoRA Without Regret, 2025)."""
    lr_scheduler: Literal['cosine', 'constant', 'linear', 'wsd', 'inverse_sqrt', 'polynomial']
    """Schedule after the warm-up, as transformers computes it. linear ends at 0, inverse_sqrt falls from the warm-up on, and wsd is constant until it decays in the last steps (arXiv 2404.06395)."""
    lr_min_ratio: float
    """Share of the peak at which the schedule ends."""
    lr_decay_ratio: float
    """Share of all optimizer steps that the decay of wsd takes, a cosine."""
    lr_power: float
    """Exponent of the polynomial. 1: a line."""
    lr_warmup_ratio: float
    """Share of all optimizer steps used for the warm-up."""
    optimizer: Literal['adamw', 'muon', 'sgd', 'lion', 'adamw_8bit']
    """Optimizer of all models that learn; all but adamw need --fsdp. muon orthogonalises the updates of the matrices in the blocks (arXiv 2502.16982), at the learning rate and weight decay of AdamW, and trains all other parameters with AdamW. sgd has no momentum; lion and adamw_8bit come from bitsandbytes. A parameter takes 8 bytes of states with adamw, 4 with muon and lion, about 2 with adamw_8bit, and none with sgd."""
    adam_betas: list[float] | str
    """Two decay rates of AdamW and lion. The momentum of --optimizer muon is always 0.95."""
    l2: float
    """Weight decay, applied to matrices only (not to norms and biases)."""
    max_norm: float
    """Clip the global gradient norm to this value; 0: no clipping."""
    seed: int
    """Seed of all random numbers."""
    num_episodes: int
    """Number of passes over the training data. The run ends after them, or earlier at --max_steps. Unset: 3 for given examples, as in TRL, and 1 in train_ppo."""
    max_steps: int | None
    """Largest number of steps; the end of --num_episodes may come earlier."""
    train_batch_size: int
    """Number of samples in one optimizer step, over all ranks. Unset: the samples of a step in train_ppo, 64 in train_sft, train_rm and train_prm, 32 in train_dpo and train_kto, from the sources of --learning_rate; fewer if the data would otherwise give fewer than 50 steps."""
    micro_train_batch_size: int | None
    """Maximum number of sequences in one forward and backward pass on one rank; unset: max_tokens_per_microbatch is the only limit."""
    max_tokens_per_microbatch: int
    """Maximum number of tokens in one forward and backward pass on one rank; with --sp_size, the ranks of a group split this number."""
    max_tokens_per_logprob_microbatch: int | None
    """Maximum number of tokens in one forward pass without gradients on one rank: log-probs of actor and reference, values, scores of reward models. Unset: max_tokens_per_microbatch, and the same micro-batches as in training."""
    batching: Literal['packed', 'dynamic', 'plain']
    """Grouping of sequences into micro-batches: packed combines any sequences so that all ranks finish together, dynamic combines similar lengths, plain keeps the order."""
    enable_ema: bool
    """Keep an exponential moving average of the actor's parameters, update it after each step, and save it too: model_ema."""
    ema_beta: float
    """Decay of the moving average per step."""
    save_path: str | Path
    """Folder of the run: final model, metrics, report, resolved configuration."""
    ckpt_path: str | Path | None
    """Folder of the checkpoints; unset: save_path/checkpoints."""
    save_steps: int
    """Number of steps between checkpoints; -1: no checkpoints."""
    save_minutes: float | None
    """Write a checkpoint also after the step in which so many minutes since the last one have passed, for machines that may vanish; unset: by steps alone."""
    max_ckpt_num: int
    """Maximum number of checkpoints to keep."""
    max_ckpt_mem: float
    """Maximum total size of the checkpoints to keep, in GB; the newest is always kept."""
    save_hf_ckpt: bool
    """Also write the model of each checkpoint into the folder `hf` beside it, in the format that from_pretrained and engines load."""
    async_save: bool
    """Write checkpoints in the background from a copy in host memory, while training continues; if the free memory of a host is less than twice the copy, training waits."""
    save_adapter_only: bool
    """With lora_rank: the final model is only the adapter in peft's format, not the model with the adapter merged into it."""
    push_to_hub: str | Path
    """Upload the final model with a card to this repository on the Hugging Face hub, owner/name. It is created as a private one if it does not exist. Empty: no upload."""
    load_checkpoint: bool
    """Resume from the newest complete checkpoint; start from the beginning if there is none. A run that torchrun restarts after the failure of a rank or the loss of a node resumes without this flag."""
    fork_from: str | Path
    """Folder of another run to continue from, in the folder --save_path and with the flags of this run. Its checkpoint is the one that --at names."""
    at: int | None
    """Number of steps that the checkpoint of --fork_from covers; unset: the newest one."""
    dry_run: bool
    """Print the plan of the run on the processes that were started (problems, layout, bytes of a rank in each phase, seconds), as `lightrft plan` does, and exit."""
    overwrite: bool
    """Start from the beginning in a folder that has the results of an earlier run; they are moved to FOLDER.previous."""
    stop_loss: float | None
    """In supervised training: end the run when the loss of a step is below this value."""
    eval_generate: str | Path
    """Evaluate by responses, too: flags of `lightrft evaluate` such as '--eval_data gsm8k=test.jsonl --generate_max_len 512', or a file with its configuration. The model answers these prompts at --eval_steps and at the end."""
    eval_steps: int
    """Number of steps between evaluations, with one more at the end; -1: only at the end."""
    logging_steps: int
    """Number of steps between reports of metrics."""
    report_to: str | list[str]
    """Destinations of metrics and samples, separated by commas, or a list in YAML: tensorboard (files in save_path/tensorboard), wandb, mlflow, swanlab, trackio, comet_ml, and jsonl for the files metrics.jsonl and samples.jsonl, always written."""
    tracker_project: str | Path
    """Project of the run in the trackers of --report_to; in MLflow the experiment."""
    tracker_run_name: str | Path | None
    """Name of the run in the trackers of --report_to; unset: the name of the folder --save_path."""
    tracker_org: str | Path | None
    """Team or user that owns the project, in Weights & Biases, SwanLab and Comet; unset: your own."""
    tracker_group: str | Path | None
    """Group of runs in Weights & Biases, SwanLab and Trackio."""
    trace_steps: int
    """Number of steps in the timeline save_path/trace.json, the first ones after every start or resume: the activity of each rank over time, for https://ui.perfetto.dev. 0: none."""
    digests: bool
    """Write 16 bytes for each phase of each step to save_path/digests.jsonl, from which `lightrft bisect` finds where two runs begin to differ."""
    model: Model
    tokenizer: PreTrainedTokenizerBase
    train_dataset: Rows
    eval_dataset: Rows
    reward_funcs: Reward
    args: Any
    peft_config: Any
    processing_class: Any

def train_dpo(
    config: ConfigOrFile = ...,
    **values: Unpack[TrainDpoFlags],
) -> TrainedRun: ...

class TrainKtoFlags(TypedDict, total=False):
    pretrain: str | Path
    """Model to start from: a Hugging Face folder, a GGUF file or a hub name, as for all models here."""
    bf16: bool
    """Compute in bfloat16 with float32 master weights; otherwise everything is float32. On a GPU with fast bfloat16 (NVIDIA from A100 and L4 on) this is the default; --no_bf16 turns it off."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_policy: Literal['full', 'selective', 'offload']
    """Activations to keep of each block: full keeps only the input; selective also keeps attention; offload keeps the input in host memory."""
    fused_kernels: Literal['none', 'liger']
    """liger: compute norms, rotary embeddings and feed-forward layers of Llama, Qwen, Gemma, OLMo and similar models with fused kernels, on an accelerator; requires the package liger-kernel. In float32, log-probs and gradients change by at most 1e-5."""
    fp8_training: bool
    """Multiply in FP8 in the linear layers of the blocks (torchao, pip install '.[fp8]'), with a scale for each row; weights and optimizer keep their precision. For Hopper and later GPUs; a CPU emulates it."""
    trust_remote_code: bool
    """Run Python code that comes with the model. Use it only for sources that you trust."""
    lora_rank: int
    """Train low-rank adapters (LoRA) of this rank while the model stays frozen; 0: train the model itself."""
    lora_alpha: float
    """Scale of the adapters: the output is multiplied by lora_alpha / lora_rank."""
    lora_rank_pattern: str | dict[str, Any]
    """Other ranks of some layers, by names or ends of names, as JSON: {'down_proj': 4}."""
    lora_alpha_pattern: str | dict[str, Any]
    """Other values of lora_alpha for some layers, in the same form."""
    rslora: bool
    """Multiply by lora_alpha / sqrt(lora_rank) instead, so that larger ranks learn as fast (arXiv 2312.03732)."""
    lora_init: Literal['kaiming', 'gaussian']
    """Distribution of A at the start, as in peft: uniform (kaiming), or normal with a standard deviation of 1 / lora_rank (gaussian). B is 0."""
    lora_lr_ratio: float
    """LoRA+: learning rate of B as a multiple of --learning_rate, which A has (arXiv 2402.12354; 16 is usual)."""
    lora_dropout: float
    """Dropout probability on the input of an adapter in training."""
    target_modules: list[str] | str
    """Names, or ends of names, of the linear layers that get adapters; all-linear: all except the output layer."""
    load_in_4bit: bool
    """With lora_rank: keep the frozen linear layers in four bits (QLoRA: NF4 with double quantisation), so that the model takes about a quarter of the memory of bfloat16. Embeddings, norms and the head keep the dtype of the run. The engine and the saved model have the matrices that these bits stand for. Requires bitsandbytes: pip install '.[qlora]'."""
    freeze_prefix: list[str] | str
    """Prefixes of the names of parameters that are not trained; with lora_rank, these get no adapters."""
    freeze_vision_tower: bool
    """With a key of media: do not train the parameters that only images, videos or sound use. These are the towers and the projections into the language model."""
    prompt_data: Rows
    """Training data: a JSONL, JSON or parquet file, a folder of them or of Dataset.save_to_disk, a hub name, tasks, reasoning_gym:NAME or verifiers:NAME, or rows of Python, module:object or file.py:object. Several are separated by commas, or a list in YAML; each row is then drawn once in an epoch. In the form NAME:PROBABILITY, each row of a batch is drawn from a data set with this probability."""
    prompt_data_probs: list[float] | str
    """Probability of each data set of --prompt_data, another form of NAME:PROBABILITY."""
    prompt_split: str | Path
    """Split of the training data."""
    eval_data: Rows
    """Held-out data in the same form, for --eval_steps and the end of the run; empty: no evaluation. Several sets with numbers of their own are NAME=SOURCE, separated by commas or a list in YAML. Sets with the name of a benchmark, such as gsm8k, or NAME:BENCHMARK=SOURCE, have the benchmark's columns, instruction and verifier (docs/evaluation.md)."""
    eval_split: str | Path
    """Split of the held-out data."""
    input_key: str | Path | None
    """Column of the prompt: a text, or chat messages as a list or JSON text. Unset: input, or the columns of a known form (docs/data.md)."""
    json_chats: Literal['auto', 'always', 'never']
    """Texts that are chat messages as JSON. auto: prompts whose objects have nothing but the keys of a message and known roles are messages, and answers are texts; always: prompts and answers whose objects have roles are messages; never: a text is a text."""
    images_key: str | Path | None
    """Column of a prompt's images: one path or a list of paths, relative to the folder of the data, or images of the datasets package; a row without images is a text prompt. In a chat, an image takes the place of <image> in the text, or precedes the text. The model must accept images."""
    videos_key: str | Path | None
    """Column of a prompt's videos: a file (.gif, .webp, or another one that FFmpeg reads), a list of images as frames, or a list of several. Unset: no videos."""
    audios_key: str | Path | None
    """Column of a prompt's clips of sound: a .wav file or another one that FFmpeg reads, one of the datasets package, or a list of several. Unset: no sound."""
    video_fps: float
    """Frames per second sampled from a video."""
    video_max_frames: int
    """Maximum number of frames sampled from a video, evenly spaced."""
    audio_sampling_rate: int
    """Sampling rate in Hz of the model, for example 16000: audio clips are resampled to it with the package av. 0: clips are not resampled, and one with another rate is a bad row."""
    check_media: Literal['all', 'first', 'none']
    """Images, videos and clips that are read completely when the data are loaded, in parallel processes: all of them, or only the ones in the first rows. A row with one that cannot be read is a bad row (--bad_rows). The start of each file is read in any case."""
    media_max_mb: float
    """Maximum size in MB of an image, video or audio file; a row with a larger file is a bad row."""
    media_urls: bool
    """Allow HTTP(S) URLs in the columns of media: each is fetched once on each host, into the temporary folder."""
    media_root: str | Path
    """Folder that the paths of images are relative to; no file outside of it is read. Empty: paths are relative to the folder of the data, and any path is allowed."""
    label_key: str | Path | None
    """Column of the correct answer: reward functions receive it as `label`, and SFT trains on it. For SFT, a row that ends in an answer needs none. For KTO it is true for a good answer, and for train_prm it is a list with a value for each step. Unset: label, or the column of a known form (docs/data.md)."""
    eval_input_key: str | Path | None
    """Column of the prompt in --eval_data; unset: --input_key."""
    eval_label_key: str | Path | None
    """Column of the correct answer in --eval_data; unset: --label_key."""
    input_template: str | Path | None
    """Template with one {} of prompts that are text: in a shell $'Question: {}\\nAnswer: ', with a line break. Chat messages are not changed."""
    apply_chat_template: bool
    """Render prompts with the tokenizer's chat template. A response then also stops at the token that ends a turn of the template."""
    system_prompt: str | Path | None
    """System message for the chat template. A row with a system message of its own uses that one."""
    chat_template_kwargs: str | dict[str, Any]
    """Additional variables for the chat template as a JSON object: '{'enable_thinking': false}'. The column `chat_template_kwargs` of a row replaces them."""
    chat_template_date: str | Path
    """Date as YYYY-MM-DD for chat templates that write it; empty: the first day of the run, also after it is resumed."""
    prompt_max_len: int
    """Maximum length of a prompt in tokens; a row with a longer prompt is a bad row."""
    max_samples: int | None
    """Use only this number of rows from the beginning of each training data set."""
    max_eval_samples: int | None
    """Use only this number of rows from the beginning of the held-out data."""
    data_cache: str | Path
    """Folder for tokenized data in Arrow files that are mapped into memory and used again, for data larger than memory; empty: every process tokenizes the data and holds them in memory."""
    deduplicate: Literal['none', 'exact', 'whitespace']
    """Omit training rows whose prompt (in SFT: prompt and answer) repeats an earlier row, and report their number: exact compares texts as they are, whitespace ignores differences in the white space between words."""
    learned_turns: Literal['all', 'last']
    """Turns of the assistant that SFT and --pretrain_data train on in a conversation: all, or the last one. A turn with `weight`, `train` or `loss` 0 is not learned."""
    learn_empty_thinking: bool
    """Train on an empty thinking that a chat template writes before an answer. Without it an answer to a row without thoughts teaches nothing about thinking."""
    bad_rows: Literal['stop', 'skip']
    """Handling of a malformed or too long row: stop ends the run before a model is loaded and names the file and line, skip omits it and reports how many there are, and the first ones. With skip, train_ppo also leaves out prompts whose media cannot be read any more when they are drawn."""
    strategy: str | Path
    """Distributed backend: fsdp, deepspeed, or a subclass of StrategyBase as module:Class or file.py:Class. auto: deepspeed with --fsdp false or a flag that only ZeRO has, else fsdp."""
    fsdp: bool
    """Shard with FSDP2: short for --strategy fsdp; --fsdp false is short for --strategy deepspeed."""
    fsdp_cpu_offload: bool
    """Keep parameters and optimizer states in host memory, and copy shards to the device when they are used."""
    reduce_gradients_once: bool
    """FSDP2: reduce gradients over the ranks only after the last micro-batch of an optimizer step. This communicates less, but until then every rank keeps the gradient of the whole model, four bytes per parameter. By default gradients are sharded after every micro-batch."""
    gather_parameters_once: bool
    """FSDP2: keep gathered parameters on the device from the first micro-batch of an optimizer step until the last one. This communicates less, but until then every rank keeps the whole model, with --bf16 two bytes per parameter. By default each micro-batch gathers each block twice."""
    zero_stage: Literal[0, 1, 2, 3]
    """Stage of ZeRO: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    zpg: int
    """ZeRO-3: number of consecutive ranks, usually one node, that keep a secondary copy of the parameters and gather them within the group."""
    adam_offload: bool
    """ZeRO: keep optimizer states in host memory and update the parameters there."""
    param_offload: bool
    """ZeRO-3: keep parameters in host memory and copy them to the device layer by layer."""
    overlap_comm: bool
    """ZeRO: reduce gradients during the backward pass; uses more memory."""
    reduce_dtype: Literal['fp32', 'bf16']
    """With --bf16: dtype of the gradients while they are reduced over ranks; bf16 halves the traffic. FSDP2 accumulates them over micro-batches in float32 either way, ZeRO in this dtype."""
    offload_idle: bool
    """Keep only the models and optimizers of the current phase in device memory; all others wait in host memory."""
    dp_replicate: int
    """Hybrid sharding: number of replicas of the model; each one is sharded over a share of the data ranks. 0: every data rank has a replica of its own. That is the fastest for a model that fits on each: only gradients are communicated."""
    tp_size: int
    """Tensor parallelism: number of consecutive ranks that split each layer of the trained models; they process the same data."""
    tp_sequence_parallel: bool
    """Split the tokens between attention and feed-forward layers over the --tp_size ranks: less memory, same traffic."""
    ep_size: int
    """Expert parallelism: number of consecutive ranks that divide the experts of each layer of a mixture; each token visits the ranks of its experts. The other parameters are sharded as without it."""
    sp_size: int
    """Sequence parallelism: number of ranks that split the tokens of each micro-batch of the trained models."""
    sp_impl: Literal['auto', 'ulysses', 'zigzag']
    """Implementation of attention with --sp_size: ulysses exchanges tokens for heads (all-to-all), zigzag gathers keys and values. auto: ulysses."""
    cp_size: int
    """Context parallelism: short for --sp_size N --sp_impl zigzag."""
    sample_store: Literal['memory', 'transfer_queue']
    """Transport of samples between ranks within a step: memory sends each value directly to the rank that computes with it; transfer_queue writes all of them to a TransferQueue on a Ray cluster (RAY_ADDRESS), where other programs can read them."""
    deterministic: bool
    """On an accelerator, train only with kernels that give bitwise equal results in every run, as a CPU always does: attention's backward pass is slower and uses more memory. Torch raises an error for an operation without such a kernel. The engine's kernels are not covered. Turns of episodes begin together, as on a CPU, so each waits for the slowest program of the turns before."""
    timeout_minutes: float
    """End the run when a collective waits longer than this; every rank then logs which ranks are late and the position of each rank."""
    arrival_minutes: float
    """End the run when a rank waits longer than this for the others at the start; the message names the missing ranks."""
    phase_minutes: float
    """End the run when a phase, such as generate or train, takes longer than this on all ranks; every rank then logs the position of each rank."""
    completion_key: str | Path | None
    """Column of a single answer that --label_key judges: a text, a list of chat messages, or a whole conversation; for train_prm a list of texts, the steps, and the label is a list, too. Unset: completion, or completions for train_prm."""
    beta: float
    """DPO and KTO: factor of the log-ratio of policy and reference in the implicit reward; a larger value keeps the policy closer to the reference."""
    desirable_weight: float
    """KTO: weight of the rows with a good answer."""
    undesirable_weight: float
    """KTO: weight of the rows with a bad answer."""
    learning_rate: float
    """Peak learning rate; --actor_learning_rate is another name of it. Unset: 1e-6 in train_ppo, 1e-5 in train_sft (LIMA, arXiv 2305.11206), 5e-7 in train_dpo (Zephyr, arXiv 2310.16944) and train_kto (as in TRL's example), 9e-6 in train_rm (InstructGPT, arXiv 2203.02155), 1e-5 in train_prm (as in TRL); with --lora_rank ten times that (Schulman et al., LoRA Without Regret, 2025)."""
    lr_scheduler: Literal['cosine', 'constant', 'linear', 'wsd', 'inverse_sqrt', 'polynomial']
    """Schedule after the warm-up, as transformers computes it. linear ends at 0, inverse_sqrt falls from the warm-up on, and wsd is constant until it decays in the last steps (arXiv 2404.06395)."""
    lr_min_ratio: float
    """Share of the peak at which the schedule ends."""
    lr_decay_ratio: float
    """Share of all optimizer steps that the decay of wsd takes, a cosine."""
    lr_power: float
    """Exponent of the polynomial. 1: a line."""
    lr_warmup_ratio: float
    """Share of all optimizer steps used for the warm-up."""
    optimizer: Literal['adamw', 'muon', 'sgd', 'lion', 'adamw_8bit']
    """Optimizer of all models that learn; all but adamw need --fsdp. muon orthogonalises the updates of the matrices in the blocks (arXiv 2502.16982), at the learning rate and weight decay of AdamW, and trains all other parameters with AdamW. sgd has no momentum; lion and adamw_8bit come from bitsandbytes. A parameter takes 8 bytes of states with adamw, 4 with muon and lion, about 2 with adamw_8bit, and none with sgd."""
    adam_betas: list[float] | str
    """Two decay rates of AdamW and lion. The momentum of --optimizer muon is always 0.95."""
    l2: float
    """Weight decay, applied to matrices only (not to norms and biases)."""
    max_norm: float
    """Clip the global gradient norm to this value; 0: no clipping."""
    seed: int
    """Seed of all random numbers."""
    num_episodes: int
    """Number of passes over the training data. The run ends after them, or earlier at --max_steps. Unset: 3 for given examples, as in TRL, and 1 in train_ppo."""
    max_steps: int | None
    """Largest number of steps; the end of --num_episodes may come earlier."""
    train_batch_size: int
    """Number of samples in one optimizer step, over all ranks. Unset: the samples of a step in train_ppo, 64 in train_sft, train_rm and train_prm, 32 in train_dpo and train_kto, from the sources of --learning_rate; fewer if the data would otherwise give fewer than 50 steps."""
    micro_train_batch_size: int | None
    """Maximum number of sequences in one forward and backward pass on one rank; unset: max_tokens_per_microbatch is the only limit."""
    max_tokens_per_microbatch: int
    """Maximum number of tokens in one forward and backward pass on one rank; with --sp_size, the ranks of a group split this number."""
    max_tokens_per_logprob_microbatch: int | None
    """Maximum number of tokens in one forward pass without gradients on one rank: log-probs of actor and reference, values, scores of reward models. Unset: max_tokens_per_microbatch, and the same micro-batches as in training."""
    batching: Literal['packed', 'dynamic', 'plain']
    """Grouping of sequences into micro-batches: packed combines any sequences so that all ranks finish together, dynamic combines similar lengths, plain keeps the order."""
    enable_ema: bool
    """Keep an exponential moving average of the actor's parameters, update it after each step, and save it too: model_ema."""
    ema_beta: float
    """Decay of the moving average per step."""
    save_path: str | Path
    """Folder of the run: final model, metrics, report, resolved configuration."""
    ckpt_path: str | Path | None
    """Folder of the checkpoints; unset: save_path/checkpoints."""
    save_steps: int
    """Number of steps between checkpoints; -1: no checkpoints."""
    save_minutes: float | None
    """Write a checkpoint also after the step in which so many minutes since the last one have passed, for machines that may vanish; unset: by steps alone."""
    max_ckpt_num: int
    """Maximum number of checkpoints to keep."""
    max_ckpt_mem: float
    """Maximum total size of the checkpoints to keep, in GB; the newest is always kept."""
    save_hf_ckpt: bool
    """Also write the model of each checkpoint into the folder `hf` beside it, in the format that from_pretrained and engines load."""
    async_save: bool
    """Write checkpoints in the background from a copy in host memory, while training continues; if the free memory of a host is less than twice the copy, training waits."""
    save_adapter_only: bool
    """With lora_rank: the final model is only the adapter in peft's format, not the model with the adapter merged into it."""
    push_to_hub: str | Path
    """Upload the final model with a card to this repository on the Hugging Face hub, owner/name. It is created as a private one if it does not exist. Empty: no upload."""
    load_checkpoint: bool
    """Resume from the newest complete checkpoint; start from the beginning if there is none. A run that torchrun restarts after the failure of a rank or the loss of a node resumes without this flag."""
    fork_from: str | Path
    """Folder of another run to continue from, in the folder --save_path and with the flags of this run. Its checkpoint is the one that --at names."""
    at: int | None
    """Number of steps that the checkpoint of --fork_from covers; unset: the newest one."""
    dry_run: bool
    """Print the plan of the run on the processes that were started (problems, layout, bytes of a rank in each phase, seconds), as `lightrft plan` does, and exit."""
    overwrite: bool
    """Start from the beginning in a folder that has the results of an earlier run; they are moved to FOLDER.previous."""
    stop_loss: float | None
    """In supervised training: end the run when the loss of a step is below this value."""
    eval_generate: str | Path
    """Evaluate by responses, too: flags of `lightrft evaluate` such as '--eval_data gsm8k=test.jsonl --generate_max_len 512', or a file with its configuration. The model answers these prompts at --eval_steps and at the end."""
    eval_steps: int
    """Number of steps between evaluations, with one more at the end; -1: only at the end."""
    logging_steps: int
    """Number of steps between reports of metrics."""
    report_to: str | list[str]
    """Destinations of metrics and samples, separated by commas, or a list in YAML: tensorboard (files in save_path/tensorboard), wandb, mlflow, swanlab, trackio, comet_ml, and jsonl for the files metrics.jsonl and samples.jsonl, always written."""
    tracker_project: str | Path
    """Project of the run in the trackers of --report_to; in MLflow the experiment."""
    tracker_run_name: str | Path | None
    """Name of the run in the trackers of --report_to; unset: the name of the folder --save_path."""
    tracker_org: str | Path | None
    """Team or user that owns the project, in Weights & Biases, SwanLab and Comet; unset: your own."""
    tracker_group: str | Path | None
    """Group of runs in Weights & Biases, SwanLab and Trackio."""
    trace_steps: int
    """Number of steps in the timeline save_path/trace.json, the first ones after every start or resume: the activity of each rank over time, for https://ui.perfetto.dev. 0: none."""
    digests: bool
    """Write 16 bytes for each phase of each step to save_path/digests.jsonl, from which `lightrft bisect` finds where two runs begin to differ."""
    model: Model
    tokenizer: PreTrainedTokenizerBase
    train_dataset: Rows
    eval_dataset: Rows
    reward_funcs: Reward
    args: Any
    peft_config: Any
    processing_class: Any

def train_kto(
    config: ConfigOrFile = ...,
    **values: Unpack[TrainKtoFlags],
) -> TrainedRun: ...

class EvaluateFlags(TypedDict, total=False):
    pretrain: str | Path
    """Model to start from: a Hugging Face folder, a GGUF file or a hub name, as for all models here."""
    reward_pretrain: list[str] | str
    """Reward models: frozen models with a head of one score and the tokenizer of --pretrain. Each is a folder or hub name in the form PATH, PATH:WEIGHT or LABEL=PATH:WEIGHT. The scores are added to the result of --reward; with --reward none they are the only reward."""
    process_reward_pretrain: list[str] | str
    """Process reward models, in the same form: the score at the end of each step of a response is the logit of the probability that the step is correct. --step_separator ends a step, and --step_rewards converts the probabilities to rewards."""
    bf16: bool
    """Compute in bfloat16 with float32 master weights; otherwise everything is float32. On a GPU with fast bfloat16 (NVIDIA from A100 and L4 on) this is the default; --no_bf16 turns it off."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_policy: Literal['full', 'selective', 'offload']
    """Activations to keep of each block: full keeps only the input; selective also keeps attention; offload keeps the input in host memory."""
    fused_kernels: Literal['none', 'liger']
    """liger: compute norms, rotary embeddings and feed-forward layers of Llama, Qwen, Gemma, OLMo and similar models with fused kernels, on an accelerator; requires the package liger-kernel. In float32, log-probs and gradients change by at most 1e-5."""
    trust_remote_code: bool
    """Run Python code that comes with the model. Use it only for sources that you trust."""
    prompt_data: Rows
    """Training data: a JSONL, JSON or parquet file, a folder of them or of Dataset.save_to_disk, a hub name, tasks, reasoning_gym:NAME or verifiers:NAME, or rows of Python, module:object or file.py:object. Several are separated by commas, or a list in YAML; each row is then drawn once in an epoch. In the form NAME:PROBABILITY, each row of a batch is drawn from a data set with this probability."""
    prompt_data_probs: list[float] | str
    """Probability of each data set of --prompt_data, another form of NAME:PROBABILITY."""
    prompt_split: str | Path
    """Split of the training data."""
    eval_split: str | Path
    """Split of the held-out data."""
    input_key: str | Path | None
    """Column of the prompt: a text, or chat messages as a list or JSON text. Unset: input, or the columns of a known form (docs/data.md)."""
    json_chats: Literal['auto', 'always', 'never']
    """Texts that are chat messages as JSON. auto: prompts whose objects have nothing but the keys of a message and known roles are messages, and answers are texts; always: prompts and answers whose objects have roles are messages; never: a text is a text."""
    images_key: str | Path | None
    """Column of a prompt's images: one path or a list of paths, relative to the folder of the data, or images of the datasets package; a row without images is a text prompt. In a chat, an image takes the place of <image> in the text, or precedes the text. The model must accept images."""
    videos_key: str | Path | None
    """Column of a prompt's videos: a file (.gif, .webp, or another one that FFmpeg reads), a list of images as frames, or a list of several. Unset: no videos."""
    audios_key: str | Path | None
    """Column of a prompt's clips of sound: a .wav file or another one that FFmpeg reads, one of the datasets package, or a list of several. Unset: no sound."""
    video_fps: float
    """Frames per second sampled from a video."""
    video_max_frames: int
    """Maximum number of frames sampled from a video, evenly spaced."""
    audio_sampling_rate: int
    """Sampling rate in Hz of the model, for example 16000: audio clips are resampled to it with the package av. 0: clips are not resampled, and one with another rate is a bad row."""
    check_media: Literal['all', 'first', 'none']
    """Images, videos and clips that are read completely when the data are loaded, in parallel processes: all of them, or only the ones in the first rows. A row with one that cannot be read is a bad row (--bad_rows). The start of each file is read in any case."""
    media_max_mb: float
    """Maximum size in MB of an image, video or audio file; a row with a larger file is a bad row."""
    media_urls: bool
    """Allow HTTP(S) URLs in the columns of media: each is fetched once on each host, into the temporary folder."""
    media_root: str | Path
    """Folder that the paths of images are relative to; no file outside of it is read. Empty: paths are relative to the folder of the data, and any path is allowed."""
    label_key: str | Path | None
    """Column of the correct answer: reward functions receive it as `label`, and SFT trains on it. For SFT, a row that ends in an answer needs none. For KTO it is true for a good answer, and for train_prm it is a list with a value for each step. Unset: label, or the column of a known form (docs/data.md)."""
    eval_input_key: str | Path | None
    """Column of the prompt in --eval_data; unset: --input_key."""
    eval_label_key: str | Path | None
    """Column of the correct answer in --eval_data; unset: --label_key."""
    reference_key: str | Path | None
    """Column of a reference answer: reward functions receive it as `reference`."""
    input_template: str | Path | None
    """Template with one {} of prompts that are text: in a shell $'Question: {}\\nAnswer: ', with a line break. Chat messages are not changed."""
    apply_chat_template: bool
    """Render prompts with the tokenizer's chat template. A response then also stops at the token that ends a turn of the template."""
    system_prompt: str | Path | None
    """System message for the chat template. A row with a system message of its own uses that one."""
    chat_template_kwargs: str | dict[str, Any]
    """Additional variables for the chat template as a JSON object: '{'enable_thinking': false}'. The column `chat_template_kwargs` of a row replaces them."""
    chat_template_date: str | Path
    """Date as YYYY-MM-DD for chat templates that write it; empty: the first day of the run, also after it is resumed."""
    prompt_max_len: int
    """Maximum length of a prompt in tokens; a row with a longer prompt is a bad row."""
    max_samples: int | None
    """Use only this number of rows from the beginning of each training data set."""
    max_eval_samples: int | None
    """Use only this number of rows from the beginning of the held-out data."""
    data_cache: str | Path
    """Folder for tokenized data in Arrow files that are mapped into memory and used again, for data larger than memory; empty: every process tokenizes the data and holds them in memory."""
    step_separator: str | Path
    """For process reward models: text that ends each step of an answer except the last. It is part of the step, and the score of the step is at its last token."""
    bad_rows: Literal['stop', 'skip']
    """Handling of a malformed or too long row: stop ends the run before a model is loaded and names the file and line, skip omits it and reports how many there are, and the first ones. With skip, train_ppo also leaves out prompts whose media cannot be read any more when they are drawn."""
    strategy: str | Path
    """Distributed backend: fsdp, deepspeed, or a subclass of StrategyBase as module:Class or file.py:Class. auto: deepspeed with --fsdp false or a flag that only ZeRO has, else fsdp."""
    fsdp: bool
    """Shard with FSDP2: short for --strategy fsdp; --fsdp false is short for --strategy deepspeed."""
    fsdp_cpu_offload: bool
    """Keep parameters and optimizer states in host memory, and copy shards to the device when they are used."""
    reduce_gradients_once: bool
    """FSDP2: reduce gradients over the ranks only after the last micro-batch of an optimizer step. This communicates less, but until then every rank keeps the gradient of the whole model, four bytes per parameter. By default gradients are sharded after every micro-batch."""
    gather_parameters_once: bool
    """FSDP2: keep gathered parameters on the device from the first micro-batch of an optimizer step until the last one. This communicates less, but until then every rank keeps the whole model, with --bf16 two bytes per parameter. By default each micro-batch gathers each block twice."""
    zero_stage: Literal[0, 1, 2, 3]
    """Stage of ZeRO: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    zpg: int
    """ZeRO-3: number of consecutive ranks, usually one node, that keep a secondary copy of the parameters and gather them within the group."""
    adam_offload: bool
    """ZeRO: keep optimizer states in host memory and update the parameters there."""
    param_offload: bool
    """ZeRO-3: keep parameters in host memory and copy them to the device layer by layer."""
    overlap_comm: bool
    """ZeRO: reduce gradients during the backward pass; uses more memory."""
    reduce_dtype: Literal['fp32', 'bf16']
    """With --bf16: dtype of the gradients while they are reduced over ranks; bf16 halves the traffic. FSDP2 accumulates them over micro-batches in float32 either way, ZeRO in this dtype."""
    offload_idle: bool
    """Keep only the models and optimizers of the current phase in device memory; all others wait in host memory."""
    dp_replicate: int
    """Hybrid sharding: number of replicas of the model; each one is sharded over a share of the data ranks. 0: every data rank has a replica of its own. That is the fastest for a model that fits on each: only gradients are communicated."""
    tp_size: int
    """Tensor parallelism: number of consecutive ranks that split each layer of the trained models; they process the same data."""
    tp_sequence_parallel: bool
    """Split the tokens between attention and feed-forward layers over the --tp_size ranks: less memory, same traffic."""
    ep_size: int
    """Expert parallelism: number of consecutive ranks that divide the experts of each layer of a mixture; each token visits the ranks of its experts. The other parameters are sharded as without it."""
    sp_size: int
    """Sequence parallelism: number of ranks that split the tokens of each micro-batch of the trained models."""
    sp_impl: Literal['auto', 'ulysses', 'zigzag']
    """Implementation of attention with --sp_size: ulysses exchanges tokens for heads (all-to-all), zigzag gathers keys and values. auto: ulysses."""
    cp_size: int
    """Context parallelism: short for --sp_size N --sp_impl zigzag."""
    sample_store: Literal['memory', 'transfer_queue']
    """Transport of samples between ranks within a step: memory sends each value directly to the rank that computes with it; transfer_queue writes all of them to a TransferQueue on a Ray cluster (RAY_ADDRESS), where other programs can read them."""
    deterministic: bool
    """On an accelerator, train only with kernels that give bitwise equal results in every run, as a CPU always does: attention's backward pass is slower and uses more memory. Torch raises an error for an operation without such a kernel. The engine's kernels are not covered. Turns of episodes begin together, as on a CPU, so each waits for the slowest program of the turns before."""
    timeout_minutes: float
    """End the run when a collective waits longer than this; every rank then logs which ranks are late and the position of each rank."""
    arrival_minutes: float
    """End the run when a rank waits longer than this for the others at the start; the message names the missing ranks."""
    phase_minutes: float
    """End the run when a phase, such as generate or train, takes longer than this on all ranks; every rank then logs the position of each rank."""
    engine_type: str | Path
    """Generation engine: vllm, sglang, hf (transformers), or a subclass of Engine as module:Class or file.py:Class. auto: the first of vllm and sglang that is installed, else hf."""
    engine_tp_size: int
    """Tensor parallelism of the engine: number of consecutive ranks that share the weights of one engine."""
    engine_mem_util: float
    """Fraction of an accelerator's memory for the engine while it is awake: vLLM counts everything it uses, SGLang weights and cache."""
    engine_kv_cache_gb: float
    """Size of the key-value cache of vLLM or SGLang on a CPU, in GB."""
    enable_engine_sleep: bool
    """Put the engine to sleep during training, so that both fit on one device."""
    engine_sleep_level: Literal[1, 2]
    """Level 1 keeps the weights of the sleeping engine in host memory; level 2 discards them, because they are streamed in again in any case. If the engine gets only adapters (lora_sync), the default is 1, and level 2 makes each stream bring all weights. With --speculative eagle3 or mtp on an accelerator it is 1 too, because vLLM loses memory of these at level 2."""
    engine_enforce_eager: bool
    """Run vLLM or SGLang without CUDA graphs. A CPU has none; there, vLLM compiles its forward pass with --engine_args '{'enforce_eager': false}'."""
    engine_args: str | dict[str, Any]
    """More arguments of vLLM (EngineArgs) or SGLang (ServerArgs) as a JSON object: '{'kv_cache_dtype': 'fp8', 'max_num_seqs': 512}'. They replace arguments that are set here, except those that a flag sets or that samples depend on."""
    limit_mm_image_per_prompt: int
    """Maximum number of images in one prompt; the engine reserves memory for them."""
    limit_mm_video_per_prompt: int
    """Maximum number of videos in one prompt. The default is 0, because vLLM reserves memory for the longest video that would fit."""
    limit_mm_audio_per_prompt: int
    """Maximum number of audio clips in one prompt."""
    micro_rollout_batch_size: int
    """Number of prompts that the hf engine generates at once."""
    speculative: Literal['none', 'ngram', 'group', 'draft', 'eagle3', 'mtp']
    """Source of draft tokens for speculative decoding in vLLM. It does not change the sampled distribution. ngram, the prompt and the response itself; group, all responses to the same prompt; draft, a small model; eagle3, an EAGLE-3 head; mtp, the layers of the model that predict several tokens. No drafts are verified at batch sizes where measurements show no gain."""
    num_draft_tokens: int
    """With speculative: maximum number of tokens in one draft."""
    draft_pretrain: str | Path
    """Model of --speculative draft, with the vocabulary of --pretrain, or head of --speculative eagle3: a folder or hub name."""
    weight_sync_bucket_mb: int
    """Size of one bucket of the weight stream in MB; the peak of additional memory is about two buckets. 0: an eighth of the free device memory at the beginning of the stream, on the rank that has the least; 512 on a CPU."""
    verify_weight_sync: bool
    """Compare fingerprints of the weights that were sent with those in the engine after every stream, and stop the run if they differ. The first time and every 128th time all weights are compared, otherwise every 128th row of each, so that 128 streams verify every element again."""
    rollout_batch_size: int
    """Number of prompts in one step, over all ranks. Unset: 128, or fewer if the data would otherwise give fewer than 50 steps."""
    n_samples_per_prompt: int
    """Number of responses sampled for each prompt; they form a group."""
    generate_max_len: int
    """Maximum length of a response in tokens."""
    temperature: float
    """Sampling temperature; all log-probs are computed at this temperature."""
    top_p: float
    """Sample only from the most likely tokens whose probabilities add up to this; all log-probs are computed over these tokens."""
    top_k: int
    """Sample only from the k most likely tokens; all log-probs are computed over these tokens. 0: all tokens."""
    min_p: float
    """Sample only from tokens with at least this share of the probability of the most likely one; all log-probs are computed over these tokens. 0: all tokens."""
    stop: list[str] | str
    """Texts that end a response, including special tokens; the token that completes one is the last of the response. As texts may contain commas, several are separated by spaces, or are a list in YAML."""
    stop_token_ids: list[int] | str
    """Tokens that end a response, in addition to the model's end tokens."""
    bad_words: list[str] | str
    """Words that are never sampled as one token, also after a space; all log-probs are computed accordingly. A word of several tokens is refused. As words may contain commas, several are separated by spaces, or are a list in YAML."""
    banned_token_ids: list[int] | str
    """Tokens that are never sampled; all log-probs are computed without them."""
    min_tokens: int
    """Minimum length of a response in tokens: before it, no token is sampled that would end the response; all log-probs are computed accordingly."""
    first_token_temperature: float | None
    """Sample the first token of a response at this temperature, for diversity (FIRE; 30 in the paper). This token is not trained on."""
    eval_temperature: float | None
    """Temperature of the samples of --eval_n_samples; unset: --temperature."""
    eval_n_samples: int
    """Number of responses that evaluation also samples for each prompt, to report how often any of k is correct (pass@k)."""
    environment: str | Path
    """Class or async function that makes a response an episode of several turns: file.py:Class, file.py:function or module:object; verifiers:NAME is an environment of verifiers, openenv:URL an OpenEnv server, and harbor:FOLDER a folder with tasks of Harbor. --reward environment takes the rewards from it. Empty: a response is one turn."""
    agent: str | Path
    """Async function (client, row) that makes a response an episode, and returns the reward: file.py:function or module:function. The client is openai.AsyncOpenAI, connected to a server in the same process that answers with turns of the trained model, also to Anthropic's Messages."""
    tools: list[str] | str
    """Functions that the model may call: file.py, file.py:function, module:function, calculator or python. The chat template describes them from types and docstrings. mcp:COMMAND and mcp:http://host:8000/mcp are the tools of an MCP server; each episode has a connection of its own, and with a command a server process of its own."""
    tool_parser: str | Path
    """Format of tool calls. hermes: <tool_call>{'name': ..., 'arguments': {...}}</tool_call>, as Qwen models write them too. Others are parsers of the engine by name, such as vLLM's llama3_json, pythonic or deepseek_v3 and SGLang's llama3."""
    max_turns: int
    """Maximum number of turns of an episode. All tokens of turns and observations count for generate_max_len."""
    agent_sampling: Literal['run', 'refuse']
    """Answer to an agent's request with other sampling parameters than the run's. run: the turn is sampled as the run says, and agent/overridden_NAME counts such requests. refuse: an error. Both honour the largest number of tokens and stop texts of a request."""
    agent_branches: int
    """Maximum number of other conversations of an episode, beside the first one: of sub-agents, after a history was summarized or edited, or of requests at the same time. A request for one more is refused."""
    agent_record: str | Path
    """SQLite file for each request to an agent's server, with the reply, tokens and log-probs; with several ranks, each has its own: agent.rank0.sqlite for agent.sqlite. `lightrft agents replay` sends the requests again."""
    turn_max_len: int | None
    """Maximum length of a turn in tokens; unset: all tokens that are left in the episode."""
    episode_minutes: float | None
    """Time limit in minutes for an episode: the turn that reaches it is the last one. Unset: no limit."""
    tool_seconds: float
    """Time limit in seconds for a call of a tool. If a call takes longer, the model reads an error instead of the result."""
    environment_minutes: float
    """Time limit in minutes for an environment to ask for the next turn. If an environment takes longer, the process is killed, and nothing is learned from the episode."""
    environment_workers: int
    """Largest number of episodes that run on a rank at the same time, each in a process of its own."""
    environment_memory_gb: float
    """Memory in GB that the process of an episode may allocate; 0: no limit."""
    reward_key: str | Path | None
    """Column that names the rewards and reward models for the row: a label, or a list of labels. Unset: all of them score every row."""
    reward_workers: int | None
    """Number of worker processes of each rank that call the reward function while other responses are generated. 0: call it in the rank's own process, when all responses are complete. Unset: 2, but 0 if none of the functions is slow: exact_match, number, choice, f1, format, length and none take microseconds."""
    reward_memory_gb: float
    """Memory in GB that a worker process may allocate for calls; 0: no limit."""
    reward_minutes: float
    """Time limit in minutes for a call of the reward function for one prompt. A call that takes longer fails, and the worker process is killed."""
    reward_failure: Literal['stop', 'zero', 'drop']
    """Action if a reward call raises, crashes, takes too long, or does not return a finite number for each response. The call is repeated for each response alone, to name one that fails. stop: end the run. zero: give 0 to the responses that fail. drop: do not train on any response to the prompt."""
    judge_url: str | Path
    """Address of the language model of --reward judge: an OpenAI-compatible server, such as http://host:8000/v1. If the server needs a key, set the environment variable JUDGE_API_KEY. engine: the trained model judges its own responses."""
    judge_model: str | Path
    """Name of the judge's model on the server."""
    judge_template: str | Path
    """File with the text that the judge gets, with {prompt}, {response} and any column of the data, such as {label}. Empty: a request to rate the response."""
    judge_pattern: str | Path
    """Regular expression with one group, the score; the last match in the judge's reply counts."""
    judge_range: list[float] | str
    """Lowest and highest score of the judge; the reward is 0 at the lowest and 1 at the highest one."""
    judge_max_tokens: int
    """Maximum length of the judge's reply in tokens."""
    server_minutes: float
    """Requests to a server of --reward, --judge_url or --teacher_url are repeated for this time in minutes while it is unreachable or busy."""
    reward_model_coef: float
    """Coefficient of the scores of --reward_pretrain and of the rewards of --process_reward_pretrain."""
    step_rewards: Literal['sum', 'mean', 'difference', 'min']
    """Rewards of the K steps of a response, computed from the probabilities p that they are correct. sum: p, so that long responses get more; mean: p / K; difference: the increase of p over the step before, so that the sum is the last p; min: only the least p, at that step."""
    seed: int
    """Seed of all random numbers."""
    save_path: str | Path
    """Folder of the run: final model, metrics, report, resolved configuration."""

def evaluate(
    config: ConfigOrFile = ...,
    *,
    model: Model | None = ...,
    tokenizer: PreTrainedTokenizerBase | None = ...,
    eval_data: Rows | None = ...,
    reward: Reward | None = ...,
    **values: Unpack[EvaluateFlags],
) -> dict[str, float]: ...
