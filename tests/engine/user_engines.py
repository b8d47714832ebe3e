"""Engines as users would write them: one that keeps the contract, and some that break it."""

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from lightrft.core.engine import ABORTED
from lightrft.core.samples import Completion
from lightrft.engine.start import FolderEngine


class Plain(FolderEngine):
    """Computes one token of each response at a time, and caches nothing."""

    def __init__(self, setup):
        super().__init__(setup)
        model = AutoModelForCausalLM.from_pretrained(setup.model_path, dtype=setup.dtype)
        self.model = model.to(setup.device).requires_grad_(False)
        self.weights = dict(self.model.named_parameters())
        self.weights_valid = not setup.from_stream
        self.running = {}

    def _add(self, key, request):
        self.running[key] = request, [Completion([], [], ABORTED) for _ in request.seeds]

    def _step(self):
        rows = [
            (request, sample, seed)
            for request, samples in self.running.values()
            for sample, seed in zip(samples, request.seeds, strict=True)
            if sample.finish_reason == ABORTED
        ]
        ids = [torch.tensor(request.prompt + sample.token_ids) for request, sample, _ in rows]
        logits = self.model(pad_sequence(ids, batch_first=True).to(self.device)).logits
        for (request, sample, seed), own, row in zip(rows, ids, logits, strict=True):
            self.sample(row[len(own) - 1], request.sampling, seed, sample)
        keys = [
            key
            for key, (_, samples) in self.running.items()
            if all(sample.finish_reason != ABORTED for sample in samples)
        ]
        return [(key, self._abort(key)) for key in keys]

    def sample(self, logits, sampling, seed, sample):
        scaled = logits[None].float() / (sampling.temperature or 1)
        logprobs = sampling.truncation(scaled)[0].log_softmax(-1)
        cumulative = logprobs.double().exp().cumsum(-1)
        noise = np.random.default_rng([seed, len(sample.token_ids)]).random() * cumulative[-1]
        drawn = torch.searchsorted(cumulative, noise, right=True)
        token = int(drawn if sampling.temperature else logprobs.argmax())
        sample.token_ids.append(token)
        sample.logprobs.append(logprobs[token].item())
        if token in self.vocabulary.end_token_ids | {*sampling.stop_token_ids}:
            sample.finish_reason = "stop"
        elif len(sample.token_ids) == sampling.max_tokens:
            sample.finish_reason = "length"

    def _abort(self, key):
        return self.running.pop(key)[1]

    def _num_sampled(self, key):
        return [len(sample.token_ids) for sample in self.running[key][1]]

    def _load_weights(self, named_tensors):
        for name, tensor in named_tensors:
            self.weights[name].copy_(tensor)

    def _engine_fingerprints(self, prints):
        for name, tensor in self.weights.items():
            prints.add(name, tensor)
        return prints.numbers(self.device)

    def prompts_at_once(self, n):
        return 8

    def _num_cached(self):
        return 0

    def reset_cache(self): ...
    def _leave_cache(self): ...
    def _sleep(self, level): ...
    def _wake(self, half): ...
    def _close(self): ...


class ForgetsTheTemperature(Plain):
    """Its log-probs are those of temperature 1."""

    def sample(self, logits, sampling, seed, sample):
        super().sample(logits, sampling, seed, sample)
        temperature = sampling.temperature or 1
        at_one = sampling.truncation(logits[None] / temperature)[0] * temperature
        sample.logprobs[-1] = at_one.log_softmax(-1)[sample.token_ids[-1]].item()


class DropsTheStopToken(Plain):
    def sample(self, logits, sampling, seed, sample):
        super().sample(logits, sampling, seed, sample)
        if sample.token_ids[-1] in sampling.stop_token_ids:
            sample.token_ids.pop()
            sample.logprobs.pop()


class IgnoresTheSeed(Plain):
    def sample(self, logits, sampling, seed, sample):
        super().sample(logits, sampling, int(torch.randint(2**32, ())), sample)


class KeepsTheOldWeights(Plain):
    def _load_weights(self, named_tensors):
        for _ in named_tensors:
            pass


class KeepsTheTrainersTensors(Plain):
    def _load_weights(self, named_tensors):
        for name, tensor in named_tensors:
            self.weights[name].data = tensor.data
