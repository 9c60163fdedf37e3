"""One vLLM instance, driven in this process: admit prompts, step, collect finished groups, swap
weights.

Token-in, token-out: prompts arrive as token ids and nothing is tokenised again. One thread admits,
steps, installs and probes. Weights come through the policy group only (`receive`, then `install`),
so an engine starts with dummy weights and refuses to sample until the first version is installed.
Knows nothing about rewards, files or peers.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from slurm_grpo.config.schema import Config
from slurm_grpo.errors import DeadlineExceeded, SyncError
from slurm_grpo.types import Completion, FinishReason, Prompt

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_CACHE_PREFIX = "slurm_grpo_engine_"


@dataclass(kw_only=True, slots=True)
class FinishedGroup:
    """One admitted prompt; handed out once all its completions are there."""

    group_id: int
    tag: str
    prompt: Prompt
    sample_seed: int
    n: int
    t_submit: float = field(default_factory=time.time)
    by_index: dict[int, Completion] = field(default_factory=dict)

    @property
    def completions(self) -> list[Completion]:
        """By sample index; completion i was sampled with `sample_seed + i`."""
        return [self.by_index[i] for i in range(self.n)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveResult:
    """A version that is in staging, not yet in the model."""

    digest: str
    n_bytes: int
    transfer_s: float
    """Seconds until the last byte was in staging."""
    verify_s: float
    """Seconds of digests, and of waiting for the sender's."""


class Engine:
    """One vLLM engine with `tensor_parallel` workers; a single worker lives in this process."""

    def __init__(self, cfg: Config, *, seed: int, load_weights: bool = False) -> None:
        """`load_weights` also reads the weights of `model.path`, as version 0, for use without a
        trainer.
        """
        self._cfg = cfg
        self._sampling = cfg.generator.sampling
        self._cache_dir = _prepare_environment(cfg.generator.engine.enforce_eager)
        self._llm: LLMEngine = _build_llm_engine(cfg, seed, "auto" if load_weights else "dummy")
        self.tokenizer: Any = self._llm.get_tokenizer()
        self.installed_version: int | None = None
        """Version the model samples from; None while the weights are unusable."""
        self._requests: dict[str, tuple[FinishedGroup, int]] = {}
        self._n_admitted = 0
        self._finished: list[FinishedGroup] = []
        if load_weights:
            self._llm.set_weight_version("0")
            self.installed_version = 0

    @property
    def n_unfinished(self) -> int:
        """Completions admitted and not yet finished."""
        return len(self._requests)

    def admit(
        self,
        group_id: int,
        prompt: Prompt,
        sample_seed: int,
        n: int,
        *,
        greedy: bool = False,
        tag: str = "train",
    ) -> None:
        """Queue `n` completions of a prompt; completion i samples with seed `sample_seed + i`.

        (`tag`, `group_id`) comes back in the FinishedGroup. That prompt and completion fit is
        checked where the prompt is rendered.
        """
        self._check_usable()
        sampling = self._sampling
        group = FinishedGroup(
            group_id=group_id, tag=tag, prompt=prompt, sample_seed=sample_seed, n=n
        )
        token_ids = prompt.token_ids.tolist()
        for index in range(n):
            params = _sampling_params(
                temperature=0.0 if greedy else sampling.temperature,
                max_tokens=sampling.max_new_tokens,
                stop=list(sampling.stop),
                seed=sample_seed + index,
                logprobs=0,
            )
            self._requests[self._add_request(token_ids, params)] = (group, index)

    def step(self) -> list[FinishedGroup]:
        """Run one engine step; returns the groups that are complete. Returns at once when nothing
        is admitted.
        """
        if self._requests:
            self._check_usable()
            self._advance()
        finished, self._finished = self._finished, []
        return finished

    def receive(
        self, store_address: str, epoch: int, first_rank: int, world_size: int, version: int
    ) -> ReceiveResult:
        """Receive a version into staging; the model is not touched.

        The workers' group ranks are `first_rank`, `first_rank + 1`, ...; the group is kept while
        the epoch stays the same. With one worker this may run in another thread than the one that
        steps. Call it once the sender has announced the transfer. Raises SyncError or
        DeadlineExceeded, after which the epoch is over for this engine.
        """
        init_info = dict(
            store_address=store_address,
            epoch=epoch,
            first_rank=first_rank,
            world_size=world_size,
            timeout_s=self._cfg.weight_sync.transfer_timeout_s,
        )
        replies = self._llm.collective_rpc("receive_policy", args=(init_info, version))
        _raise_first(replies, f"receiving version {version}")
        digests = {reply["digest"] for reply in replies}
        if len(digests) != 1:
            raise SyncError(
                f"weights: the workers of this engine received different bytes: {sorted(digests)}."
            )
        return ReceiveResult(
            digest=digests.pop(),
            n_bytes=replies[0]["n_bytes"],
            transfer_s=max(reply["transfer_s"] for reply in replies),
            verify_s=max(reply["verify_s"] for reply in replies),
        )

    def install(self, version: int) -> float:
        """Load the staged version; running requests go on with it, their KV cache recomputed.

        Returns the seconds that loading took. Raises SyncError when loading fails: the weights are
        then unusable, and nothing may be sampled, until a later install succeeds.
        """
        self.installed_version = None
        replies = self._llm.collective_rpc("install_policy", args=(version,))
        _raise_first(replies, f"installing version {version}")
        self._llm.set_weight_version(str(version))
        self.reset_cache()
        self.installed_version = version
        return float(max(reply["load_s"] for reply in replies))

    def reset_cache(self) -> None:
        """Empty the prefix cache and recompute running requests; SyncError when vLLM refuses."""
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise SyncError(
                "weights: vLLM refused to reset its prefix cache, whose blocks belong to old "
                "weights. Install again."
            )

    def probe_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token after the first, given the tokens before it; nats, at
        temperature 1.
        """
        self._check_usable()
        params = _sampling_params(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        probe = self._add_request(list(token_ids), params)
        while (output := self._advance(probe)) is None:
            pass
        return [
            position[token].logprob
            for token, position in zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]

    def shutdown(self) -> None:
        """End the workers and remove what the engine left on this host."""
        self._llm.engine_core.shutdown()
        if self._cache_dir is not None:
            shutil.rmtree(self._cache_dir, ignore_errors=True)

    def _check_usable(self) -> None:
        if self.installed_version is None:
            raise SyncError(
                "the engine holds no usable weights: install a version before sampling."
            )

    def _add_request(self, token_ids: list[int], params: Any) -> str:
        request_id = str(self._n_admitted)
        self._n_admitted += 1
        prompt: Any = {"type": "token", "prompt_token_ids": token_ids}
        self._llm.add_request(request_id, prompt, params)
        return request_id

    def _advance(self, probe: str | None = None) -> Any:
        """Step once and file what finished; returns the output of the request `probe` when it is
        among that.
        """
        probed = None
        for output in self._llm.step():
            if output.request_id == probe:
                probed = output
                continue
            group, index = self._requests.pop(output.request_id)
            group.by_index[index] = _completion(output, group.t_submit)
            if len(group.by_index) == group.n:
                self._finished.append(group)
        return probed


def _completion(output: Any, t_submit: float) -> Completion:
    """Convert vLLM's output of one finished request."""
    sampled = output.outputs[0]
    if sampled.finish_reason not in get_args(FinishReason):
        raise ValueError(f"vLLM ended a request with the unknown reason {sampled.finish_reason!r}")
    versions = np.full(len(sampled.token_ids), -1, dtype=np.int32)
    for span in sampled.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise ValueError(f"vLLM labelled no weight version on some tokens: {versions.tolist()}")
    to_unix = time.time() - time.monotonic()
    return Completion(
        token_ids=np.asarray(sampled.token_ids, dtype=np.int32),
        logprobs=np.asarray(sampled.logprobs.logprobs, dtype=np.float32),
        policy_versions=versions,
        finish_reason=sampled.finish_reason,
        text=sampled.text,
        t_submit=t_submit,
        t_first_token=to_unix + output.metrics.first_token_ts,
        t_finish=to_unix + output.metrics.last_token_ts,
    )


def _sampling_params(**settings: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **settings,
        n=1,
        include_stop_str_in_output=True,
        flat_logprobs="logprobs" in settings,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _raise_first(replies: Sequence[dict[str, Any]], doing: str) -> None:
    """Raise the error of the first worker that reported one."""
    for worker, reply in enumerate(replies):
        if "error" in reply:
            kind: Callable[[str], Exception] = DeadlineExceeded if reply["deadline"] else SyncError
            raise kind(f"{doing}, worker {worker}: {reply['error']}")


def _prepare_environment(eager: bool) -> Path | None:
    """Settings that vLLM reads from the environment when it is imported; returns the cache
    directory made, if any.

    Concurrent engines would corrupt one cache on a shared file system, so each has its own on this
    node.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",  # workers of one engine share a host
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if eager:
        # vLLM compiles one sampling helper even then: twenty seconds before the first token.
        defaults["TORCH_COMPILE_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    unset = [
        n
        for n in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        if n not in os.environ
    ]
    if not unset:
        return None
    _sweep_caches()
    directory = Path(tempfile.mkdtemp(prefix=f"{_CACHE_PREFIX}{os.getpid()}_"))
    for name in unset:
        os.environ[name] = str(directory / name.lower())
    return directory


def _sweep_caches() -> None:
    """Remove the caches of this user's engines that were killed on this host."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_CACHE_PREFIX}*_*"):
        pid = directory.name.removeprefix(_CACHE_PREFIX).partition("_")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(directory, ignore_errors=True)


def _register_model_class(model_path: str) -> None:
    """Import the model's class here; vLLM would start an interpreter to look at it, for some ten
    seconds.
    """
    from vllm import ModelRegistry

    config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    for architecture in config.get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


def _build_llm_engine(cfg: Config, seed: int, load_format: str) -> LLMEngine:
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    from slurm_grpo.weights import receiver as weight_receiver

    engine = cfg.generator.engine
    if engine.tensor_parallel == 1:
        _register_model_class(cfg.model.path)
    if current_platform.is_cpu():
        memory: dict[str, Any] = {"kv_cache_memory_bytes": int(engine.kv_cache_gib * 2**30)}
    else:
        # Versions arrive whole beside the model: that much must not become KV cache.
        files = Path(cfg.model.path).glob("model*.safetensors")
        staging = sum(f.stat().st_size for f in files) * (2 if engine.dtype == "float32" else 1)
        share = staging / current_platform.get_device_total_memory()
        memory = {"gpu_memory_utilization": engine.gpu_memory_utilization - share}
    args = EngineArgs(
        model=cfg.model.path,
        load_format=load_format,
        dtype=engine.dtype,
        seed=seed,
        tensor_parallel_size=engine.tensor_parallel,
        distributed_executor_backend="mp" if engine.tensor_parallel > 1 else None,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
        enforce_eager=engine.enforce_eager,
        enable_prefix_caching=True,
        use_tqdm_on_load=False,
        # vLLM on CPUs cannot prefill a seeded request in several chunks.
        enable_chunked_prefill=False,
        # A batch in flight would be labelled with the version that is installed while it runs.
        async_scheduling=False,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # never sampling defaults out of the model directory
        weight_transfer_config=WeightTransferConfig(backend=weight_receiver.BACKEND),
        worker_extension_cls=f"{weight_receiver.__name__}.PolicyWorkerExtension",
        **memory,
    )
    return LLMEngine.from_engine_args(args)
